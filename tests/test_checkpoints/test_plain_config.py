"""Settings of a checkpoint's config are read, and not run."""

from __future__ import annotations

from typing import Any

import pytest
from mmengine.registry import MODELS, Registry

from mmgate.checkpoints.plain_config import literal_setting, running_part


@pytest.mark.parametrize(
    ('text', 'value'),
    [
        ("model = dict(type='M', layers=[dict(width=1)])", dict(type='M', layers=[dict(width=1)])),
        ("model = dict(keys=dict({'a.b': (1, None)}))", dict(keys={'a.b': (1, None)})),
        ('model = 1\nmodel = -2.5', -2.5),
        ('other = 1', None),
        ("model = dict(type=open('x'))", None),
        ('model = dict(', None),
    ],
    ids=['nested', 'keys that are no names', 'the last', 'absent', 'a call', 'no Python'],
)
def test_a_setting_is_read_and_not_run(text: str, value: Any) -> None:
    assert literal_setting(text, 'model') == value


def test_a_project_with_registries_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model = dict(type='project_of_mine.Net')"
    assert running_part(text) == "line 1, type='project_of_mine.Net'"
    monkeypatch.setitem(MODELS.children, 'project_of_mine', Registry('model', scope='project_of_mine'))
    assert running_part(text) is None

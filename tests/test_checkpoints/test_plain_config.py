"""A checkpoint's config may name the classes of projects that have registries, and nothing else that runs."""

from __future__ import annotations

import pytest
from mmengine.registry import MODELS, Registry

from mmgate.checkpoints.plain_config import running_part


def test_a_project_with_registries_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model = dict(type='project_of_mine.Net')"
    assert running_part(text) == "line 1, type='project_of_mine.Net'"
    monkeypatch.setitem(MODELS.children, 'project_of_mine', Registry('model', scope='project_of_mine'))
    assert running_part(text) is None

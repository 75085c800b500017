"""What cannot be done with gates is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from helpers.finetuned import layers
from mmengine.registry import MODELS

import mmgate
from mmgate.errors import ConfigError


@pytest.mark.parametrize(
    ('ask', 'words'),
    [
        (lambda folder: mmgate.train_only_gates(layers(())), 'has no gates'),
        (lambda folder: mmgate.save_gates(layers(()), folder / 'x'), 'has no gates'),
        (lambda folder: mmgate.save_gates(layers(), folder / 'no/such/folder/x'), 'cannot be written'),
        (lambda folder: mmgate.train_only_gates(layers(), 'gate'), "'gates', 'attention', 'all'"),
        (lambda folder: MODELS.build(dict(type='mmgate.Gated', host='mmdet.DETR')), 'attention .* or gates'),
    ],
    ids=['train', 'save', 'folder', 'mode', 'config'],
)
def test_what_cannot_be_done_is_refused(ask: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(tmp_path)
    assert not list(tmp_path.iterdir())

"""The names of layers in a picture."""

from __future__ import annotations

import pytest

from mmgate.analysis.figures.style import layer_labels


@pytest.mark.parametrize(
    ('paths', 'labels'),
    [
        (['backbone.layers.0.attn', 'backbone.layers.1.attn'], ['0', '1']),
        (['encoder.0.self_attn', 'decoder.0.attn'], ['encoder.0.self_attn', 'decoder.0.attn']),
        (['layers.0.self_attn.attn', 'layers.0.cross_attn.attn'], ['0.self_attn', '0.cross_attn']),
        (['a.attn'], ['a.attn']),
    ],
)  # fmt: skip
def test_labels_leave_out_what_all_share(paths: list[str], labels: list[str]) -> None:
    assert layer_labels(paths) == labels

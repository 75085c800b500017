"""What all figures share: names of layers, axes."""

from __future__ import annotations

import pytest

from mmgate.analysis.figures import style
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


def test_values_from_zero_leave_room_above_the_largest() -> None:
    """Where they hardly differ as well, as ranks near the full one do."""
    _, axes = style.panels(1, 1, height=2.0)
    axis = axes[0, 0]
    axis.plot([31.9, 32.0, 31.95], marker='o')
    style.from_zero(axis)
    assert axis.get_ylim()[0] == 0 and axis.get_ylim()[1] > 33


def test_an_axis_without_values_keeps_its_limits() -> None:
    _, axes = style.panels(1, 1, height=2.0)
    axes[0, 0].plot([float('nan')] * 2)
    style.from_zero(axes[0, 0])
    assert axes[0, 0].get_ylim()[1] > 0.01

"""Sampling locations, from offsets."""

from __future__ import annotations

import pytest
import torch

from mmgate.ops.deformable import offset_locations


@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
def test_locations_from_16_bit_offsets_are_float32(columns: int) -> None:
    """As autocast gives them; in bfloat16 the locations themselves would be pixels off."""
    offsets = torch.linspace(-6, 6, 2 * 3 * 4 * 2).view(1, 2, 1, 3, 4, 2).bfloat16()
    reference = torch.rand(1, 2, 3, columns)
    shapes = torch.tensor([(100, 167), (50, 84), (25, 42)])
    locations = offset_locations(offsets, reference, shapes)
    exact = offset_locations(offsets.double(), reference.double(), shapes)
    pixels = (locations.double() - exact) * shapes.flip(-1)[:, None]
    assert locations.dtype is torch.float32 and pixels.abs().max() < 1e-3

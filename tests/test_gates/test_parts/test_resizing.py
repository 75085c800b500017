"""Positions of another resolution are resized."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmgate.gates.parts.resizing import resize_axis, resize_grid
from mmgate.ops.agent import interpolation_matrix


@pytest.mark.parametrize(
    'before, after, resized',
    [
        ((6, 10), (12, 20), True),
        ((12, 20), (25, 41), True),  # maps of strides that do not divide the image
        ((7, 7), (12, 20), True),
        ((4, 9), (6, 6), False),  # as many
        ((8, 18), (16, 36), False),  # or 12 x 12
        ((4, 6), (6, 7), False),
    ],
    ids=str,
)
def test_a_map_that_is_not_square_is_resized_where_its_shape_is_known(
    before: tuple[int, int], after: tuple[int, int], resized: bool
) -> None:
    """What may have two shapes, or is of neither, is not guessed at: loading it names its shape."""
    x = torch.randn(1, before[0] * before[1], 8)
    expected = F.interpolate(x.transpose(1, 2).unflatten(-1, before), size=after, mode='bilinear')
    actual = resize_grid(x, after)
    if resized:
        torch.testing.assert_close(actual, expected.flatten(2).transpose(1, 2))
    else:
        assert actual is x


def test_an_axis_that_is_resized_keeps_its_precision() -> None:
    half = torch.randn(2, 5, 3).half()
    assert resize_axis(half, 1, 9).dtype == torch.float16 and resize_axis(half, 1, 9).shape == (2, 9, 3)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    expected = torch.einsum('ij,ajb->aib', interpolation_matrix(5, 9, x), x)
    torch.testing.assert_close(resize_axis(x, 1, 9), expected)

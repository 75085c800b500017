"""The parts of agent attention's operator."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from mmgate.ops.agent import interpolation_matrix


@pytest.mark.parametrize('source, target', [(7, 56), (7, 5), (3, 12), (14, 14), (2, 1)])
def test_interpolation_matrix_is_bilinear_interpolation(source: int, target: int) -> None:
    x = torch.randn(1, 2, source, 3, dtype=torch.float64)
    expected = F.interpolate(x, size=(target, 3), mode='bilinear')
    torch.testing.assert_close(interpolation_matrix(source, target, x) @ x, expected)

"""Stripes and windows of a map."""

from __future__ import annotations

import pytest
import torch

from mmgate.gates.parts.stripes import merge_stripes, split_stripes


@pytest.mark.parametrize('stripe', [(2, 2), (4, 1), (3, 5), (4, 6)], ids=str)
def test_stripes_of_a_map_merge_to_the_map(stripe: tuple[int, int]) -> None:
    x = torch.randn(2, 24, 3)
    stripes = split_stripes(x, (4, 6), stripe)
    assert stripes.shape[1] == stripe[0] * stripe[1]
    assert torch.equal(merge_stripes(stripes, (4, 6), stripe), x)
    image = x.view(2, 4, 6, 3)
    assert torch.equal(stripes[0], torch.nn.functional.pad(image[0], (0, 0, 0, 9, 0, 9))[
        : stripe[0], : stripe[1]].flatten(0, 1))  # fmt: skip

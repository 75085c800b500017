"""Masks in torch's forms become one bias; what gates make of it, dead rows too, is tested in test_gates."""

from __future__ import annotations

import math

import pytest
import torch

from mmgate.ops.masks import merge_masks

B, H, N, M = 2, 3, 4, 5


@pytest.mark.parametrize('shape', [(N, M), (B * H, N, M), (B, H, N, M), (B, 1, N, M)], ids=str)
@pytest.mark.parametrize('kind', [torch.bool, torch.float32], ids=['bool', 'float'])
def test_a_mask_of_each_form_is_added_to_the_logits(shape: tuple[int, ...], kind: torch.dtype) -> None:
    """A mask of three axes has the heads of one image side by side, as torch has it."""
    mask = torch.rand(shape)
    mask[..., 0] = 0  # each row keeps a key
    added = mask
    if kind is torch.bool:
        mask = mask > 0.5
        added = torch.zeros(shape).masked_fill(mask, -math.inf)
    bias, dead = merge_masks(mask, None, B, H, torch.float64)
    assert bias is not None and dead is not None
    assert bias.dtype is torch.float64 and not dead.any()
    expected = added.view(B, H, N, M) if len(shape) == 3 else added
    torch.testing.assert_close(bias.expand(B, H, N, M), expected.expand(B, H, N, M).double())

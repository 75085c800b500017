"""Masks in torch's forms become one bias, and rows that may attend to nothing are told."""

from __future__ import annotations

import math

import pytest
import torch

from mmgate.ops.masks import merge_masks

B, H, N, M = 2, 3, 4, 5


def test_no_masks_are_no_bias() -> None:
    assert merge_masks(None, None, B, H, torch.float32) == (None, None)


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


def test_padding_and_mask_add_up() -> None:
    mask = torch.randn(N, M)
    padding = torch.tensor([[False] * M, [False, False, True, True, True]])
    bias, dead = merge_masks(mask, padding, B, H, torch.float32)
    assert bias is not None and dead is not None and not dead.any()
    expected = mask.expand(B, 1, N, M).clone()
    expected[1, :, :, 2:] = -math.inf
    torch.testing.assert_close(bias, expected)


def test_a_row_without_a_key_is_dead_and_has_no_bias() -> None:
    """It is masked by both together; the others keep what they have."""
    mask = torch.zeros(N, M, dtype=torch.bool)
    mask[1, :2] = True
    padding = torch.tensor([[False] * M, [False, False, True, True, True]])
    bias, dead = merge_masks(mask, padding, B, H, torch.float32)
    assert bias is not None and dead is not None
    assert dead.shape == (B, 1, N, 1) and dead.nonzero().tolist() == [[1, 0, 1, 0]]
    assert not bias[1, 0, 1].any() and bias[1, 0, 0].tolist() == [0, 0] + [-math.inf] * 3


@pytest.mark.parametrize(
    ('mask', 'padding', 'message'),
    [
        ((B, N, M), None, r'attn_mask must be \(N, M\), .* with B=2, H=3, got \(2, 4, 5\)'),
        ((M,), None, r'attn_mask must be .*, got \(5,\)'),
        ((B, 2, N, M), None, r'attn_mask must be .*, got \(2, 2, 4, 5\)'),
        (None, (M,), r'key_padding_mask must be \(B, M\) with B=2, got \(5,\)'),
        (None, (3, M), r'key_padding_mask must be \(B, M\) with B=2, got \(3, 5\)'),
        ((N, M), (B, 4), r'key_padding_mask \(2, 4\) and attn_mask \(1, 1, 4, 5\) differ in keys'),
    ],
    ids=['images alone', 'keys alone', 'heads', 'padding of keys', 'padding of more images', 'other keys'],
)
def test_a_mask_of_another_shape_is_refused(
    mask: tuple[int, ...] | None, padding: tuple[int, ...] | None, message: str
) -> None:
    given = [None if shape is None else torch.zeros(shape, dtype=torch.bool) for shape in (mask, padding)]
    with pytest.raises(ValueError, match=message):
        merge_masks(*given, B, H, torch.float32)

"""The convolution of linear angular attention beside a class token; its formula is tested with the others'."""

from __future__ import annotations

import torch
from helpers.families import HEADS, C

from mmgate.gates import LinearAngularAttention


def test_angular_convolves_a_class_token_in_its_row_or_not_at_all() -> None:
    """Along the tokens as published, it stands before the first; over the map it is left out."""
    along, over = (LinearAngularAttention(C, HEADS, class_tokens=1, convolution=c) for c in ('tokens', 'map'))
    assert tuple(along.gate.dwc.weight.shape) == (HEADS, 1, 9, 1) and along.gate.dwc.bias is None
    assert tuple(over.gate.dwc.weight.shape) == (C, 1, 3, 3) and over.gate.dwc.bias is not None
    x = torch.randn(1, 1 + 16, C)
    flipped = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
    assert torch.allclose(over(flipped, (4, 4))[:, 0], over(x, (4, 4))[:, 0], atol=1e-6)
    assert not torch.allclose(along(flipped, (4, 4))[:, 0], along(x, (4, 4))[:, 0], atol=1e-3)

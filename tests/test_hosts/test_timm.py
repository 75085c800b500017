"""Attentions of timm that are special: GC ViT's windows, whose queries a whole image shares."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmgate._environment import available

if not available('timm'):  # an import may fail in other ways than by absence
    pytest.skip('needs timm: the extra "pretrain"', allow_module_level=True)
import timm
from timm.models.gcvit import WindowAttentionGlobal

from mmgate import swap_attention
from mmgate.hosts.timm import BY_IMAGE, shares_by_image

C, HEADS = 32, 4
PLUG = dict(type='PLuGMultiheadAttention')


def by_batch(self: Any, x: Tensor, q_global: Tensor) -> Tensor:
    """Attend as timm up to 1.0.29, which hands the global queries out by batch."""
    key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query = q_global.repeat(len(x) // len(q_global), 1, 1, 1).reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
    weights = self.rel_pos(query * self.scale @ key.transpose(-1, -2)).softmax(-1)
    return self.proj((weights @ value).transpose(1, 2).flatten(2))


def by_image(self: Any, x: Tensor, q_global: Tensor) -> Tensor:
    """Attend as timm since."""
    return by_batch(self, x, q_global.repeat_interleave(len(x) // len(q_global), dim=0))


@pytest.mark.parametrize('forward', [by_batch, by_image])
def test_global_queries_are_shared_as_the_host_does(forward: Callable[..., Tensor], monkeypatch: Any) -> None:
    """Of two images in three windows each."""
    monkeypatch.setattr(WindowAttentionGlobal, 'forward', forward)
    monkeypatch.setattr('mmgate.hosts.timm.BY_IMAGE', shares_by_image(forward))
    model: Any = nn.ModuleDict(dict(attn=WindowAttentionGlobal(C, HEADS, (2, 2)))).double()
    x, queries = torch.randn(6, 4, C, dtype=torch.float64), torch.randn(2, 2, 2, C, dtype=torch.float64)
    expected = model['attn'](x, queries)
    swap_attention(model, dict(PLUG, path='attn'))
    torch.testing.assert_close(model['attn'](x, queries), expected, rtol=1e-10, atol=1e-10)


def test_this_timm_is_told_apart() -> None:
    known = [int(part) for part in timm.__version__.split('.')[:3]]
    assert known[0] != 1 or known == [1, 0, 30] or (known > [1, 0, 29]) == BY_IMAGE

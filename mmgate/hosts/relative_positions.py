"""Adapter that lets gates into attention with decomposed relative positions, as in ViTDet and SAM's image encoder."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter
from mmgate.gates.parts.resizing import resize_axis


class RelativeAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into ViTDet's ``Attention`` and classes with the same attributes.

    A query's bias of a key is ``q Rh[y - y'] + q Rw[x - x']``, added to the logits after the gate. The tables, of
    distances down ``(2 H - 1, d)`` and to the right ``(2 W - 1, d)``, are interpolated where the map is not of their
    size; without ``use_rel_pos`` there are none.

    Source: MViTv2 (arXiv 2112.01526), Eq. 4; ViTDet (arXiv 2203.16527), section 3.
    """

    num_heads: int
    qkv: nn.Module
    proj: nn.Module
    use_rel_pos: bool
    rel_pos_h: Tensor
    rel_pos_w: Tensor

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels and heads off an attention module (the host), for its gate."""
        return Sizes(host.qkv.in_features, host.num_heads)

    def forward(self, x: Tensor) -> Tensor:
        """Attend over a map ``(B, H, W, C)``, or over each window of one, with the gate."""
        height, width = x.shape[1:3]
        tokens = x.flatten(1, 2)
        query, key, value = (self.gate.split_heads(part) for part in self.qkv(tokens).chunk(3, -1))  # (B, h, N, d)
        bias = None
        if self.use_rel_pos:
            map_ = query.unflatten(2, (height, width))  # (B, h, H, W, d)
            down = torch.einsum('bhyxd,ykd->bhyxk', map_, _distances(self.rel_pos_h, height))
            right = torch.einsum('bhyxd,xkd->bhyxk', map_, _distances(self.rel_pos_w, width))
            bias = (down[..., None] + right[..., None, :]).flatten(4).flatten(2, 3)  # (B, h, N, N)
        out = self.attend_gated((query, key, value), (tokens, tokens, tokens), self.proj, bias)
        return out.unflatten(1, (height, width))


def _distances(table: Tensor, size: int) -> Tensor:
    """Return a table's entries by distance ``i - j`` of query position i and key position j, ``(size, size, d)``."""
    table = resize_axis(table, 0, 2 * size - 1)
    positions = torch.arange(size, device=table.device)
    return table[positions[:, None] - positions + size - 1]

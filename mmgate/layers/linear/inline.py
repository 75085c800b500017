"""Injective linear attention (InLine)."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.linear_attention import inline_attention
from mmgate.registry import MODELS

from .base import LinearGate

KERNEL = 3


class InLineGate(LinearGate):
    """Linear attention normalised by a difference, plus a 3 x 3 neighbourhood with weights made from the mean token.

    Two linear layers, one block a head, turn the mean token into 9 weights a channel, with which the values around a
    token are added to it.

    Args:
        local: Add the neighbourhood.
        **kwargs: Those of :class:`~mmgate.layers.linear.base.LinearGate`.

    Source: Bridging the divide: reconsidering softmax and linear attention (Han et al., 2024), Eq. 5 and 7.
    """

    def __init__(self, sizes: Sizes, *, local: bool = True, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        self.local = (
            nn.Sequential(
                nn.Conv1d(self.embed_dims, self.embed_dims, 1, groups=self.num_heads),
                nn.GELU(),
                nn.Conv1d(self.embed_dims, KERNEL**2 * self.embed_dims, 1, groups=self.num_heads),
            )
            if local
            else None
        )

    def reset_gate(self) -> None:
        """Start the layers that make the neighbourhood's weights as torch does."""
        super().reset_gate()
        for layer in () if self.local is None else self.local:
            if isinstance(layer, nn.Conv1d):
                layer.reset_parameters()

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in every head and add the neighbourhood."""
        heads = inline_attention(*(self.split_heads(t) for t in (q, k, v)), scale=self.scale)
        out = self.merge_heads(heads)
        batch = len(x)
        if self.local is None or not batch:  # no group of a convolution
            return out
        weight = self.local(x.mean(1)[..., None]).view(batch * self.embed_dims, 1, KERNEL, KERNEL)
        # a kernel an image and channel
        images = v[:, self.class_tokens :].transpose(1, 2).reshape(1, batch * self.embed_dims, *hw_shape)
        local = F.conv2d(images, weight.to(images.dtype), padding=KERNEL // 2, groups=batch * self.embed_dims)
        return out + self.after_class_token(local.view(batch, self.embed_dims, -1).transpose(1, 2))

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the features of the keys ``(B, H, N, d)``."""
        return self.split_heads(k - k.mean(-2, keepdim=True))


@MODELS.register_module()
class InLineAttention(GatedMapAttention):
    """Projections with :class:`InLineGate`, whose options it takes."""

    gate_type = InLineGate

"""Injective linear attention (InLine), which subtracts the mean weight instead of dividing by the sum."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.map import Size, map_attention
from mmgate.notes import note
from mmgate.ops.linear_attention import inline_attention, key_value_map

from .base import LinearGate

# Side of the neighbourhood.
KERNEL = 3


class InLineGate(LinearGate):
    """InLine attention: linear attention minus its mean weight, plus a 3 x 3 convolution that depends on the image.

    Weights are normalised by a difference instead of a quotient. The convolution's kernels are made from the mean
    token.

    Two linear layers, block-diagonal by heads, compute the kernels from the mean token: 9 weights for each channel of
    an image. The values are convolved with them and added.

    Args:
        sizes: Sizes of the host's attention.
        local: True adds the convolution.
        **kwargs: Arguments of :class:`~mmgate.gates.linear.base.LinearGate`.

    Source: Bridging the divide: reconsidering softmax and linear attention (Han et al., 2024), Eq. 5 and 7.
    """

    def __init__(self, sizes: Sizes, *, local: bool = True, **kwargs: Any) -> None:
        super().__init__(sizes, **kwargs)
        self.local: nn.Sequential | None = None
        if local:
            self.local = nn.Sequential(
                nn.Conv1d(self.embed_dims, self.embed_dims, 1, groups=self.num_heads),
                nn.GELU(),
                nn.Conv1d(self.embed_dims, KERNEL**2 * self.embed_dims, 1, groups=self.num_heads),
            )

    def reset(self) -> None:
        """Initialise the layers that compute the convolution's kernels as torch does."""
        super().reset()
        if self.local is None:
            return
        for layer in self.local:
            if isinstance(layer, nn.Conv1d):
                layer.reset_parameters()

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend in each head and add the values, convolved with kernels that depend on the image."""
        heads = [self.split_heads(t) for t in (q, k, v)]
        note(self, 'kv', lambda: key_value_map(heads[1] - heads[1].mean(-2, keepdim=True), heads[2]))
        out = self.merge_heads(inline_attention(*heads, scale=self.scale))
        batch = len(x)
        # An empty batch would make a convolution of no groups.
        if self.local is None or not batch:
            return out
        # Each channel of each image has a kernel, so that all of them are the groups of one convolution.
        weight = self.local(x.mean(1)[..., None]).view(batch * self.embed_dims, 1, KERNEL, KERNEL)
        images = v[:, self.class_tokens :].transpose(1, 2).reshape(1, batch * self.embed_dims, *hw_shape)
        local = F.conv2d(images, weight.to(images.dtype), padding=KERNEL // 2, groups=batch * self.embed_dims)
        return out + self.after_class_token(local.view(batch, self.embed_dims, -1).transpose(1, 2))


InLineAttention = map_attention('InLineAttention', InLineGate)

"""Injective linear attention (InLine), which subtracts the mean weight instead of dividing by the sum."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate import LinearGate, Sizes, map_attention
from mmgate.ops import key_value_map

# Side of the neighbourhood.
KERNEL = 3


class InLineGate(LinearGate):
    """InLine attention: linear attention minus its mean weight, plus a 3 x 3 convolution that depends on the image.

    The weights are ``q_i k_j - mean_j(q_i k_j) + 1 / N``, with products scaled by ``1 / (N sqrt(d))``. Normalised by a
    quotient, several queries could get the same weights; by a difference, they cannot.

    Two linear layers, block-diagonal by heads, compute the convolution's kernels from the mean token: 9 weights for
    each channel of an image. The values are convolved with them and added.

    Args:
        sizes: Sizes of the host's attention.
        local: True adds the convolution.
        **kwargs: Arguments of :class:`mmgate.LinearGate`.

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
        for layer in self.local or ():
            if isinstance(layer, nn.Conv1d):
                layer.reset_parameters()

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend in each head and add the values, convolved with kernels that depend on the image."""
        queries, keys, values = (self.split_heads(t) for t in (q, k, v))
        # This is Q cov(K, V) + mean(V). Centred first, the products do not hold, in half precision, large equal terms
        # that the difference cancels.
        keys = keys - keys.mean(-2, keepdim=True)
        mean = values.mean(-2, keepdim=True)
        self.note_map(keys, values)
        out = self.merge_heads(queries @ (key_value_map(keys, values - mean) * self.scale) + mean)
        batch = len(x)
        # An empty batch would make a convolution of no groups.
        if self.local is None or not batch:
            return out
        # Each channel of each image has a kernel, so that all of them are the groups of one convolution.
        weight = self.local(x.mean(1)[..., None]).view(batch * self.embed_dims, 1, KERNEL, KERNEL)
        images = v[:, self.class_tokens :].transpose(1, 2).reshape(1, batch * self.embed_dims, *hw_shape)
        local = F.conv2d(images, weight.to(images.dtype), padding=KERNEL // 2, groups=batch * self.embed_dims)
        return out + self.after_class_token(local.view(batch, self.embed_dims, -1).transpose(1, 2))


InLineAttention = map_attention('InLineAttention', InLineGate, force=True)

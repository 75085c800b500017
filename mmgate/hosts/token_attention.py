"""Dense gates in plain vision transformers."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmgate.hosts.window import RENAMED
from mmgate.layers.base.dense import DenseAttention


class GatedTokenAttention(nn.Module):
    """Self-attention over the tokens of a ViT around a gated :class:`~mmgate.layers.base.dense.DenseAttention`.

    Drop-in for mmpretrain's ``MultiheadAttention``, whose checkpoints it loads: the projections are renamed.

    Args:
        attn: The gated attention, ``batch_first``; takes over the host's projections.
        proj_drop: Dropout after the output projection.
        layer_scale: What multiplies the channels after that.
        out_drop: Dropout or drop path before the host adds its input.
    """

    def __init__(self, attn: DenseAttention, proj_drop: nn.Module, layer_scale: nn.Module, out_drop: nn.Module) -> None:
        super().__init__()
        self.attn, self.proj_drop, self.gamma1, self.out_drop = attn, proj_drop, layer_scale, out_drop

    def forward(self, x: Tensor) -> Tensor:
        """Attend over ``(B, N, C)`` tokens."""
        out = self.attn(x, x, x)[0].contiguous()  # as the host's, for what is dropped to be the same
        return self.out_drop(self.gamma1(self.proj_drop(out)))

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        for old, new in RENAMED.items():
            if prefix + old in state_dict:
                state_dict[prefix + new] = state_dict.pop(prefix + old)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

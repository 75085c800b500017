"""The vision transformer DGViT: mmpretrain's ViT with differential gated attention (M-DGSA) and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmpretrain.models.backbones import VisionTransformer

from mmgate import MODELS, swap_attention
from projects.dgsa.swiglu import SwiGLU

# mmpretrain asks for the width of the feed-forward networks, which are replaced.
CHECKED_BY_HOST = 1


@MODELS.register_module(force=True)
class DGViT(VisionTransformer):
    """A ViT whose attention is M-DGSA (differential gated self-attention) and whose feed-forward network is SwiGLU.

    Other values of ``attention`` give the paper's other models. ``dict(type='DifferentialMultiheadAttention')``, which
    gets its layer's depth, makes the differential transformer, and None leaves the vanilla attention.

    Args:
        embed_dims: Channels C; this and the next two are by default the paper's, of Table 3.
        num_layers: Layers.
        num_heads: Heads.
        img_size: Side of the images, in pixels.
        patch_size: Side of a patch.
        attention: Type and options of the attention, a gate for mmpretrain's ``MultiheadAttention``.
        expansion: Of the feed-forward network: 2 or 4, before the activation halves it.
        ffn_dropouts: Dropouts in it, 1 or 2.
        drop_rate: Probability of every dropout.
        **kwargs: Further arguments of mmpretrain's ``VisionTransformer``.

    Raises:
        ConfigError: The attention does not fit, or the feed-forward network has no such form.

    Source: M-DGSA, sections 4.3 and 5.1, Table 3.
    """

    def __init__(
        self,
        *,
        embed_dims: int = 256,
        num_layers: int = 8,
        num_heads: int = 8,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 4,
        attention: Mapping[str, Any] | None = {'type': 'DifferentialGatedMultiheadAttention'},
        expansion: float = 4,
        ffn_dropouts: int = 2,
        drop_rate: float = 0.05,
        **kwargs: Any,
    ) -> None:
        sizes = dict(embed_dims=embed_dims, num_layers=num_layers, num_heads=num_heads)
        super().__init__(
            {**sizes, 'feedforward_channels': CHECKED_BY_HOST},
            img_size=img_size,
            patch_size=patch_size,
            drop_rate=drop_rate,
            **kwargs,
        )
        for layer in self.layers:
            drops: dict[str, Any] = dict(dropouts=ffn_dropouts, drop=drop_rate, drop_path=layer.ffn.dropout_layer)
            layer.ffn = SwiGLU(embed_dims, expansion, **drops)
        if attention is not None:
            numbered = attention['type'] == 'DifferentialMultiheadAttention'
            depths = [dict(depth=number + 1) if numbered else {} for number in range(num_layers)]
            rules = [{'path': f'layers.{n}.attn', **depth, **attention} for n, depth in enumerate(depths)]
            swap_attention(self, rules)
        if self.frozen_stages > 0:
            # The new parts of frozen stages have to be frozen, too.
            self._freeze_stages()

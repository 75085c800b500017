"""The vision transformer DGViT: mmpretrain's ViT with differential gated attention (M-DGSA) and SwiGLU."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmpretrain.models.backbones import VisionTransformer

from mmgate.backbones.presets import preset
from mmgate.gate import gate_options
from mmgate.gates.parts.swiglu import SwiGLU
from mmgate.registry import MODELS
from mmgate.swap import swap_attention

# M-DGSA, Table 3
DGVIT = {'base': dict(embed_dims=256, num_layers=8, num_heads=8)}
# mmpretrain asks for the width of the feed-forward networks, which are replaced.
CHECKED_BY_HOST = 1


@MODELS.register_module()
class DGViT(VisionTransformer):
    """A ViT whose attention is M-DGSA (differential gated self-attention) and whose feed-forward network is SwiGLU.

    Other values of ``attention`` give the paper's other models. ``dict(type='DifferentialMultiheadAttention')``, which
    gets its layer's depth, makes the differential transformer, and None leaves the vanilla attention.

    Args:
        arch: ``'base'``, the sizes of the paper's Table 3.
        img_size: Side of the images, in pixels.
        patch_size: Side of a patch.
        attention: Type and options of the attention, a gate for mmpretrain's ``MultiheadAttention``.
        expansion: Of the feed-forward network: 2 or 4, before the activation halves it.
        ffn_dropouts: Dropouts in it, 1 or 2.
        drop_rate: Probability of every dropout.
        embed_dims: Instead of the preset's.
        num_layers: Instead of the preset's.
        num_heads: Instead of the preset's.
        **kwargs: Further arguments of mmpretrain's ``VisionTransformer``.

    Raises:
        ConfigError: An unknown ``arch``, or an attention that does not fit.

    Source: M-DGSA, sections 4.3 and 5.1, Table 3.
    """

    def __init__(
        self,
        arch: str = 'base',
        *,
        img_size: int | tuple[int, int] = 32,
        patch_size: int = 4,
        attention: Mapping[str, Any] | None = {'type': 'DifferentialGatedMultiheadAttention'},
        expansion: float = 4,
        ffn_dropouts: int = 2,
        drop_rate: float = 0.05,
        embed_dims: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        **kwargs: Any,
    ) -> None:
        sizes = preset(DGVIT, arch, dict(embed_dims=embed_dims, num_layers=num_layers, num_heads=num_heads))
        super().__init__(
            {**sizes, 'feedforward_channels': CHECKED_BY_HOST},
            img_size=img_size,
            patch_size=patch_size,
            drop_rate=drop_rate,
            **kwargs,
        )
        for layer in self.layers:
            drops: dict[str, Any] = dict(dropouts=ffn_dropouts, drop=drop_rate, drop_path=layer.ffn.dropout_layer)
            layer.ffn = SwiGLU(sizes['embed_dims'], expansion, **drops)
        if attention is not None:
            swap_attention(self, [_rule(attention, number) for number in range(len(self.layers))])
        if self.frozen_stages > 0:
            # The new parts of frozen stages have to be frozen, too.
            self._freeze_stages()


def _rule(attention: Mapping[str, Any], number: int) -> dict[str, Any]:
    """Return the rule that gates the attention of one layer, with the layer's number if the type has that option."""
    gate_type = MODELS.get(attention['type'])
    has_depth = gate_type is not None and 'depth' in gate_options(gate_type)
    return {'path': f'layers.{number}.attn', **(dict(depth=number + 1) if has_depth else {}), **attention}

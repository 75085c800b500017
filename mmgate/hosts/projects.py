"""Adapters of attentions of projects that are cloned, not installed.

Their classes are known by name. They are met when a model holds one.
"""

from __future__ import annotations

import inspect
from typing import Any, Protocol

from torch import Tensor, nn

from mmgate.hosts.relative_positions import GatedRelativeAttention
from mmgate.hosts.table import adapts, full_name
from mmgate.layers.base.deformable import DeformableGate, DeformableHost
from mmgate.layers.base.dense import DenseGate
from mmgate.layers.base.gate import Gate, Sizes

# The attention of projects/ViTDet in mmdet's repository.
VITDET = 'vitdet.vit.Attention'
# The attention of Deformable DETR's repository, which those of Mask DINO and ViT-Adapter carry, too.
MS_DEFORM_ATTN = 'ms_deform_attn.MSDeformAttn'
SIZES = ('d_model', 'n_levels', 'n_heads', 'n_points', 'ratio', 'im2col_step')
ARGUMENTS = ('query', 'reference_points', 'input_flatten', 'input_spatial_shapes', 'input_level_start_index')

adapts(DenseGate, VITDET)(GatedRelativeAttention)


class MSDeformAttn(Protocol):
    """Attributes of ``MSDeformAttn`` that give its sizes."""

    d_model: int
    n_heads: int
    n_levels: int
    n_points: int
    value_proj: nn.Linear


@adapts(DeformableGate, MS_DEFORM_ATTN)
class GatedMSDeformAttn(DeformableHost):
    """Adapter of ``MSDeformAttn`` of Deformable DETR's repository and of those that carry a copy."""

    n_heads: int
    n_levels: int
    n_points: int
    value_proj: nn.Module
    sampling_offsets: nn.Module
    attention_weights: nn.Module
    output_proj: nn.Module

    @classmethod
    def sizes(cls, host: MSDeformAttn) -> Sizes:
        """Return the sizes of a host."""
        inputs = (host.d_model, host.d_model, host.d_model)
        # In ViT-Adapter values have fewer channels than queries.
        channels = host.value_proj.out_features
        return Sizes(channels, host.n_heads, inputs=inputs, levels=host.n_levels, points=host.n_points)

    @classmethod
    def make_gate(cls, host: Any, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Return the gate for a host.

        Raises:
            ValueError: The host's class is called with other arguments, or has further options.
        """
        called = tuple(inspect.signature(host.forward).parameters)
        further = [name for name in inspect.signature(type(host)).parameters if name not in SIZES]
        if called[:5] != ARGUMENTS or further:
            differs = f'takes {", ".join(further)}' if further else f'is called with {", ".join(called)}'
            raise ValueError(
                f'this {full_name(type(host))} {differs} and may compute something else; write its adapter with '
                'mmgate.adapts.'
            )
        return super().make_gate(host, gate_type, **options)

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor,
        input_level_start_index: Tensor,
        input_padding_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``query (B, Q, C)`` to the levels in ``input_flatten (B, S, C)``.

        Args:
            query: The queries, with their position.
            reference_points: ``(B, Q, L, 2)`` as (x, y), or ``(B, Q, L, 4)`` as (x, y, w, h), in 0 to 1.
            input_flatten: The levels one after the other.
            input_spatial_shapes: ``(L, 2)`` as (height, width), integer.
            input_level_start_index: ``(L,)``, integer.
            input_padding_mask: ``(B, S)``, True where there is padding.
        """
        value = self.value_proj(input_flatten)
        if input_padding_mask is not None:
            value = value.masked_fill(input_padding_mask[..., None], 0.0)
        value = value.unflatten(-1, (self.n_heads, -1))  # (B, S, H, d)
        sizes = (self.n_heads, self.n_levels, self.n_points)
        offsets = self.sampling_offsets(query).unflatten(-1, (*sizes, 2))
        logits = self.attention_weights(query).unflatten(-1, sizes)
        levels = (input_spatial_shapes, input_level_start_index)
        return self.output_proj(self.sample(query, value, *levels, offsets, logits, reference_points))

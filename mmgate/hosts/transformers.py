"""Adapters that let gates into transformers' deformable attentions, and into dense ones that need their own forward.

Importing this file also imports those of :mod:`.interface`, which run their host's forward.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError, full_name
from mmgate.gate import Sizes
from mmgate.gates.base.deformable import DeformableAdapter, DeformableGate
from mmgate.gates.base.dense import DenseAdapter, DenseGate, Inputs
from mmgate.hosts.interface import Form, InterfaceAdapter, attend
from mmgate.hosts.points import points_of, sampled
from mmgate.hosts.table import adapts
from mmgate.notes import with_note
from mmgate.ops.deformable.levels import levels_on
from mmgate.ops.masks import merge_masks

DEFORMABLE = {
    'deformable_detr': 'DeformableDetr',
    'rt_detr': 'RTDetr',
    'rt_detr_v2': 'RTDetrV2',
    'grounding_dino': 'GroundingDino',
    'mm_grounding_dino': 'MMGroundingDino',
    'lw_detr': 'LwDetr',
    'rf_detr': 'RfDetr',
    'mask2former': 'Mask2FormerPixelDecoderEncoder',
    'oneformer': 'OneFormerPixelDecoderEncoder',
    'd_fine': 'DFine',
    'deimv2': 'Deimv2',
    'omdet_turbo': 'OmDetTurbo',
    'pp_doclayout_v2': 'PPDocLayoutV2',
    'pp_doclayout_v3': 'PPDocLayoutV3',
    'pp_doclayout_v4': 'PPDocLayoutV4',
}
DEFORMABLE_HOSTS = tuple(f'modeling_{model}.{name}MultiscaleDeformableAttention' for model, name in DEFORMABLE.items())


@adapts(DenseGate, 'modeling_segformer.SegformerAttention')
class SegformerAttentionAdapter(InterfaceAdapter):
    """Adapter for SegFormer's attention, whose keys and values are projected from a reduced map."""

    def forward(
        self,
        hidden_states: Tensor,
        height: int,
        width: int,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from tokens ``(B, N, C)`` of a map to the same map, reduced, with the gate.

        Returns:
            ``(B, N, C)``, and None for the weights.
        """
        reduces = self.sequence_reduction_ratio > 1
        reduced = self.sequence_reduction(hidden_states, height, width) if reduces else hidden_states
        return project_and_attend(self, (hidden_states, reduced, reduced), attention_mask)


@adapts(DenseGate, 'modeling_lw_detr.LwDetrAttention', 'modeling_rf_detr.RfDetrAttention')
class GroupAttentionAdapter(InterfaceAdapter):
    """Adapter for the self-attention of LW-DETR and RF-DETR, whose queries attend in groups in training."""

    form = Form(query_position='position_embeddings', key_position='position_embeddings')

    def forward(
        self, hidden_states: Tensor, position_embeddings: Tensor | None = None, **kwargs: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Attend between queries ``(B, N, C)`` with the gate; a position is added to queries and keys.

        Returns:
            ``(B, N, C)``, and None for the weights.
        """
        query, key, value = self.form.inputs(dict(hidden_states=hidden_states, position_embeddings=position_embeddings))
        if not self.training:
            return project_and_attend(self, (query, key, value), None)
        batch = len(value)
        count = value.shape[1] // self.config.group_detr
        query, value = (torch.cat(x.split(count, 1)) for x in (query, value))  # (groups * B, N / groups, C)
        output, weights = project_and_attend(self, (query, query, value), None)
        return torch.cat(output.split(batch), 1), weights


def project_and_attend(
    host: InterfaceAdapter, inputs: Inputs, attention_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Project query, key and value inputs ``(B, N|M, C)``, attend with the gate and project the heads."""
    projections = (host.q_proj, host.k_proj, host.v_proj)
    q, k, v = (host.gate.split_heads(project(x)) for project, x in zip(projections, inputs, strict=True))
    heads, weights = attend(host, (q, k, v), inputs, attention_mask, host.scaling)
    return host.gate.finish(host.o_proj(heads.flatten(2)), q, inputs), weights


@adapts(DenseGate, 'modeling_mask2former.Mask2FormerAttention')
class Mask2FormerAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into the self-attention of transformers' Mask2Former decoder.

    It does not call the attention interface.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes (channels, heads, levels, points) off an attention module (the host), for its gate."""
        return Sizes(host.embed_dim, host.num_heads, dropout=host.dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        key_value_states: Tensor | None = None,
        key_value_position_embeddings: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``(N, B, C)`` to ``(M, B, C)``, or to itself, with the gate; a mask is added to the logits.

        Positions are added to queries, and to keys. Returns ``(N, B, C)``, and the weights ``(B, H, N, M)`` or None.
        """
        value = hidden_states if key_value_states is None else key_value_states
        positions = position_embeddings if key_value_states is None else key_value_position_embeddings
        key = value if positions is None else value + positions
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        inputs = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))  # (B, N|M, C)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self.gate.split_heads(project(x)) for project, x in zip(projections, inputs, strict=True))
        bias, all_masked = merge_masks(attention_mask, None, q.shape[0], q.shape[1], q.dtype)
        run = partial(self.attend_merged, (q, k, v), inputs, self.out_proj, bias, all_masked)
        output, weights = with_note(self.gate, 'attention', run) if output_attentions else (run(), None)
        return output.transpose(0, 1), weights


@adapts(DeformableGate, *DEFORMABLE_HOSTS)
class MultiscaleDeformableAttentionAdapter(DeformableAdapter):
    """Adapter that lets gates into transformers' multi-scale deformable attentions (Deformable DETR and others).

    A gate reads the query with its position.
    """

    n_heads: int
    n_levels: int
    sampling_offsets: nn.Module
    attention_weights: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes (channels, heads, levels, points) off an attention module (the host), for its gate."""
        return Sizes(host.d_model, host.n_heads, levels=host.n_levels, points=points_of(host))

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for a host that does not sample bilinearly."""
        method = getattr(host, 'method', getattr(host, 'decoder_method', 'default'))
        if method != 'default':
            name = full_name(type(host))
            raise ConfigError(f'it samples bilinearly, but this {name} has decoder_method={method!r}.')

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor,
        position_embeddings: Tensor | None = None,
        reference_points: Tensor,
        spatial_shapes: Tensor | None = None,
        spatial_shapes_list: Any = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend from queries ``(B, Q, C)`` to the levels in ``encoder_hidden_states`` ``(B, S, C)``, with the gate.

        Args:
            hidden_states: The queries.
            attention_mask: ``(B, S)`` bool, False where there is padding; in Mask2Former and OneFormer True.
            encoder_hidden_states: The levels.
            position_embeddings: Added to the queries.
            reference_points: ``(B, Q, L|1, 2)`` as (x, y), or ``(B, Q, L|1, 4)`` as (x, y, w, h), in 0 to 1.
            spatial_shapes: ``(L, 2)`` as (height, width), if there is no list.
            spatial_shapes_list: The same as a list.
            level_start_index: ``(L,)``, if there is no list; of levels side by side by default.
            **kwargs: What layers hand to every attention; not used, as in transformers.

        Returns:
            ``(B, Q, C)``, and the weights ``(B, Q, H, L, P)``, in RT-DETRv2, D-FINE and DEIMv2 ``(B, Q, H, N)`` of all
            N points of a head.

        Raises:
            ValueError: Neither ``spatial_shapes`` nor a list of them.
        """
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.value_proj(encoder_hidden_states) if hasattr(self, 'value_proj') else encoder_hidden_states
        if attention_mask is not None:
            padding = attention_mask if self.mask_is_padding else ~attention_mask
            value = value.masked_fill(padding[..., None], 0.0)
        value = value.unflatten(-1, (self.n_heads, -1))  # (B, S, H, d)
        if spatial_shapes_list is not None:
            # As in transformers, the list decides. Tensors are made once for all layers, so that none of them waits.
            spatial_shapes, level_start_index = levels_on(value.device, spatial_shapes_list)
        if spatial_shapes is None:
            raise ValueError('spatial_shapes or spatial_shapes_list is needed by deformable attention.')
        if level_start_index is None:
            areas = spatial_shapes.prod(-1)
            level_start_index = areas.cumsum(0) - areas
        offsets, logits = sampled(self, query, reference_points)
        sampling = (query, value, spatial_shapes, level_start_index, offsets, logits, reference_points)
        output, weights = with_note(self.gate, 'weights', partial(self.sample, *sampling))
        assert weights is not None  # sample notes them
        output = self.output_proj(output) if hasattr(self, 'output_proj') else output
        return output, weights.flatten(3) if hasattr(self, 'offset_scale') else weights

    @property
    def mask_is_padding(self) -> bool:
        """Return True if True means padding in the masks of this model; in other models it means a valid pixel."""
        return any(base.__name__.startswith(('Mask2Former', 'OneFormer')) for base in type(self).__mro__)

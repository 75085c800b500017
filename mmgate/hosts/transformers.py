"""transformers' attentions as hosts: those behind its attention interface, Mask2Former's, and deformable ones."""

from __future__ import annotations

from copy import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmgate.hosts.points import points_of, sampled
from mmgate.hosts.table import adapts, full_name
from mmgate.layers.base.deformable import DeformableGate, DeformableHost
from mmgate.layers.base.dense import DenseGate, DenseHost, Inputs
from mmgate.layers.base.gate import Gate, Sizes
from mmgate.ops.masks import merge_masks
from mmgate.ops.ms_deform_attn import attention_weights
from mmgate.ops.ms_deform_attn.levels import levels_on

NAME = 'mmgate'  # of the attention implementation
READ = ('q_proj', 'k_proj', 'v_proj')
HOSTS = (
    'modeling_vit.ViTAttention',
    'modeling_deit.DeiTAttention',
    'modeling_dinov2.Dinov2Attention',
    'modeling_dinov2_with_registers.Dinov2WithRegistersAttention',
    'modeling_dinov3_vit.DINOv3ViTAttention',
    'modeling_swin.SwinAttention',
    'modeling_segformer.SegformerAttention',
    'modeling_detr.DetrSelfAttention',
    'modeling_detr.DetrCrossAttention',
    'modeling_deformable_detr.DeformableDetrSelfAttention',
    'modeling_rt_detr.RTDetrSelfAttention',
    'modeling_rt_detr_v2.RTDetrV2SelfAttention',
    'modeling_d_fine.DFineSelfAttention',
    'modeling_deimv2.Deimv2SelfAttention',
    'modeling_rf_detr.RfDetrDinov2Attention',
)
ROTATED = ('DINOv3ViTAttention',)  # halves of their heads belong together

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
}
DEFORMABLE_HOSTS = tuple(f'modeling_{model}.{name}MultiscaleDeformableAttention' for model, name in DEFORMABLE.items())


@adapts(DenseGate, *HOSTS)
class GatedInterfaceAttention(DenseHost):
    """Adapter of modules behind the attention interface, whose attention function becomes ours.

    A gate reads what the projections of query, key and value have read, which they note while the host runs.
    """

    host_signature = True
    noted_query: Tensor | None = None  # projected
    config: Any

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host, by its projections."""
        query, key, value = (getattr(host, name).in_features for name in READ)
        dropout = host.attention_dropout if hasattr(host, 'attention_dropout') else host.dropout
        channels = host.q_proj.out_features
        return Sizes(
            channels,
            channels // host.head_dim,
            inputs=(query, key, value),
            output=host.o_proj.out_features,
            dropout=dropout,
        )

    @classmethod
    def refuses(cls, host: Any, gate: Any) -> str | None:
        """Refuse two streams where the halves of a head are rotated together."""
        name = next((base.__name__ for base in type(host).__mro__ if base.__name__ in ROTATED), None)
        if gate.two_streams and name:
            return f'the gate splits heads into two streams, but {name} rotates their halves together'
        return None

    def switched_on(self) -> None:
        """Let this module, and no other of its model, attend by our function, and let projections note their input."""
        notes = self.gating.notes
        notes['config'] = self.config
        self.config = copy(self.config)
        self.config._attn_implementation = NAME
        notes['hooks'] = [getattr(self, name).register_forward_pre_hook(note_input) for name in READ]

    def switched_off(self) -> None:
        """Give the module its config back, and take the notes off."""
        self.config = self.gating.notes.pop('config')
        for hook in self.gating.notes.pop('hooks'):
            hook.remove()

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend; the arguments are the host's. There are no weights to return, as with its fused functions."""
        try:
            output, weights = super().forward(*args, **kwargs)
            return self.gate.finish(output, self.noted_query, self.noted_inputs()), weights
        finally:
            self.noted_query = None
            for name in READ:
                getattr(self, name).noted_input = None

    def noted_inputs(self) -> Inputs:
        """Return what the projections of query, key and value have read in this call."""
        return self.q_proj.noted_input, self.k_proj.noted_input, self.v_proj.noted_input


def note_input(projection: Any, args: tuple[Tensor, ...]) -> None:
    """Keep what a projection reads until its attention has been computed."""
    projection.noted_input = args[0]


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the module's gate, or as ``'sdpa'`` does where it has none; transformers' interface.

    Query ``(B, H, N, d)``, key and value ``(B, H, M, d)``, and a mask broadcastable to ``(B, H, N, M)``, bool (False
    masks) or added, become heads ``(B, N, H, d)``, and None for the weights. A gate drops what its host's constructor
    was told to.

    Raises:
        ValueError: A mask of another implementation (flash or flex attention).
    """
    if not isinstance(module, GatedInterfaceAttention):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4):
        raise ValueError(
            "a gated attention takes the masks of 'sdpa' and 'eager'; load the model with attn_implementation='sdpa', "
            f"or call model.set_attn_implementation('{NAME}')."
        )
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = ~attention_mask
    bias, dead = merge_masks(attention_mask, None, query.shape[0], query.shape[1], query.dtype)
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        query = query * (scaling * query.shape[-1] ** 0.5)
    module.noted_query = query
    heads = module.gate.attend(query, key, value, module.noted_inputs(), bias)
    heads = heads if dead is None else heads.masked_fill(dead, 0.0)
    return heads.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without it a model of this implementation gets no masks


@adapts(DenseGate, 'modeling_mask2former.Mask2FormerAttention')
class GatedMask2FormerAttention(DenseHost):
    """Adapter of Mask2Former's attention over its queries, which goes through no interface."""

    host_signature = True

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host."""
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
        """Attend from ``(N, B, C)`` to ``(M, B, C)``, or to itself, with a mask ``(B H, N, M)`` added to the logits.

        Positions are added to queries, and to keys. Returns ``(N, B, C)``, and the weights ``(B, H, N, M)`` or None.
        """
        value = hidden_states if key_value_states is None else key_value_states
        positions = position_embeddings if key_value_states is None else key_value_position_embeddings
        key = value if positions is None else value + positions
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        inputs = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))  # (B, N|M, C)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self.gate.split_heads(project(x)) for project, x in zip(projections, inputs, strict=True))
        output = self.attend_gated((q, k, v), inputs, self.out_proj, attn_mask=attention_mask)
        weights = None
        if output_attentions:
            bias, _ = merge_masks(attention_mask, None, q.shape[0], q.shape[1], q.dtype)
            weights = self.gate.attention_map(q, k, inputs, bias)
        return output.transpose(0, 1), weights


@adapts(DeformableGate, *DEFORMABLE_HOSTS)
class GatedMultiscaleDeformableAttention(DeformableHost):
    """Adapter of transformers' multi-scale deformable attentions; a gate reads the query with its position."""

    host_signature = True

    n_heads: int
    n_levels: int
    sampling_offsets: nn.Module
    attention_weights: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host."""
        return Sizes(host.d_model, host.n_heads, levels=host.n_levels, points=points_of(host))

    @classmethod
    def make_gate(cls, host: Any, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Return the gate for a host.

        Raises:
            ValueError: A host of uneven points, or one that does not sample bilinearly.
        """
        if isinstance(host.n_points, (list, tuple)) and len(set(host.n_points)) > 1:
            raise ValueError(
                f'it needs one number of points for all levels, but this {full_name(type(host))} has '
                f'{list(host.n_points)} (decoder_n_points).'
            )
        method = getattr(host, 'method', getattr(host, 'decoder_method', 'default'))
        if method != 'default':
            raise ValueError(f'it samples bilinearly, but this {full_name(type(host))} has decoder_method={method!r}.')
        return super().make_gate(host, gate_type, **options)

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
        """Attend from queries ``(B, Q, C)`` to the levels of ``encoder_hidden_states``, ``(B, S, C)`` side by side.

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
            ``(B, Q, C)``, and the weights ``(B, Q, H, L, P)``, in RT-DETRv2, D-FINE and DEIMv2 ``(B, Q, H, L P)``.

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
        output = self.sample(query, value, spatial_shapes, level_start_index, offsets, logits, reference_points)
        output = self.output_proj(output) if hasattr(self, 'output_proj') else output
        weights = attention_weights(logits, **self.gate.modulate(query))
        return output, weights.flatten(3) if hasattr(self, 'offset_scale') else weights

    @property
    def mask_is_padding(self) -> bool:
        """Whether True in a mask means padding."""
        return any(base.__name__.startswith(('Mask2Former', 'OneFormer')) for base in type(self).__mro__)

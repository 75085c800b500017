"""transformers' attentions as hosts: those behind its attention interface, Mask2Former's, and deformable ones."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmgate.hosts.core import attend_in_host, copy_as, refuse_finish, without_projections
from mmgate.hosts.hosted import HostedDeformableAttention, Shell, subclass
from mmgate.hosts.table import adapts, full_name
from mmgate.layers import MultiScaleDeformableAttention
from mmgate.layers.base.dense import GatedMultiheadAttention, Inputs
from mmgate.ops.masks import merge_masks

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

PROJECTIONS = ('sampling_offsets', 'attention_weights', 'value_proj', 'output_proj', 'dropout')
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


class HostedInterfaceAttention(Shell):
    """A host's module whose attention function is ours, with the gate that it calls held as ``gate``."""

    gate: Any
    noted_query: Tensor | None = None  # projected

    def forward(self: Any, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """Attend; the arguments are the host's. There are no weights to return, as with its fused functions."""
        try:
            output, weights = super().forward(*args, **kwargs)
            return self.gate.finish(output, self.noted_query, self.noted_inputs()), weights
        finally:
            self.noted_query = None
            for name in READ:
                getattr(self, name).noted_input = None

    def noted_inputs(self: Any) -> Inputs:
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
    if not isinstance(module, HostedInterfaceAttention):
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


@adapts(GatedMultiheadAttention, *HOSTS)
def interface_attention(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> HostedInterfaceAttention:
    """Return a copy of the host that holds a gate and has its attention computed by it."""
    widths = dict(zip(('qdim', 'kdim', 'vdim'), (getattr(host, name).in_features for name in READ), strict=True))
    dropout = host.attention_dropout if hasattr(host, 'attention_dropout') else host.dropout
    channels = host.q_proj.out_features
    core = gate.core(channels, channels // host.head_dim, dropout, batch_first=True, **widths, **options)
    if core.two_streams and type(host).__name__ in ROTATED:
        raise ValueError(
            f'{gate.__name__} splits heads into two streams, but {type(host).__name__} rotates their halves together.'
        )
    refuse_finish(gate, core, host.o_proj.out_features)
    gated = copy_as(subclass(HostedInterfaceAttention, type(host)), host, gate=without_projections(core))
    gated.config._attn_implementation = NAME  # the module's own copy: the model's others attend as before
    for name in READ:
        getattr(gated, name).register_forward_pre_hook(note_input)
    return gated


class HostedMask2FormerAttention(Shell):
    """Mask2Former's attention over its queries, which goes through no interface, with a gate held as ``gate``."""

    gate: Any

    def forward(
        self: Any,
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
        q, k, v = (self.gate.split_heads(getattr(self, name)(x)) for name, x in zip(READ, inputs, strict=True))
        output = attend_in_host(self.gate, (q, k, v), inputs, self.out_proj, attn_mask=attention_mask)
        weights = None
        if output_attentions:
            bias, _ = merge_masks(attention_mask, None, q.shape[0], q.shape[1], q.dtype)
            weights = self.gate.attention_map(q, k, inputs, bias)
        return output.transpose(0, 1), weights


@adapts(GatedMultiheadAttention, 'modeling_mask2former.Mask2FormerAttention')
def mask2former_attention(
    gate: type[GatedMultiheadAttention], host: Any, /, **options: Any
) -> HostedMask2FormerAttention:
    """Return a copy of the host that holds a gate."""
    core = gate.core(host.embed_dim, host.num_heads, host.dropout, batch_first=True, **options)
    return copy_as(subclass(HostedMask2FormerAttention, type(host)), host, gate=without_projections(core))


@adapts(MultiScaleDeformableAttention, *DEFORMABLE_HOSTS)
def deformable_attention(
    gate: type[MultiScaleDeformableAttention], host: Any, /, **options: Any
) -> HostedDeformableAttention:
    """Return a copy of the host that holds a gate."""
    points = set(host.n_points) if isinstance(host.n_points, (list, tuple)) else {host.n_points}
    if len(points) > 1:
        raise ValueError(
            f'{gate.__name__} has one number of points for all levels, but this {full_name(type(host))} has '
            f'{list(host.n_points)} (decoder_n_points).'
        )
    method = getattr(host, 'method', getattr(host, 'decoder_method', 'default'))
    if method != 'default':
        raise ValueError(
            f'{gate.__name__} samples bilinearly, but this {full_name(type(host))} has decoder_method={method!r}.'
        )
    core = gate(host.d_model, host.n_heads, host.n_levels, points.pop(), **options)
    for name in PROJECTIONS:
        delattr(core, name)
    core.has_projections = False
    gated = copy_as(subclass(HostedDeformableAttention, type(host)), host, gate=core)
    gated.mask_is_padding = type(host).__name__.startswith(('Mask2Former', 'OneFormer'))
    return gated

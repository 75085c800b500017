"""Attentions of projects that are cloned, not installed, as hosts: known by name, met when a model holds one."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor, nn

from mmgate.hosts.relative_positions import adapt_relative
from mmgate.hosts.table import adapts, full_name
from mmgate.layers import MultiScaleDeformableAttention

VITDET = 'vitdet.vit.Attention'  # mmdet's projects/ViTDet
MS_DEFORM_ATTN = 'ms_deform_attn.MSDeformAttn'  # Deformable DETR's own, which Mask DINO and ViT-Adapter carry, too
SIZES = ('d_model', 'n_levels', 'n_heads', 'n_points', 'ratio', 'im2col_step')
ARGUMENTS = ('query', 'reference_points', 'input_flatten', 'input_spatial_shapes', 'input_level_start_index')

adapt_relative(VITDET)


@adapts(MultiScaleDeformableAttention, MS_DEFORM_ATTN)
def ms_deform_attn(
    gate: type[MultiScaleDeformableAttention], host: Any, /, **options: Any
) -> MultiScaleDeformableAttention:
    """Take over sizes, and the order of arguments: positional, and others than mmcv's.

    Raises:
        ValueError: A class of this name that is called otherwise, or that has options of its own.
    """
    called = tuple(inspect.signature(host.forward).parameters)
    own = [name for name in inspect.signature(type(host)).parameters if name not in SIZES]
    if called[:5] != ARGUMENTS or own:
        differs = f'takes {", ".join(own)}' if own else f'is called with {", ".join(called)}'
        raise ValueError(
            f'{gate.__name__} does not replace {full_name(type(host))}, which {differs} and may compute something '
            'else; write its adapter with mmgate.adapts.'
        )
    ratio = (host.value_proj.out_features + 0.5) / host.d_model  # below 1 in ViT-Adapter; mmcv rounds down
    sizes = (host.d_model, host.n_heads, host.n_levels, host.n_points)
    module = gate(*sizes, dropout=0.0, batch_first=True, value_proj_ratio=ratio, **options)
    module.register_forward_pre_hook(_as_mmcv_is_called, with_kwargs=True)
    return module


def _as_mmcv_is_called(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Tensor], dict[str, Any]]:
    """Name the arguments as mmcv does; the original adds no identity, its layer does."""
    names = (*ARGUMENTS, 'input_padding_mask')
    given = dict(zip(names, args, strict=False)) | kwargs
    query = given['query']
    return (query,), dict(
        identity=query.new_zeros(()),
        value=given['input_flatten'],
        key_padding_mask=given.get('input_padding_mask'),
        reference_points=given['reference_points'],
        spatial_shapes=given['input_spatial_shapes'],
        level_start_index=given['input_level_start_index'],
    )

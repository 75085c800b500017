"""Adapters for attention of projects that are cloned (Deformable DETR, RT-DETR, detrex, ...), known by class name.

Their classes are known by name. They are met when a model holds one.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError, full_name
from mmgate.gate import Sizes
from mmgate.gates.base.deformable import DeformableAdapter, DeformableGate
from mmgate.gates.base.dense import DenseGate
from mmgate.hosts.points import sampled
from mmgate.hosts.relative_positions import RelativeAttentionAdapter
from mmgate.hosts.table import adapts
from mmgate.ops.deformable.levels import levels_on
from mmgate.ops.deformable.uneven import axes_of_samples, points_of_levels

# The attention of projects/ViTDet in mmdet's repository.
VITDET = 'vitdet.vit.Attention'
# The attention of Deformable DETR's repository, which those of Mask DINO and ViT-Adapter carry, and rfdetr.
MS_DEFORM_ATTN = 'ms_deform_attn.MSDeformAttn'
# The attention of Grounding DINO's repository, and of those that copy it.
GROUNDING_DINO = 'ms_deform_attn.MultiScaleDeformableAttention'
DETREX = 'detrex.layers.multi_scale_deform_attn.MultiScaleDeformableAttention'
# The attention of RT-DETR's repository in both versions, and of D-FINE's, DEIM's and RT-DETRv4's.
RT_DETR = (
    'rtdetr_decoder.MSDeformableAttention',
    'rtdetrv2_decoder.MSDeformableAttention',
    'dfine_decoder.MSDeformableAttention',
)
ULTRALYTICS = 'ultralytics.nn.modules.transformer.MSDeformAttn'

adapts(DenseGate, VITDET)(RelativeAttentionAdapter)


class ProjectAttentionAdapter(DeformableAdapter):
    """Base of the adapters for deformable attention of such projects; it checks that the class is the known one.

    A project may have changed its copy of a class. A subclass therefore names what it knows of a constructor and of a
    call, and a class that takes anything else is refused.

    Attributes:
        constructed_with: The arguments of a host's constructor that it knows.
        called_with: The first arguments of a host's ``forward``.
        channels_at: Name of the host's attribute that holds its channels.
        heads_at: Name of the one that holds its heads.
        levels_at: Name of the one that holds its levels.
    """

    constructed_with: ClassVar[tuple[str, ...]]
    called_with: ClassVar[tuple[str, ...]]
    channels_at: ClassVar[str] = 'd_model'
    heads_at: ClassVar[str] = 'n_heads'
    levels_at: ClassVar[str] = 'n_levels'

    value_proj: nn.Module
    sampling_offsets: nn.Module
    attention_weights: nn.Module
    output_proj: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads, levels and points off a deformable attention (the host), for its gate."""
        width = getattr(host, cls.channels_at)
        # In ViT-Adapter values have fewer channels than queries.
        channels = host.value_proj.out_features if hasattr(host, 'value_proj') else width
        return Sizes(
            channels,
            getattr(host, cls.heads_at),
            inputs=(width, width, width),
            levels=getattr(host, cls.levels_at),
            points=cls.points(host),
        )

    @classmethod
    def points(cls, host: Any) -> int | tuple[int, ...]:
        """Return the number of sampling points per head and level, or a tuple of them where levels differ."""
        return host.n_points

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError if the host's class is called with other arguments, or has further options."""
        name = full_name(type(host))
        called = tuple(inspect.signature(host.forward).parameters)
        further = [option for option in inspect.signature(type(host)).parameters if option not in cls.constructed_with]
        if called[: len(cls.called_with)] != cls.called_with or further:
            differs = f'takes {", ".join(further)}' if further else f'is called with {", ".join(called)}'
            raise ConfigError(
                f'this {name} {differs} and may compute something else; write its adapter with mmgate.adapts.'
            )

    def project(self, value: Tensor, padding: Tensor | None = None) -> Tensor:
        """Project features of all levels ``(B, S, C)`` to values ``(B, S, H, d)``, zeros where ``padding`` is True."""
        value = self.value_proj(value)
        if padding is not None:
            value = value.masked_fill(padding[..., None], 0.0)
        return value.unflatten(-1, (getattr(self, self.heads_at), -1))

    def attended(
        self,
        query: Tensor,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        reference_points: Tensor,
    ) -> Tensor:
        """Sample the values ``(B, S, H, d)`` for queries ``(B, Q, C)``, with the gate, up to the output projection.

        Args:
            query: The queries.
            value: The values of all levels.
            spatial_shapes: ``(L, 2)`` as (height, width), integer.
            level_start_index: ``(L,)``, integer.
            reference_points: ``(B, Q, L|1, 2)`` as (x, y), or ``(B, Q, L|1, 4)`` as (x, y, w, h), in 0 to 1.
        """
        samples = axes_of_samples(self.points(self), getattr(self, self.levels_at))
        sizes = (getattr(self, self.heads_at), *samples)
        offsets, logits = sampled(self, query, reference_points, sizes)
        return self.sample(query, value, spatial_shapes, level_start_index, offsets, logits, reference_points)


@adapts(DeformableGate, MS_DEFORM_ATTN)
class MSDeformAttnAdapter(ProjectAttentionAdapter):
    """Adapter for ``MSDeformAttn`` of Deformable DETR's repository and copies (DINO, Mask DINO, ViT-Adapter, rfdetr).

    IDEA-Research's copies (DINO, DN-DETR, Lite-DETR, TAPTR) have ``use_4D_normalizer``, which moves points otherwise.
    """

    constructed_with = ('d_model', 'n_levels', 'n_heads', 'n_points', 'ratio', 'im2col_step', 'use_4D_normalizer')
    called_with = ('query', 'reference_points', 'input_flatten', 'input_spatial_shapes', 'input_level_start_index')

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for a class that is not the known one, and for ``use_4D_normalizer=True``."""
        super().check(host)
        if getattr(host, 'use_4D_normalizer', False):
            raise ConfigError(
                f'this {full_name(type(host))} has use_4D_normalizer=True, which moves points by the size of a level '
                'and of a box at once.'
            )

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        input_flatten: Tensor,
        input_spatial_shapes: Tensor,
        input_level_start_index: Tensor,
        input_padding_mask: Tensor | None = None,
        input_spatial_shapes_hw: Sequence[tuple[int, int]] | None = None,
    ) -> Tensor:
        """Attend from ``query`` ``(B, Q, C)`` to the levels in ``input_flatten`` ``(B, S, C)``, with the gate.

        Args:
            query: The queries, with their position.
            reference_points: ``(B, Q, L, 2)`` as (x, y), or ``(B, Q, L, 4)`` as (x, y, w, h), in 0 to 1.
            input_flatten: The levels one after the other.
            input_spatial_shapes: ``(L, 2)`` as (height, width), integer.
            input_level_start_index: ``(L,)``, integer.
            input_padding_mask: ``(B, S)``, True where there is padding.
            input_spatial_shapes_hw: The shapes as numbers, which rfdetr hands in; then they are the ones that are used.
        """
        value = self.project(input_flatten, input_padding_mask)
        shapes, starts = input_spatial_shapes, input_level_start_index
        if input_spatial_shapes_hw is not None:  # which no device has to be waited for, and which exports can trace
            shapes, starts = levels_on(query.device, input_spatial_shapes_hw)
        return self.output_proj(self.attended(query, value, shapes, starts, reference_points))


@adapts(DeformableGate, GROUNDING_DINO)
class GroundingDINOAttentionAdapter(ProjectAttentionAdapter):
    """Adapter for ``MultiScaleDeformableAttention`` of Grounding DINO's repository.

    That is mmcv's class without the identity that mmcv's adds to the output.
    """

    constructed_with: ClassVar[tuple[str, ...]] = (
        'embed_dim',
        'num_heads',
        'num_levels',
        'num_points',
        'img2col_step',
        'batch_first',
    )
    called_with: ClassVar[tuple[str, ...]] = (
        'query',
        'key',
        'value',
        'query_pos',
        'key_padding_mask',
        'reference_points',
        'spatial_shapes',
        'level_start_index',
    )
    channels_at = 'embed_dim'
    heads_at = 'num_heads'
    levels_at = 'num_levels'

    batch_first: bool

    @classmethod
    def points(cls, host: Any) -> int | tuple[int, ...]:
        """Return the number of sampling points for each head and level of a deformable attention."""
        return host.num_points

    def attend_gated(
        self,
        query: Tensor,
        value: Tensor | None,
        query_pos: Tensor | None,
        key_padding_mask: Tensor | None,
        reference_points: Tensor | None,
        spatial_shapes: Tensor | None,
        level_start_index: Tensor | None,
    ) -> Tensor:
        """Attend with the gate and project the output, of the shape of ``query``; arguments as in :meth:`forward`."""
        if reference_points is None or spatial_shapes is None or level_start_index is None:
            raise ValueError(
                'reference_points, spatial_shapes and level_start_index are needed by deformable attention.'
            )
        value = query if value is None else value
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query = query.transpose(0, 1)
            value = value.transpose(0, 1)
        values = self.project(value, key_padding_mask)
        output = self.attended(query, values, spatial_shapes, level_start_index, reference_points)
        output = self.output_proj(output)
        return output if self.batch_first else output.transpose(0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend from ``query`` to the feature levels in ``value``, with the gate.

        Args:
            query: ``(Q, B, C)``, or ``(B, Q, C)`` if ``batch_first``, as all of the following.
            key: Not used, as in the host.
            value: ``(S, B, C)``, the levels one after the other; default ``query``.
            query_pos: Position embedding, added to ``query``.
            key_padding_mask: ``(B, S)``, True where ``value`` is padding.
            reference_points: ``(B, Q, L, 2)`` as (x, y), or ``(B, Q, L, 4)`` as (x, y, w, h), in 0 to 1.
            spatial_shapes: ``(L, 2)`` as (height, width), integer.
            level_start_index: ``(L,)``, integer.
            **kwargs: What layers hand to every attention; not used, as in the host.

        Raises:
            ValueError: ``reference_points``, ``spatial_shapes`` or ``level_start_index`` missing.
        """
        levels = (reference_points, spatial_shapes, level_start_index)
        return self.attend_gated(query, value, query_pos, key_padding_mask, *levels)


@adapts(DeformableGate, DETREX)
class DetrexAttentionAdapter(GroundingDINOAttentionAdapter):
    """Adapter for detrex' ``MultiScaleDeformableAttention``, which ends with dropout and the identity added."""

    constructed_with = (*GroundingDINOAttentionAdapter.constructed_with, 'dropout')
    called_with = (
        'query',
        'key',
        'value',
        'identity',
        'query_pos',
        'key_padding_mask',
        'reference_points',
        'spatial_shapes',
        'level_start_index',
    )

    dropout: nn.Module

    def forward(  # type: ignore[override]
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        identity: Tensor | None = None,
        query_pos: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        reference_points: Tensor | None = None,
        spatial_shapes: Tensor | None = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Attend with the gate and add ``identity`` (default: ``query``); other arguments as in Grounding DINO's."""
        levels = (reference_points, spatial_shapes, level_start_index)
        output = self.attend_gated(query, value, query_pos, key_padding_mask, *levels)
        return self.dropout(output) + (query if identity is None else identity)


@adapts(DeformableGate, *RT_DETR)
class MSDeformableAttentionAdapter(ProjectAttentionAdapter):
    """Adapter for ``MSDeformableAttention`` of the repositories of RT-DETR (v1, v2, v4), D-FINE and DEIM.

    In D-FINE and DEIM the decoder projects the values once and hands in a list of levels.
    """

    constructed_with = (
        'embed_dim',
        'num_heads',
        'num_levels',
        'num_points',
        'method',
        'offset_scale',
        'value_shape',
    )
    called_with = ('query', 'reference_points', 'value', 'value_spatial_shapes')
    channels_at = 'embed_dim'
    heads_at = 'num_heads'
    levels_at = 'num_levels'

    @classmethod
    def points(cls, host: Any) -> int | tuple[int, ...]:
        """Return the number of sampling points per head and level, or a tuple of them where levels differ."""
        return points_of_levels(getattr(host, 'num_points_list', None) or host.num_points, host.num_levels)

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for a class that is not the known one, and for points that are rounded to pixels."""
        super().check(host)
        method = getattr(host, 'method', 'default')
        if method != 'default':
            raise ConfigError(f'this {full_name(type(host))} has method={method!r}, and the gates sample bilinearly.')

    def forward(
        self,
        query: Tensor,
        reference_points: Tensor,
        value: Tensor | Sequence[Tensor],
        value_spatial_shapes: Sequence[Sequence[int]],
        value_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``query`` ``(B, Q, C)`` to the feature levels in ``value``, with the gate.

        Args:
            query: The queries, with their position.
            reference_points: ``(B, Q, L, 2)`` as (x, y), or ``(B, Q, L|1, 4)`` as (x, y, w, h), in 0 to 1.
            value: The levels one after the other, ``(B, S, C)``; where the host does not project them ``(B, S, H, d)``,
                or a list of levels ``(B, H, d, h w)``.
            value_spatial_shapes: Height and width of the levels.
            value_mask: ``(B, S)``, False where there is padding.
        """
        if not isinstance(value, Tensor):
            value = torch.cat([*value], -1).permute(0, 3, 1, 2)  # (B, S, H, d)
        elif value.dim() == 3:
            padding = None if value_mask is None else value_mask == 0
            value = self.project(value, padding)
        shapes, starts = levels_on(query.device, value_spatial_shapes)
        output = self.attended(query, value, shapes, starts, reference_points)
        return self.output_proj(output) if hasattr(self, 'output_proj') else output


@adapts(DeformableGate, ULTRALYTICS)
class UltralyticsAttentionAdapter(ProjectAttentionAdapter):
    """Adapter for ``MSDeformAttn`` of ultralytics' RT-DETR; the package is AGPL and never imported here."""

    constructed_with = ('d_model', 'n_levels', 'n_heads', 'n_points')
    called_with = ('query', 'refer_bbox', 'value', 'value_shapes', 'value_mask')

    def forward(
        self,
        query: Tensor,
        refer_bbox: Tensor,
        value: Tensor,
        value_shapes: Sequence[Sequence[int]],
        value_mask: Tensor | None = None,
    ) -> Tensor:
        """Attend from ``query`` ``(B, Q, C)`` to the feature levels in ``value`` ``(B, S, C)``, with the gate.

        Args:
            query: The queries, with their position.
            refer_bbox: ``(B, Q, 1|L, 2)`` as (x, y), or ``(B, Q, 1|L, 4)`` as (x, y, w, h), in 0 to 1.
            value: The levels one after the other.
            value_shapes: Height and width of the levels.
            value_mask: ``(B, S)``, True where there is padding.
        """
        shapes, starts = levels_on(query.device, value_shapes)
        values = self.project(value, value_mask)
        return self.output_proj(self.attended(query, values, shapes, starts, refer_bbox))

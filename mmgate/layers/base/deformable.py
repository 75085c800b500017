"""Base classes of gates on the logits of multi-scale deformable attention, and that attention without a gate."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmgate.layers.base.gate import Gate, Sizes
from mmgate.layers.base.gated import GatedModule
from mmgate.layers.base.mmcv_or_torch import MMCVMultiScaleDeformableAttention
from mmgate.notes import note
from mmgate.ops.backend import check_backend
from mmgate.ops.deformable import attention_weights, ms_deform_attn, offset_locations
from mmgate.ops.deformable.uneven import axes_of_samples, points_of_levels
from mmgate.ops.layout import broadcasts_to, check_layout
from mmgate.registry import MODELS


class DeformableGate(Gate):
    """Base class of gates that multiply the logits of multi-scale deformable attention; by itself it changes nothing.

    Args:
        sizes: Sizes of the host's attention.
        backend: Backend of :func:`mmgate.ops.ms_deform_attn`. Default ``'auto'``.

    Raises:
        ConfigError: The backend is unknown, or the numbers of points do not fit the levels.

    Attributes:
        num_points: Sampling points P of a head and level; one number for each level if they differ.
    """

    identity_start = True
    operator = 'ms_deform_attn'

    def __init__(self, sizes: Sizes, *, backend: str = 'auto') -> None:
        check_backend('ms_deform_attn', backend)
        super().__init__(sizes)
        self.num_levels = sizes.levels
        self.num_points = points_of_levels(sizes.points, sizes.levels)
        self.backend = backend

    def modulate(self, query: Tensor) -> dict[str, Any]:
        """Compute the gate of a query (B, Q, C); return the gate's arguments for :func:`.ms_deform_attn`, here none.

        They are ``gate``, ``residual`` and ``position``.

        The gate broadcasts to the logits. These are ``(B, Q, H, L, P)``, or ``(B, Q, H, N)`` if :attr:`num_points` has
        a number for each level.
        """
        return {}


class WithLevels(Protocol):
    """Protocol of deformable attentions that name their sizes as mmcv's ``MultiScaleDeformableAttention`` does."""

    embed_dims: int
    num_heads: int
    num_levels: int
    num_points: int
    value_proj: nn.Linear


class DeformableHost(GatedModule):
    """Base class of the adapters that let gates into multi-scale deformable attention."""

    gate: DeformableGate

    def sample(
        self,
        query: Tensor,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        offsets: Tensor,
        logits: Tensor,
        reference_points: Tensor,
    ) -> Tensor:
        """Sample the values at each query's points, weighted by the softmax of the gated logits: ``(B, Q, H d)``.

        Args:
            query: Queries ``(B, Q, C)`` with their position embedding. Gates read these.
            value: Projected values ``(B, S, H, d)``.
            spatial_shapes: Sizes of the levels ``(L, 2)`` as (height, width), integer.
            level_start_index: Index of the first token of each level ``(L,)``, integer.
            offsets: Offsets of the sampling points ``(B, Q, H, L, P, 2)``; ``(B, Q, H, N, 2)`` if levels have different
                numbers of points, N in all.
            logits: Logits of the sampling points ``(B, Q, H, L, P)``, or ``(B, Q, H, N)``.
            reference_points: Reference points or boxes ``(B, Q, L|1, 2 or 4)``, 0 to 1.

        It notes for figures the sampling locations ``(B, Q, H, L, P, 2)`` as (x, y), 0 to 1 over a level with its
        padding; the weights ``(B, Q, H, L, P)``; the reference points, a place for each level; the shapes of the levels
        and their numbers of points ``(L,)``. If the levels have different numbers of points, locations are
        ``(B, Q, H, N, 2)`` and weights ``(B, Q, H, N)``: the points of the first level, then those of the second, and
        so on.
        """
        gating = self.gate.modulate(query)
        num_points = self.gate.num_points
        uneven = None if isinstance(num_points, int) else num_points

        def points() -> Tensor:
            return reference_points.expand(-1, -1, len(spatial_shapes), -1)

        def counts() -> Tensor:
            return torch.tensor(uneven or [num_points] * len(spatial_shapes))

        note(self.gate, 'locations', lambda: offset_locations(offsets, points(), spatial_shapes, uneven))
        note(self.gate, 'weights', lambda: attention_weights(logits, **gating))
        note(self.gate, 'reference_points', points)
        note(self.gate, 'spatial_shapes', spatial_shapes)
        note(self.gate, 'num_points', counts)
        return ms_deform_attn(
            value,
            spatial_shapes,
            level_start_index,
            offsets,
            logits,
            reference_points=reference_points,
            num_points=uneven,
            backend=self.gate.backend,
            **gating,
        )


class GatedDeformableAttention(DeformableHost):
    """Adapter that lets gates into mmcv's ``MultiScaleDeformableAttention`` or, without mmcv, into our copy of it."""

    embed_dims: int
    num_heads: int
    num_levels: int
    num_points: int | tuple[int, ...]
    batch_first: bool
    value_proj: nn.Linear
    sampling_offsets: nn.Linear
    attention_weights: nn.Linear
    output_proj: nn.Linear
    dropout: nn.Dropout

    @classmethod
    def sizes(cls, host: WithLevels) -> Sizes:
        """Read channels, heads, levels and points off mmcv's module (the host), for its gate."""
        inputs = (host.embed_dims, host.embed_dims, host.embed_dims)
        channels = host.value_proj.out_features
        return Sizes(channels, host.num_heads, inputs=inputs, levels=host.num_levels, points=host.num_points)

    def forward(
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
        """Attend from ``query`` to the feature levels in ``value``, with the gate; the arguments are those of mmcv.

        Args:
            query: Queries ``(Q, B, C)``, or ``(B, Q, C)`` if ``batch_first``, as ``value`` and ``identity``, too.
            key: Not used, as in mmcv.
            value: Tokens of all levels ``(S, B, C)``, one level after the other; default ``query``.
            identity: Tensor of the shape of ``query`` that is added to the result; default ``query``.
            query_pos: Position embedding that is added to ``query``.
            key_padding_mask: Mask ``(B, S)``, True where ``value`` is padding.
            reference_points: ``(B, Q, L, 2)`` as (x, y), or ``(B, Q, L, 4)`` as (x, y, w, h), in 0 to 1.
            spatial_shapes: Sizes of the levels ``(L, 2)`` as (height, width), integer.
            level_start_index: Index of the first token of each level ``(L,)``, integer.
            **kwargs: mmcv's deprecated ``residual`` for ``identity``, and arguments that mmdet's layers give to every
                attention. The latter are not used, as in mmcv.

        Returns:
            The output, of the shape of ``query``.

        Raises:
            ValueError: ``reference_points``, ``spatial_shapes`` or ``level_start_index`` is missing, or a shape is
                wrong.
        """
        if reference_points is None or spatial_shapes is None or level_start_index is None:
            raise ValueError(
                'reference_points, spatial_shapes and level_start_index are needed by deformable attention.'
            )
        if 'residual' in kwargs:
            warnings.warn('"residual" is deprecated, use "identity".', DeprecationWarning, stacklevel=2)
            identity = kwargs['residual']
        value = query if value is None else value
        identity = query if identity is None else identity
        of_query, of_value = ('B Q', 'B S') if self.batch_first else ('Q B', 'S B')
        added = ' '.join(f'{axis}|1' for axis in (*of_query.split(), self.embed_dims))
        check_layout(
            ('query', query, f'{of_query} {self.embed_dims}'),
            ('value', value, f'{of_value} {self.embed_dims}'),
            ('identity', identity, added),
            ('query_pos', query_pos, added),
            one_dtype=False,
        )
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query = query.transpose(0, 1)
            value = value.transpose(0, 1)

        samples = (self.num_heads, *axes_of_samples(self.num_points, self.num_levels))
        value = self.value_proj(value)  # (B, S, C)
        if key_padding_mask is not None:
            if not broadcasts_to(key_padding_mask.shape, value.shape[:2]):
                raise ValueError(f'key_padding_mask must be (B, S), got {tuple(key_padding_mask.shape)}.')
            value = value.masked_fill(key_padding_mask[..., None], 0.0)
        value = value.unflatten(-1, (self.num_heads, -1))  # (B, S, H, d)
        offsets = self.sampling_offsets(query).unflatten(-1, (*samples, 2))  # (B, Q, H, L, P, 2) or (B, Q, H, N, 2)
        logits = self.attention_weights(query).unflatten(-1, samples)  # (B, Q, H, L, P) or (B, Q, H, N)
        output = self.sample(query, value, spatial_shapes, level_start_index, offsets, logits, reference_points)
        output = self.output_proj(output)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return self.dropout(output) + identity


@MODELS.register_module()
class MultiScaleDeformableAttention(GatedDeformableAttention, MMCVMultiScaleDeformableAttention):
    """mmcv's multi-scale deformable attention, without a gate, computed by mmgate's operator instead of mmcv's.

    Use it for the speed of :func:`mmgate.ops.ms_deform_attn`, or on a device for which mmcv has no compiled operator.
    It has mmcv's parameters and no others.

    Args:
        embed_dims: Channels C. Default 256.
        num_heads: Heads H. Default 8.
        num_levels: Feature levels L. Default 4.
        num_points: Sampling points P of a head and level, or a list with the number for each level, as D-FINE has it.
            Default 4.
        im2col_step: As in mmcv.
        dropout: Probability of dropout after the output projection.
        batch_first: True for inputs ``(B, N, C)``, False for ``(N, B, C)``.
        norm_cfg: Not used.
        init_cfg: mmengine's initialisation config.
        value_proj_ratio: Channels of the values over C.
        **options: Options of :class:`DeformableGate`.

    Raises:
        ConfigError: The backend is unknown, ``embed_dims`` is no multiple of ``num_heads``, or a list of numbers of
            points does not have a positive one for each level.
        TypeError: Neither mmcv's class nor the gate has an argument of that name.

    Attributes:
        gate_type: Class of the gate; this one changes no logit.

    Source: Deformable DETR (arXiv 2010.04159), Eq. 3.
    """

    gate_type: type[DeformableGate] = DeformableGate

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int | Sequence[int] = 4,
        im2col_step: int = 64,
        dropout: float = 0.1,
        batch_first: bool = False,
        norm_cfg: dict | None = None,
        init_cfg: dict | None = None,
        value_proj_ratio: float = 1.0,
        **options: Any,
    ) -> None:
        # The gate is made, and its options are checked, before mmcv's constructor, which calls init_weights.
        inputs = (embed_dims, embed_dims, embed_dims)
        channels = int(embed_dims * value_proj_ratio)
        points = points_of_levels(num_points, num_levels)
        sizes = Sizes(channels, num_heads, inputs=inputs, levels=num_levels, points=points)
        gate = self.gate_type(sizes, **options)
        # mmcv has one number of points; with as many levels of one point its projections have the same outputs.
        levels_of_mmcv, points_of_mmcv = (num_levels, points) if isinstance(points, int) else (sum(points), 1)
        super().__init__(
            embed_dims,
            num_heads,
            levels_of_mmcv,
            points_of_mmcv,
            im2col_step,
            dropout,
            batch_first,
            norm_cfg,
            init_cfg,
            value_proj_ratio,
        )
        self.num_levels = num_levels
        self.num_points = points
        self._start_offsets()
        self.gate = gate
        gate.reset_gate()

    @torch.no_grad()
    def _start_offsets(self) -> None:
        """Initialise sampling offsets for levels with different numbers of points: 1, 2, ... pixels from the reference.

        mmcv has put the points of levels with one point 1 pixel away.
        """
        if not isinstance(self.num_points, int):
            bias = self.sampling_offsets.bias
            steps = torch.cat([torch.arange(1, count + 1, device=bias.device) for count in self.num_points])  # (N,)
            bias.view(self.num_heads, -1, 2).mul_(steps[:, None])

    def init_weights(self) -> None:
        """Initialise as mmcv does, and the gate after that; detectors call this after xavier on all parameters."""
        num_levels = self.num_levels
        num_points = self.num_points
        if not isinstance(num_points, int):
            self.num_levels = sum(num_points)
            self.num_points = 1
        super().init_weights()
        self.num_levels = num_levels
        self.num_points = num_points
        self._start_offsets()
        gate = self._modules.get('gate')
        if isinstance(gate, Gate):
            gate.init_weights()

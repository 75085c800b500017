"""Base classes of gates on the logits of multi-scale deformable attention, and that attention without a gate."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmgate.adapter import Adapter
from mmgate.gate import Gate, Sizes
from mmgate.gates.base.mmcv_or_torch import MMCVMultiScaleDeformableAttention
from mmgate.gates.base.named import attention_named
from mmgate.notes import note
from mmgate.ops.backend import check_backend
from mmgate.ops.deformable import attention_weights, ms_deform_attn, offset_locations
from mmgate.ops.deformable.uneven import axes_of_samples, points_of_levels
from mmgate.ops.layout import broadcasts_to, check_layout


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


class DeformableAdapter(Adapter):
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


class DeformableAttentionAdapter(DeformableAdapter):
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


class UnevenDeformableAttention(MMCVMultiScaleDeformableAttention):
    """mmcv's ``MultiScaleDeformableAttention`` with another number of sampling points in each level, as D-FINE has it.

    Args:
        num_points: Sampling points of a head, one positive number for each level.
        **options: Other arguments of mmcv's class, by name.

    Raises:
        ConfigError: The numbers do not fit the levels.
    """

    num_points: Any

    def __init__(self, *, num_points: Sequence[int], num_levels: int = 4, **options: Any) -> None:
        self._counts = tuple(num_points)
        points = points_of_levels(num_points, num_levels)
        # With as many levels of one point mmcv's projections have the same outputs.
        super().__init__(num_levels=sum(num_points), num_points=1, **options)
        self.num_levels = num_levels
        self.num_points = points
        self._start_offsets()

    def init_weights(self) -> None:
        """Initialise as mmcv does, with the points of a level 1, 2, ... pixels from the reference."""
        num_levels = self.num_levels
        num_points = self.num_points
        self.num_levels = sum(self._counts)
        self.num_points = 1
        super().init_weights()
        self.num_levels = num_levels
        self.num_points = num_points
        self._start_offsets()

    @torch.no_grad()
    def _start_offsets(self) -> None:
        # mmcv puts the points of levels with one point 1 pixel away, also from its constructor.
        if self.num_levels != len(self._counts):
            return
        bias = self.sampling_offsets.bias
        steps = torch.cat([torch.arange(1, count + 1, device=bias.device) for count in self._counts])  # (N,)
        bias.view(self.num_heads, -1, 2).mul_(steps[:, None])


def build_deformable_attention(
    embed_dims: int = 256,
    num_heads: int = 8,
    num_levels: int = 4,
    num_points: int | Sequence[int] = 4,
    *args: Any,
    **options: Any,
) -> nn.Module:
    """Build mmcv's ``MultiScaleDeformableAttention`` or, without mmcv, our copy of its layers, with mmcv's arguments.

    ``num_points`` may be a list with the number for each level.
    """
    points = points_of_levels(num_points, num_levels)
    if isinstance(points, int):
        return MMCVMultiScaleDeformableAttention(embed_dims, num_heads, num_levels, points, *args, **options)
    if args:
        raise TypeError('give the arguments after num_points by name where it is a list.')
    return UnevenDeformableAttention(
        embed_dims=embed_dims, num_heads=num_heads, num_levels=num_levels, num_points=points, **options
    )


def deformable_attention(name: str, gate: type[DeformableGate]) -> Callable[..., nn.Module]:
    """Register and return a function that builds mmcv's deformable attention with a gate."""
    return attention_named(
        name, gate, "mmcv's ``MultiScaleDeformableAttention``", build_deformable_attention, DeformableAttentionAdapter
    )


# mmcv's attention without a gate, computed by mmgate's operator instead of mmcv's.
MultiScaleDeformableAttention = deformable_attention('MultiScaleDeformableAttention', DeformableGate)

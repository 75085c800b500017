"""PLuG attention: a learned gate on every attention logit, before the softmax."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

from mmgate.ops.ms_deform_attn import POSITIONS, check_backend, ms_deform_attn
from mmgate.registry import MODELS

from .gml import GatingModulation, check_option, xavier_
from .start import OwnStart

# Table 9, by which of (heads, levels, points) a gate value is specific to
GRANULARITIES = {
    'head_level': (True, True, False),
    'head_level_point': (True, True, True),
    'head': (True, False, False),
    'level_point': (False, True, True),
    'level': (False, True, False),
}


@MODELS.register_module()
class PLuGMultiScaleDeformableAttention(OwnStart, MultiScaleDeformableAttention):
    """Multi-scale deformable attention with PLuG's gate, in the place of mmcv's class.

    Takes all of mmcv's arguments and keeps its parameter names; ``gate_proj`` and ``gml`` are new.

    Args:
        embed_dims: Channels C. Default 256.
        num_heads: Heads H. Default 8.
        num_levels: Feature levels L. Default 4.
        num_points: Sampling points P of a head and level. Default 4.
        gml: Gating modulation, see :class:`GatingModulation`. Default ``'product'``.
        activation: Of the gate: ``'none'`` (default), ``'tanh'``, ``'hardtanh'``, ``'softsign'`` (Table 8).
        granularity: What a gate value is specific to (Table 9): ``'head_level'`` (default), ``'head_level_point'``,
            ``'head'``, ``'level_point'`` or ``'level'``.
        position: ``'pre_softmax'`` (default) or ``'post_softmax'`` (Table 10).
        residual: Multiply by ``1 + G`` (default) or by ``G`` (Table 12).
        init: ``'identity'`` (default): exactly mmcv's attention until the gate is trained; ``'paper'``: as the authors'
            hosts start linear layers, see :class:`GatingModulation`. The gate projection starts xavier-uniform in both,
            with torch's bias.
        backend: Of :func:`mmgate.ops.ms_deform_attn`. Default ``'auto'``.
        **kwargs: mmcv's further arguments: im2col_step, dropout, batch_first, norm_cfg, init_cfg, value_proj_ratio.

    Raises:
        ValueError: An unknown option, or sizes that do not divide.
        TypeError: An argument that neither mmcv's class nor this one has.

    Source: PLuG attention, section 3.2, Eq. 8 to 12.
    """

    own = ('gate_proj', 'gml')

    def __init__(
        self,
        embed_dims: int = 256,
        num_heads: int = 8,
        num_levels: int = 4,
        num_points: int = 4,
        *,
        gml: str = 'product',
        activation: str = 'none',
        granularity: str = 'head_level',
        position: str = 'pre_softmax',
        residual: bool = True,
        init: str = 'identity',
        backend: str = 'auto',
        **kwargs: Any,
    ) -> None:
        check_option('granularity', granularity, tuple(GRANULARITIES))
        check_option('position', position, POSITIONS)
        check_backend(backend)
        super().__init__(embed_dims, num_heads, num_levels, num_points, **kwargs)
        self.granularity, self.position, self.residual, self.backend = granularity, position, residual, backend
        full = (num_heads, num_levels, num_points)
        self.gate_shape = tuple(n if own else 1 for n, own in zip(full, GRANULARITIES[granularity], strict=True))
        self.gate_proj = nn.Linear(embed_dims, torch.Size(self.gate_shape).numel())
        self.gml = GatingModulation(gml, activation=activation, residual=residual, init=init)
        self.reset_start()

    def init_weights(self) -> None:
        """Initialise as mmcv does, then the gate; detectors call this after a xavier pass over everything."""
        MultiScaleDeformableAttention.init_weights(self)
        if hasattr(self, 'gml'):  # mmcv's constructor calls this before the gate exists
            self.reset_start()

    @torch.no_grad()
    def reset_start(self) -> None:
        """Set the gate's start."""
        xavier_(self.gate_proj)
        if self.gml.variant == 'none' and self.gml.init == 'identity':
            self.gate_proj.weight.zero_()
            self.gate_proj.bias.fill_(0.0 if self.residual else 1.0)
        self.gml.reset_parameters()

    def gate(self, query: Tensor) -> Tensor:
        """Return the gate ``G`` (B, Q, H|1, L|1, P|1) of ``query`` (B, Q, C), position embedding included (Eq. 10)."""
        return self.gml(self.gate_proj(query)).unflatten(-1, self.gate_shape)

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
        """Attend from ``query`` to the levels in ``value``; the arguments are mmcv's.

        Args:
            query: ``(Q, B, C)``, or ``(B, Q, C)`` if ``batch_first``, as all of the following.
            key: Not used, as in mmcv.
            value: ``(S, B, C)``, the levels one after the other; default ``query``.
            identity: Added to the result, of the shape of ``query``; default ``query``.
            query_pos: Position embedding, added to ``query``.
            key_padding_mask: ``(B, S)``, True where ``value`` is padding.
            reference_points: ``(B, Q, L, 2)`` as (x, y), or ``(B, Q, L, 4)`` as (x, y, w, h), in 0 to 1.
            spatial_shapes: ``(L, 2)`` as (height, width), integer.
            level_start_index: ``(L,)``, integer.
            **kwargs: mmcv's deprecated ``residual`` for ``identity``, and what mmdet's layers hand to every attention;
                not used, as in mmcv.

        Returns:
            Of the shape of ``query``.

        Raises:
            ValueError: ``reference_points``, ``spatial_shapes`` or ``level_start_index`` missing or of a wrong shape.
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
        query = query if query_pos is None else query + query_pos
        if not self.batch_first:
            query, value = query.transpose(0, 1), value.transpose(0, 1)

        heads_levels_points = (self.num_heads, self.num_levels, self.num_points)
        value = self.value_proj(value)  # (B, S, C)
        if key_padding_mask is not None:
            value = value.masked_fill(key_padding_mask[..., None], 0.0)
        value = value.unflatten(-1, (self.num_heads, -1))  # (B, S, H, d)
        offsets = self.sampling_offsets(query).unflatten(-1, (*heads_levels_points, 2))  # (B, Q, H, L, P, 2)
        logits = self.attention_weights(query).unflatten(-1, heads_levels_points)  # (B, Q, H, L, P)
        output = ms_deform_attn(
            value,
            spatial_shapes,
            level_start_index,
            offsets,
            logits,
            self.gate(query),
            residual=self.residual,
            position=self.position,
            reference_points=reference_points,
            backend=self.backend,
        )
        output = self.output_proj(output)
        if not self.batch_first:
            output = output.transpose(0, 1)
        return self.dropout(output) + identity

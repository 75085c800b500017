"""PLuG in deformable attention: a learned gate multiplies every attention logit before the softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.deformable import DeformableGate, deformable_attention
from mmgate.notes import note
from mmgate.ops.deformable import POSITIONS
from mmgate.ops.deformable.uneven import spread

from .gml import GatingModulation
from .parts.options import check_option

# Variants of Table 9: whether each head, each level and each point has separate gate values.
GRANULARITIES = {
    'head_level': (True, True, False),
    'head_level_point': (True, True, True),
    'head': (True, False, False),
    'level_point': (False, True, True),
    'level': (False, True, False),
}


class PLuGDeformableGate(DeformableGate):
    """PLuG's gate, which multiplies the logits of multi-scale deformable attention by a function of the query.

    Where the levels have different numbers of points, N of them in all, a gate of each point has N values, and a gate
    of each level is the same for all points of that level.

    Args:
        sizes: Sizes of the host's attention.
        gml: Variant of the gating modulation, see :class:`GatingModulation`. Default ``'product'``.
        activation: Activation of the gate: ``'none'`` (default), ``'tanh'``, ``'hardtanh'``, ``'softsign'`` (Table 8).
        granularity: Axes along which gate values differ (Table 9): ``'head_level'`` (default),
            ``'head_level_point'``, ``'head'``, ``'level_point'`` or ``'level'``.
        position: ``'pre_softmax'`` (default) gates the logits, ``'post_softmax'`` the weights (Table 10).
        residual: True (default) multiplies by ``1 + G``, False by ``G`` (Table 12).
        init: Start of the gate: ``'identity'`` (default), the vanilla attention; ``'paper'``, as the authors' detectors
            start linear layers; or ``'vit'``, as vision transformers start them, see :class:`GatingModulation`. The
            gate projection starts xavier-uniform with torch's bias, but for ``'vit'``.
        backend: Backend of :func:`mmgate.ops.ms_deform_attn`. Default ``'auto'``.

    Raises:
        ConfigError: An option is unknown, or the channels are no multiple of the heads.

    Source: PLuG attention, section 3.2, Eq. 8 to 12.
    """

    identity_start = True
    undecayed = ('gml',)

    def __init__(
        self,
        sizes: Sizes,
        *,
        gml: str = 'product',
        activation: str = 'none',
        granularity: str = 'head_level',
        position: str = 'pre_softmax',
        residual: bool = True,
        init: str = 'identity',
        backend: str = 'auto',
    ) -> None:
        check_option('granularity', granularity, tuple(GRANULARITIES))
        check_option('position', position, POSITIONS)
        super().__init__(sizes, backend=backend)
        self.granularity = granularity
        self.position = position
        self.residual = residual
        of_heads, of_levels, of_points = GRANULARITIES[granularity]
        self.gate_shape: tuple[int, ...] = (sizes.heads if of_heads else 1, sizes.levels if of_levels else 1)
        if isinstance(self.num_points, int):
            self.gate_shape = (*self.gate_shape, self.num_points if of_points else 1)
        elif of_points:
            self.gate_shape = (self.gate_shape[0], sum(self.num_points))
        self.gate_proj = nn.Linear(sizes.input_widths[0], torch.Size(self.gate_shape).numel())
        self.gml = GatingModulation(gml, activation=activation, residual=residual, init=init)
        if gml == 'none' and init == 'identity':
            self.undecayed = ('gate_proj.bias',)

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise the gate as the option ``init`` says."""
        self.gml.start_projection(self.gate_proj)
        if self.gml.variant == 'none' and self.gml.init == 'identity':
            self.gate_proj.weight.zero_()
            self.gate_proj.bias.fill_(0.0 if self.residual else 1.0)
        self.gml.reset_parameters()

    def compute_gate(self, query: Tensor) -> Tensor:
        """Compute the gate ``G`` of queries (B, Q, C) that include their position embedding (Eq. 10).

        It is (B, Q, H|1, L|1, P|1), or (B, Q, H|1, N|1) where the levels have different numbers of points.
        """
        gate = self.gml(self.gate_proj(query)).unflatten(-1, self.gate_shape)
        _, of_levels, of_points = GRANULARITIES[self.granularity]
        if not isinstance(self.num_points, int) and of_levels and not of_points:
            gate = spread(gate, self.num_points, 3)
        return gate

    def modulate(self, query: Tensor) -> dict[str, Any]:
        """Compute the gate of a query (B, Q, C); return the gate's arguments for :func:`.ms_deform_attn` (Eq. 12)."""
        gate = self.compute_gate(query)
        note(self, 'gate', gate, 'levels', unchanged=0 if self.residual else 1)
        return dict(gate=gate, residual=self.residual, position=self.position)


PLuGMultiScaleDeformableAttention = deformable_attention('PLuGMultiScaleDeformableAttention', PLuGDeformableGate)

"""PLuG attention: a learned gate on every attention logit, before the softmax."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.layers.base.deformable import MultiScaleDeformableAttention
from mmgate.layers.base.init import GateInit
from mmgate.ops.ms_deform_attn import POSITIONS
from mmgate.registry import MODELS

from .gml import GatingModulation, check_option

# Table 9, by which of (heads, levels, points) a gate value is specific to
GRANULARITIES = {
    'head_level': (True, True, False),
    'head_level_point': (True, True, True),
    'head': (True, False, False),
    'level_point': (False, True, True),
    'level': (False, True, False),
}


@MODELS.register_module()
class PLuGMultiScaleDeformableAttention(GateInit, MultiScaleDeformableAttention):
    """Multi-scale deformable attention with PLuG's gate, in the place of mmcv's class.

    Takes all of mmcv's arguments and keeps its parameter names; ``gate_proj`` and ``gml`` are new.

    Args:
        gml: Gating modulation, see :class:`GatingModulation`. Default ``'product'``.
        activation: Of the gate: ``'none'`` (default), ``'tanh'``, ``'hardtanh'``, ``'softsign'`` (Table 8).
        granularity: What a gate value is specific to (Table 9): ``'head_level'`` (default), ``'head_level_point'``,
            ``'head'``, ``'level_point'`` or ``'level'``.
        position: ``'pre_softmax'`` (default) or ``'post_softmax'`` (Table 10).
        residual: Multiply by ``1 + G`` (default) or by ``G`` (Table 12).
        init: ``'identity'`` (default): exactly mmcv's attention until the gate is trained; ``'paper'``: as the authors'
            hosts start linear layers; ``'vit'``: as vision transformers do, see :class:`GatingModulation`. The gate
            projection starts xavier-uniform, with torch's bias, in the first two.
        backend: Of :func:`mmgate.ops.ms_deform_attn`. Default ``'auto'``.
        **kwargs: Those of :class:`.MultiScaleDeformableAttention`, as all sizes are.

    Raises:
        ValueError: An unknown option, or sizes that do not divide.

    Source: PLuG attention, section 3.2, Eq. 8 to 12.
    """

    identity_start = True
    gate_parameters = ('gate_proj', 'gml')
    undecayed = ('gml',)
    gate_readings = {'gate': 'levels'}

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
        super().__init__(embed_dims, num_heads, num_levels, num_points, backend=backend, **kwargs)
        self.granularity, self.position, self.residual = granularity, position, residual
        full = (num_heads, num_levels, num_points)
        self.gate_shape = tuple(n if own else 1 for n, own in zip(full, GRANULARITIES[granularity], strict=True))
        self.gate_proj = nn.Linear(embed_dims, torch.Size(self.gate_shape).numel())
        self.gml = GatingModulation(gml, activation=activation, residual=residual, init=init)
        self.reset_gate()

    def init_weights(self) -> None:
        """Initialise as mmcv does, then the gate; detectors call this after a xavier pass over everything."""
        MultiScaleDeformableAttention.init_weights(self)
        if hasattr(self, 'gml') and not self.gate_loaded:  # mmcv's constructor calls this before the gate exists
            self.reset_gate()

    @torch.no_grad()
    def reset_gate(self) -> None:
        """Set the gate's start."""
        self.gml.start_projection(self.gate_proj, self.in_vit)
        if self.gml.variant == 'none' and self.gml.init == 'identity':
            self.gate_proj.weight.zero_()
            self.gate_proj.bias.fill_(0.0 if self.residual else 1.0)
        self.gml.reset_parameters(self.in_vit)

    def gate(self, query: Tensor) -> Tensor:
        """Return the gate ``G`` (B, Q, H|1, L|1, P|1) of ``query`` (B, Q, C), position embedding included (Eq. 10)."""
        return self.gml(self.gate_proj(query)).unflatten(-1, self.gate_shape)

    def read_gate(self, name: str, *inputs: Tensor) -> Tensor:
        """Return :meth:`gate` of the query."""
        return self.gate(inputs[0])

    def gating(self, query: Tensor) -> dict[str, Any]:
        """Return the gate of ``query`` (B, Q, C) and how the logits take it (Eq. 12)."""
        return dict(gate=self.gate(query), residual=self.residual, position=self.position)

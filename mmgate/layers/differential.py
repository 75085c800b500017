"""The attention of the differential transformer: one softmax attention minus another."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mmgate.layers.base.dense import DenseGate, GatedMultiheadAttention, Inputs
from mmgate.layers.base.gate import Sizes
from mmgate.ops.differential_attention import differential_streams, stream_maps
from mmgate.registry import MODELS

from .parts.rms_norm import RMSNorm

LAMBDAS = ('lambda_q1', 'lambda_k1', 'lambda_q2', 'lambda_k2')


class DifferentialGate(DenseGate):
    """Differential attention as a gate: the difference of two softmax attentions ``(A1 - lambda A2) V``.

    ``lambda`` is one number for the layer: ``exp(lq1 lk1) - exp(lq2 lk2) + lambda_init`` with four learnt vectors, or
    ``lambda_init`` itself. The heads are as wide as those of the vanilla attention, so that the projections keep their
    sizes. Each of the two attentions (streams) takes one half of a head's channels. Each head is normalised and scaled
    by ``1 - lambda_init``. There is no identity start.

    Args:
        sizes: Sizes of the host's attention.
        depth: Number l of the layer, from 1 on, which gives ``lambda_init = 0.8 - 0.6 exp(-0.3 (l - 1))``.
        lambda_init: Value to use instead of that, such as M-DGSA's 0.8.
        learnable: True learns lambda; False makes it ``lambda_init``.

    Raises:
        ValueError: The head width is odd, or ``depth`` is below 1.

    The vectors start normal with deviation 0.1.

    Source: Differential transformer (Ye et al., 2024), Eq. 1 to 3.
    """

    undecayed = ('head_norm',)
    two_streams = True
    lambda_q1: nn.Parameter | None
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(
        self,
        sizes: Sizes,
        *,
        depth: int = 1,
        lambda_init: float | None = None,
        learnable: bool = True,
    ) -> None:
        super().__init__(sizes)
        if depth < 1:
            raise ValueError(f'depth={depth} must be the number of the layer, from 1 on.')
        of_depth = 0.8 - 0.6 * math.exp(-0.3 * (depth - 1))
        self.lambda_init = of_depth if lambda_init is None else lambda_init
        for name in LAMBDAS:
            vector = nn.Parameter(torch.empty(self.head_dim // 2)) if learnable else None
            self.register_parameter(name, vector)
        self.head_norm = RMSNorm(self.head_dim, eps=1e-5)

    def reset_gate(self) -> None:
        """Initialise the vectors of lambda from a normal distribution, and the norm to 1."""
        for name in LAMBDAS:
            vector = getattr(self, name)
            if vector is not None:
                nn.init.normal_(vector, std=0.1)
        nn.init.ones_(self.head_norm.get_parameter('weight'))

    def compute_lambda(self) -> Tensor | float:
        """Compute lambda, the weight of the attention that is subtracted."""
        if self.lambda_q1 is None:
            return self.lambda_init
        first = (self.lambda_q1 * self.lambda_k1).sum()
        second = (self.lambda_q2 * self.lambda_k2).sum()
        return first.exp() - second.exp() + self.lambda_init

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute the difference of both attentions; return the normalised, scaled heads ``(B, H, N, d)``."""
        first, second = differential_streams(query, key, value, bias, dropout=self.drop_rate)
        return self.head_norm(first - self.compute_lambda() * second) * (1 - self.lambda_init)

    def attention_map(self, query: Tensor, key: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the attention weights ``A1 - lambda A2``, which may be negative, ``(B, H, N, M)``."""
        first, second = stream_maps(query, key, bias)
        return first - self.compute_lambda() * second


@MODELS.register_module()
class DifferentialMultiheadAttention(GatedMultiheadAttention):
    """mmcv's ``MultiheadAttention`` with differential attention; rules name this class as their ``type``.

    It takes the options of :class:`DifferentialGate`.
    """

    gate_type = DifferentialGate

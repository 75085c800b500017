"""PLuG in dense attention: a learned gate for each pair of query and key multiplies its logit."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseGate, Inputs, dense_attention
from mmgate.notes import note
from mmgate.ops.deformable import POSITIONS
from mmgate.ops.dense import attention_map, check_gate_backend, plug_attention, raw_gates

from .gml import GatingModulation
from .parts.options import check_option, number


class PLuGGate(DenseGate):
    """PLuG's gate for each pair of query and key, which multiplies their logit in dense attention.

    Args:
        sizes: Sizes of the host's attention.
        ratio: Width of the gate's queries and keys, divided by the head width: ``g = ratio * d`` (Fig. 4). Default 1.0.
        heads: ``'shared'`` (default) for one gate for all heads, ``'per_head'`` for one each (Table 6).
        gml: Variant of the gating modulation, see :class:`GatingModulation` (Table 4). Default ``'product'``.
        activation: Activation of the gate: ``'tanh'`` (default), ``'hardtanh'``, ``'softsign'``, ``'none'`` (Table 5).
        position: ``'pre_softmax'`` (default) gates the logits, ``'post_softmax'`` the weights (Table 10).
        residual: True (default) multiplies by ``1 + G``, False by ``G`` (Table 11).
        init: Start of the gate: ``'identity'`` (default), the vanilla attention; ``'paper'``, as the authors' detectors
            start linear layers; or ``'vit'``, as vision transformers start them, see :class:`GatingModulation`. The
            gate projections start xavier-uniform with torch's bias, but for ``'vit'``.
        backend: Backend of :func:`mmgate.ops.plug_attention`. Default ``'auto'``.

    Raises:
        ConfigError: An option is unknown, the backend does not have it, or a ratio leaves no gate channel or, between
            channels, is not 1. Or the
            options rule out an identity start: G = 1 through a saturating activation, or ``gml='none'``, which has no
            parameter that could make G = 0.

    Source: PLuG attention, section 3.1, Eq. 1 to 7 and Algorithm 1.
    """

    identity_start = True
    operator = 'plug_attention'
    undecayed = ('gml',)

    def __init__(
        self,
        sizes: Sizes,
        *,
        ratio: float = 1.0,
        heads: str = 'shared',
        gml: str = 'product',
        activation: str = 'tanh',
        position: str = 'pre_softmax',
        residual: bool = True,
        init: str = 'identity',
        backend: str = 'auto',
    ) -> None:
        check_option('heads', heads, ('shared', 'per_head'))
        check_option('position', position, POSITIONS)
        super().__init__(sizes)
        if init == 'identity' and gml == 'none':
            raise ConfigError("gml='none' has no parameter that makes the identity; use init='paper' or 'vit'.")
        width = round(number('ratio', ratio, above=0) * self.head_dim)
        if width < 1:
            raise ConfigError(f'ratio={ratio} of {self.head_dim} channels a head leaves no gate channel.')
        if sizes.over_channels and width != self.head_dim:
            raise ConfigError(
                f'the gate is of {width} x {width} pairs of channels, but the heads of this attention between channels '
                f'have {self.head_dim}; leave ratio at 1.'
            )
        self.gate_heads = 1 if heads == 'shared' else self.num_heads
        self.gate_width = width
        self.position = position
        self.residual = residual
        self.backend = backend
        self.gate_q_proj = nn.Linear(self.qdim, self.gate_heads * width)
        self.gate_k_proj = nn.Linear(self.kdim, self.gate_heads * width)
        self.gml = GatingModulation(gml, activation=activation, residual=residual, init=init)
        check_gate_backend(backend, self.gml, width, residual, position)

    def reset(self) -> None:
        """Initialise the gate as the option ``init`` says."""
        self.gml.start_projection(self.gate_q_proj)
        self.gml.start_projection(self.gate_k_proj)
        self.gml.reset_parameters()

    def gate_vectors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Project the inputs to the gate's queries ``(B, H|1, N, g)`` and keys ``(B, H|1, M, g)``.

        Raw gates are their scalar products.
        """
        gate_q = self.gate_q_proj(inputs[0]).unflatten(-1, (self.gate_heads, -1))
        gate_k = self.gate_k_proj(inputs[1]).unflatten(-1, (self.gate_heads, -1))
        return gate_q.transpose(1, 2), gate_k.transpose(1, 2)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute attention with gated logits and return the heads ``(B, H, N, d)`` (Eq. 5 to 7)."""
        vectors = self.gate_vectors(inputs)
        where: Any = dict(residual=self.residual, position=self.position)
        note(self, 'gate', lambda: self.gml(raw_gates(*vectors)), 'pairs', unchanged=0 if self.residual else 1)
        note(self, 'attention', lambda: attention_map(query, key, *vectors, self.gml, bias, **where))
        note(self, 'values', value)
        return self.attend_by_vectors(query, key, value, vectors, bias)

    def attend_by_vectors(
        self, query: Tensor, key: Tensor, value: Tensor, vectors: tuple[Tensor, Tensor], bias: Tensor | None
    ) -> Tensor:
        """Compute attention with gated logits, given the gate's queries and keys of :meth:`gate_vectors`."""
        return plug_attention(
            query,
            key,
            value,
            *vectors,
            self.gml,
            bias,
            residual=self.residual,
            position=self.position,
            dropout=self.drop_rate,
            backend=self.backend,
        )


PLuGMultiheadAttention = dense_attention('PLuGMultiheadAttention', PLuGGate)

"""PLuG attention in its dense form."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmgate.layers.base.dense import DenseGate, GatedMultiheadAttention, Inputs
from mmgate.layers.base.gate import Sizes
from mmgate.ops.ms_deform_attn import POSITIONS
from mmgate.ops.plug_attention import attention_map, check_backend, plug_attention
from mmgate.registry import MODELS

from .gml import GatingModulation, check_option


class PLuGGate(DenseGate):
    """A gate of each query-key pair that multiplies the logits: ``gate_q_proj``, ``gate_k_proj`` and ``gml``.

    Args:
        sizes: Of the host's attention.
        ratio: Gate width over head width, ``g = ratio * d`` (Fig. 4). Default 1.0.
        heads: ``'shared'`` (default): one gate for all heads, or ``'per_head'`` (Table 6).
        gml: Gating modulation, see :class:`GatingModulation` (Table 4).
        activation: ``'tanh'`` (default), ``'hardtanh'``, ``'softsign'`` or ``'none'`` (Table 5).
        position: ``'pre_softmax'`` (default) or ``'post_softmax'`` (Table 10).
        residual: Multiply by ``1 + G`` (default) or by ``G`` (Table 11).
        init: ``'identity'`` (default) starts as the vanilla attention; ``'paper'`` as the authors' hosts start linear
            layers, in vision transformers otherwise than in detectors; ``'vit'`` as in vision transformers, whatever
            the host; see :class:`GatingModulation`. The gate projections start xavier-uniform with torch's bias but
            where it is a vision transformer's start.
        backend: Of :func:`mmgate.ops.plug_attention`.

    Raises:
        ValueError: An unknown option, one that the backend does not have, a ratio that leaves no gate channel, or an
            identity start that the options rule out: G = 1 through a saturating activation, or G = 0 with
            ``gml='none'``, whose projections would have to be zero.

    Source: PLuG attention, section 3.1, Eq. 1 to 7 and Algorithm 1.
    """

    identity_start = True
    operator = 'plug_attention'
    undecayed = ('gml',)
    gate_readings = {'gate': 'pairs'}

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
            raise ValueError("gml='none' has no parameter that makes the identity; use init='paper'.")
        width = round(ratio * self.head_dim)
        if width < 1:
            raise ValueError(f'ratio={ratio} of {self.head_dim} channels a head leaves no gate channel.')
        self.gate_heads = 1 if heads == 'shared' else self.num_heads
        self.gate_width = width
        self.position = position
        self.residual = residual
        self.backend = backend
        self.gate_q_proj = nn.Linear(self.qdim, self.gate_heads * width)
        self.gate_k_proj = nn.Linear(self.kdim, self.gate_heads * width)
        self.gml = GatingModulation(gml, activation=activation, residual=residual, init=init)
        check_backend(backend, self.gml, width, residual, position)

    def reset_gate(self) -> None:
        """Set the gate's start."""
        self.gml.start_projection(self.gate_q_proj, self.in_vit)
        self.gml.start_projection(self.gate_k_proj, self.in_vit)
        self.gml.reset_parameters(self.in_vit)

    def factors(self, inputs: Inputs) -> tuple[Tensor, Tensor]:
        """Return what gates are products of, ``(B, H|1, N|M, g)``, from query and key before projection."""
        pairs = zip((self.gate_q_proj, self.gate_k_proj), inputs[:2], strict=True)
        gate_q, gate_k = (proj(x).unflatten(-1, (self.gate_heads, -1)).transpose(1, 2) for proj, x in pairs)
        return gate_q, gate_k

    def read_gate(self, name: str, *inputs: Tensor) -> Tensor:
        """Return the gate of every query and key, ``(B, H|1, N, M)``."""
        query, key = self.factors((inputs[0], inputs[1], inputs[1]))
        return self.gml(query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5)

    def unchanged_value(self, name: str) -> float | None:
        """Return 0, or 1 where logits are multiplied by the gate itself."""
        return 0 if self.residual else 1

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the heads (Eq. 5 to 7)."""
        return self.attend_gated(query, key, value, self.factors(inputs), bias)

    def attend_gated(
        self, query: Tensor, key: Tensor, value: Tensor, gates: tuple[Tensor, Tensor], bias: Tensor | None
    ) -> Tensor:
        """Return the heads with the pairs gated by the products of ``gates``, see :meth:`factors`."""
        options: dict[str, Any] = dict(residual=self.residual, position=self.position)
        options.update(dropout=self.drop_rate, backend=self.backend)
        return plug_attention(query, key, value, *gates, self.gml, bias, **options)

    def attention_map(self, query: Tensor, key: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the gated attention weights."""
        return attention_map(
            query, key, *self.factors(inputs), self.gml, bias, residual=self.residual, position=self.position
        )


@MODELS.register_module()
class PLuGMultiheadAttention(GatedMultiheadAttention):
    """PLuG attention in mmcv's ``MultiheadAttention``; options as :class:`PLuGGate`."""

    gate_type = PLuGGate

"""PLuG: a learned gate multiplies every attention logit before the softmax, in deformable and in dense attention."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes, start_linear
from mmgate.gates.base.deformable import DeformableGate, deformable_attention
from mmgate.gates.base.dense import DenseGate, Inputs, dense_attention
from mmgate.notes import note
from mmgate.ops.deformable import POSITIONS
from mmgate.ops.deformable.uneven import spread
from mmgate.ops.dense import attention_map, check_gate_backend, plug_attention, raw_gates

from .parts.options import check_option, number

# Biases b and e of the linear maps gA and gB with which a gate starts as the identity: first with the residual (G = 0),
# then without (G = 1). A product whose factors both started at 0 would never receive a gradient.
IDENTITIES: dict[str, tuple[tuple[float, ...], tuple[float, ...]]] = {
    'product': ((0, 1), (1, 1)),
    'sum': ((0, 0), (0.5, 0.5)),
    'single': ((0,), (1,)),
    'mlp': ((0, 1), (1, 1)),
    'none': ((), ()),
}
VARIANTS = tuple(IDENTITIES)
ACTIVATIONS = {'none': None, 'tanh': torch.tanh, 'hardtanh': F.hardtanh, 'softsign': F.softsign}
INITS = ('identity', 'paper', 'vit')
# Width of the network of variant D in Table 4, h_int there.
MLP_WIDTH = 4
# Granularities of Table 9: whether each head, each level and each point has separate gate values.
GRANULARITIES = {
    'head_level': (True, True, False),
    'head_level_point': (True, True, True),
    'head': (True, False, False),
    'level_point': (False, True, True),
    'level': (False, True, False),
}


def _draw(weight: Tensor, bias: Tensor, inputs: int) -> None:
    """Initialise a flattened linear layer as detectors do: xavier-uniform weights, biases as torch draws them.

    Weights are ``(outputs * inputs,)``, biases ``(outputs,)``.
    """
    xavier = (6 / (inputs + bias.numel())) ** 0.5
    weight.uniform_(-xavier, xavier)
    bias.uniform_(-(inputs**-0.5), inputs**-0.5)


class GatingModulation(nn.Module):
    """PLuG's GML: map each raw gate ``r`` to the gate ``G = gA gB`` with ``gA = a r + b`` and ``gB = c r + e``.

    Args:
        variant: One of Table 4's: ``'product'`` (E: ``gA gB``), ``'sum'`` (B: ``gA + gB``), ``'single'`` (C: ``gA``),
            ``'mlp'`` (D: ``gA gB`` whose factors a network 1 -> 4 -> 2 computes from ``r``, with a ReLU, which the
            paper leaves open) or ``'none'`` (A: ``r`` itself, without parameters).
        activation: Function applied to the result: ``'none'``, ``'tanh'``, ``'hardtanh'`` or ``'softsign'`` (Tables 5
            and 8).
        residual: True if attention multiplies by ``1 + G``, so that G = 0 is the identity; False if it multiplies by
            ``G``, so that G = 1 is.
        init: Start of the parameters. ``'identity'`` (default): G = 0 or 1, as the residual asks. ``'paper'``: as the
            authors' detectors start linear layers, weights uniform in xavier's bounds (``sqrt 2`` for 1 -> 2) and
            biases in torch's (1). ``'vit'``: as their vision transformers do, weights from a normal distribution of
            deviation 0.02, truncated, and biases 0, so that the gate starts near 0. The variant ``'none'`` has nothing
            to start; there the gate projections have to make the identity.

    All parameters are one-dimensional. Detectors draw every parameter of more dimensions by xavier, which would undo
    the start.

    Raises:
        ConfigError: An option is unknown, or a saturating activation rules out the identity start (G = 1 without the
            residual).

    Source: PLuG attention, section 3.1, Eq. 10 and Table 4.
    """

    def __init__(
        self, variant: str = 'product', *, activation: str = 'none', residual: bool = True, init: str = 'identity'
    ) -> None:
        super().__init__()
        check_option('gml', variant, VARIANTS)
        check_option('activation', activation, tuple(ACTIVATIONS))
        check_option('init', init, INITS)
        check_option('residual', residual, (True, False))
        if init == 'identity' and not residual and activation != 'none':
            raise ConfigError(
                f"init='identity' with residual=False needs G = 1, which activation={activation!r} does not reach with "
                "a gradient; use init='paper' or activation='none'."
            )
        self.variant = variant
        self.activation = activation
        self.residual = residual
        self.init = init
        maps = len(IDENTITIES[variant][0])  # gA and gB, gA alone, or none
        if variant == 'mlp':
            self.hidden_weight = nn.Parameter(torch.empty(MLP_WIDTH))
            self.hidden_bias = nn.Parameter(torch.empty(MLP_WIDTH))
            self.weight = nn.Parameter(torch.empty(maps * MLP_WIDTH))  # (2, 4), row by row
        elif maps:
            self.weight = nn.Parameter(torch.empty(maps))
        if maps:
            self.bias = nn.Parameter(torch.empty(maps))
        self.reset_parameters()

    def start_projection(self, projection: nn.Linear) -> None:
        """Initialise the linear layer that computes the raw gates, as the option ``init`` says."""
        if self.init == 'vit':
            start_linear(projection)
        else:  # as detectors do
            projection.reset_parameters()
            nn.init.xavier_uniform_(projection.weight)

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Initialise the scalars as the option ``init`` says."""
        if self.variant == 'none':
            return
        if self.init == 'vit':
            for name, parameter in self.named_parameters():
                if name.endswith('bias'):
                    parameter.zero_()
                else:
                    nn.init.trunc_normal_(parameter, std=0.02)
            return
        # The first layer is drawn for the identity, too, which the last layer makes.
        if self.variant == 'mlp':
            _draw(self.hidden_weight, self.hidden_bias, 1)
        if self.init == 'paper':
            _draw(self.weight, self.bias, MLP_WIDTH if self.variant == 'mlp' else 1)
        else:
            self.weight.zero_()
            with_residual, without_residual = IDENTITIES[self.variant]
            self.bias.copy_(self.bias.new_tensor(with_residual if self.residual else without_residual))

    @property
    def is_tanh_of_product(self) -> bool:
        """Whether ``G = tanh((a r + b)(c r + e))``, with ``weight = (a, c)`` and ``bias = (b, e)`` and nothing else.

        The backends ``native`` and ``triton`` of dense attention compute this form without calling :meth:`forward`:
        whatever else acts on the gate there has to be False here.
        """
        return self.variant == 'product' and self.activation == 'tanh'

    def forward(self, r: Tensor) -> Tensor:
        """Return the gate ``G`` for each raw gate ``r``, elementwise.

        It has the shape of ``r`` and is in float32 if ``r`` has 16 bits, whose range products of factors leave.
        """
        gate = self._modulate(r.float() if r.dtype.itemsize < 4 else r)
        activation = ACTIVATIONS[self.activation]
        return gate if activation is None else activation(gate)

    def _modulate(self, r: Tensor) -> Tensor:
        if self.variant == 'none':
            return r
        if self.variant == 'single':
            return self.weight * r + self.bias
        if self.variant == 'mlp':
            hidden = F.relu(r[..., None] * self.hidden_weight + self.hidden_bias)  # (..., 4)
            weight = self.weight.view(2, MLP_WIDTH).to(hidden.dtype)
            bias = self.bias.to(hidden.dtype)
            first, second = F.linear(hidden, weight, bias).to(hidden.dtype).unbind(-1)
        else:
            a, c = self.weight
            b, e = self.bias
            first = a * r + b
            second = c * r + e
        return first + second if self.variant == 'sum' else first * second


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
            channels, is not 1. Or the options rule out an identity start: G = 1 through a saturating activation, or
            ``gml='none'``, which has no parameter that could make G = 0.

    Source: PLuG attention, section 3.1, Eq. 1 to 7 and Algorithm 1.
    """

    identity_start = True
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

"""PLuG's gating modulation layer (GML), which turns the raw gate, a linear map of the query, into the gate."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import start_linear

from .parts.options import check_option

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


def _draw(weight: Tensor, bias: Tensor, inputs: int) -> None:
    """Initialise a flattened linear layer as :func:`xavier_` does.

    Weights are ``(outputs * inputs,)``, biases ``(outputs,)``.
    """
    xavier = (6 / (inputs + bias.numel())) ** 0.5
    weight.uniform_(-xavier, xavier)
    bias.uniform_(-(inputs**-0.5), inputs**-0.5)


def xavier_(projection: nn.Linear) -> None:
    """Initialise a linear layer as detectors do: xavier-uniform weights, biases as torch draws them."""
    projection.reset_parameters()
    nn.init.xavier_uniform_(projection.weight)


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
        else:
            xavier_(projection)

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

"""The gating modulation layer (GML) of PLuG attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.layers.base.gate import start_linear

# biases of the factors that make the identity, with the residual and without: a product that starts with both factors
# at 0 would never receive a gradient
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
MLP_WIDTH = 4  # Table 4 (D): h_int


def check_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError if ``value`` is not one of ``allowed``."""
    if value not in allowed:
        raise ConfigError(f'{name}={value!r} is unknown; choose one of {", ".join(map(str, allowed))}.')


def _draw(weight: Tensor, bias: Tensor, inputs: int) -> None:
    """The start of :func:`xavier_` for scalars kept in one dimension, ``inputs`` for each of the biases."""
    xavier = (6 / (inputs + bias.numel())) ** 0.5
    weight.uniform_(-xavier, xavier)
    bias.uniform_(-(inputs**-0.5), inputs**-0.5)


def xavier_(projection: nn.Linear) -> None:
    """Start a gate projection as a detector does: xavier-uniform weights, torch's biases."""
    projection.reset_parameters()
    nn.init.xavier_uniform_(projection.weight)


class GatingModulation(nn.Module):
    """Map every raw gate logit ``r`` to a gate ``G`` by two scalar factors ``gA = a r + b`` and ``gB = c r + e``.

    Args:
        variant: Table 4's ``'product'`` (E: ``gA gB``), ``'sum'`` (B: ``gA + gB``), ``'single'`` (C: ``gA``),
            ``'mlp'`` (D: the factors of the product come from 1 -> 4 -> 2 with a ReLU, which the paper leaves open) or
            ``'none'`` (A: ``r`` itself, no parameters).
        activation: Applied to the result: ``'none'``, ``'tanh'``, ``'hardtanh'`` or ``'softsign'`` (Tables 5 and 8).
        residual: Whether the host multiplies by ``1 + G``; the identity start is G = 0 then, and G = 1 without.
        init: ``'identity'`` (default), ``'paper'`` or ``'vit'``. ``'paper'`` is what the authors' hosts make of linear
            layers: of detectors weights uniform in xavier's bounds (``sqrt 2`` for 1 -> 2) and biases in torch's (1),
            of vision transformers what ``'vit'`` always is: weights from a normal distribution of deviation 0.02,
            truncated, and biases 0, so that the gate starts near 0. With the variant ``'none'`` the gate projections
            have to make the identity.

    All parameters are one-dimensional, because detectors run xavier over every parameter that has more dimensions: both
    starts stay what they are whatever the host does afterwards.

    Raises:
        ValueError: An unknown option, or an identity start that a saturating activation rules out (G = 1 without
            the residual).

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
            raise ValueError(
                f"init='identity' with residual=False needs G = 1, which activation={activation!r} does not reach with "
                "a gradient; use init='paper' or activation='none'."
            )
        self.variant, self.activation, self.residual, self.init = variant, activation, residual, init
        factors = len(IDENTITIES[variant][0])
        if variant == 'mlp':
            self.hidden_weight = nn.Parameter(torch.empty(MLP_WIDTH))
            self.hidden_bias = nn.Parameter(torch.empty(MLP_WIDTH))
            self.weight = nn.Parameter(torch.empty(factors * MLP_WIDTH))  # (factor, hidden) in one dimension
        elif factors:
            self.weight = nn.Parameter(torch.empty(factors))
        if factors:
            self.bias = nn.Parameter(torch.empty(factors))
        self.reset_parameters()

    def start_projection(self, projection: nn.Linear, in_vit: bool) -> None:
        """Start the projection of raw gates: xavier-uniform, or as :meth:`starts_narrow` says."""
        if self.starts_narrow(in_vit):
            start_linear(projection)
        else:
            xavier_(projection)

    def starts_narrow(self, in_vit: bool) -> bool:
        """Return whether weights start at a deviation of 0.02 and biases at 0, in a vision transformer or elsewhere."""
        return self.init == 'vit' or (self.init == 'paper' and in_vit)

    @torch.no_grad()
    def reset_parameters(self, in_vit: bool = False) -> None:
        """Set the start that ``init`` names, in a vision transformer or elsewhere."""
        if self.variant == 'none':
            return
        if self.starts_narrow(in_vit):
            for name, parameter in self.named_parameters():
                if name.endswith('bias'):
                    parameter.zero_()
                else:
                    nn.init.trunc_normal_(parameter, std=0.02)
            return
        if self.variant == 'mlp':
            _draw(self.hidden_weight, self.hidden_bias, 1)  # of the identity, too
        if self.init == 'paper':
            _draw(self.weight, self.bias, MLP_WIDTH if self.variant == 'mlp' else 1)
        else:
            self.weight.zero_()
            self.bias.copy_(self.bias.new_tensor(IDENTITIES[self.variant][not self.residual]))

    def forward(self, r: Tensor) -> Tensor:
        """Return the gate, of the shape of ``r``, in no less than float32: products of factors leave half precision."""
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
            weight, bias = self.weight.view(2, MLP_WIDTH).to(hidden.dtype), self.bias.to(hidden.dtype)
            first, second = F.linear(hidden, weight, bias).to(hidden.dtype).unbind(-1)
        else:
            (a, c), (b, e) = self.weight, self.bias
            first, second = a * r + b, c * r + e
        return first + second if self.variant == 'sum' else first * second

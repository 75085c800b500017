"""PLuG in deformable attention, closed and open, and the starts of all its gates."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch
from conftest import assert_same, filled, values_and_gradients
from helpers.equations import SIZES, make_call
from helpers.gated import gated_attention
from helpers.repositories import summed
from torch import Tensor

from mmgate.gates import PLuGGate, PLuGMultiScaleDeformableAttention
from mmgate.gates.plug import GRANULARITIES, VARIANTS, GatingModulation

GATED: dict[str, dict[str, Any]] = {
    **{f'granularity_{name}': dict(granularity=name) for name in GRANULARITIES},
    **{f'gml_{name}': dict(gml=name) for name in VARIANTS},
    'tanh': dict(activation='tanh'),
    'softsign': dict(activation='softsign'),
    'post_softmax': dict(position='post_softmax'),
    'post_softmax_no_residual': dict(position='post_softmax', residual=False),
    **{f'no_residual_{name}': dict(residual=False, gml=name) for name in VARIANTS},
}
# points of two levels, as many and not, and columns of what they lie around, points and boxes
PLACES = cycle([(3, 3, 2), (1, 3, 4), (3, 3, 4), (1, 3, 2), (1, 3, 4)])
CASES = [(name, *next(PLACES)) for name in GATED for _ in range(2)]


def modulated(gml: Any, r: Tensor) -> Tensor:
    """Table 4 and the activations, written out."""
    activation = dict(tanh=torch.tanh, softsign=lambda x: x / (1 + x.abs())).get(gml.activation, lambda x: x)
    if gml.variant == 'none':
        return activation(r)
    first, second = (gml.weight[i] * r + gml.bias[i] for i in (0, -1))
    if gml.variant == 'mlp':
        hidden = (r[..., None] * gml.hidden_weight + gml.hidden_bias).relu()
        first, second = (hidden @ gml.weight.view(2, 4).T + gml.bias).unbind(-1)
    return activation({'single': first, 'sum': first + second}.get(gml.variant, first * second))


@pytest.mark.parametrize('name, first, second, columns', CASES)
def test_an_open_gate_is_the_equation(name: str, first: int, second: int, columns: int) -> None:
    """Eq. 8 to 12, Eq. 17 behind the softmax, level by level, with grid_sample's samples; its gradients, too.

    It starts as the identity, but what makes it has a gradient.
    """
    options, counts = GATED[name], (first, second)
    layer: Any = PLuGMultiScaleDeformableAttention(
        **SIZES | dict(num_points=list(counts)), batch_first=True, dropout=0.0, **options
    ).double()
    by_heads, by_levels, by_points = GRANULARITIES[options.get('granularity', 'head_level')]
    call = {key: x.double() if x.is_floating_point() else x for key, x in make_call(columns).items()}
    query, before = call.pop('query'), 'position' not in options

    def equation(query: Tensor, closed: bool = False) -> Tensor:
        z, value = query + call['query_pos'], layer.value_proj(call['value'])
        value = value.masked_fill(call['key_padding_mask'][..., None], 0).view(2, 30, 4, 4)
        offsets = layer.sampling_offsets(z).view(2, 5, 4, -1, 2).split(counts, 3)
        logits = layer.attention_weights(z).view(2, 5, 4, -1).split(counts, 3)
        raw = layer.gate.gate_proj(z).view(2, 5, 4 if by_heads else 1, -1)
        assert raw.shape[3] == (sum(counts) if by_points else 2 if by_levels else 1)
        factor = modulated(layer.gate.gml, raw) + options.get('residual', True)
        factor = torch.ones_like(factor) if closed else factor
        factors = factor.split(counts if by_points else 1, 3) if by_levels else [factor] * 2
        gated = [a * f if before else a for a, f in zip(logits, factors, strict=True)]
        weights = torch.cat(gated, 3).softmax(-1).split(counts, 3)
        places, of_levels = [], []
        for level, shape in enumerate(call['spatial_shapes']):
            of_levels.append(weights[level] if before else weights[level] * factors[level])
            at = call['reference_points'][:, :, None, level, None]  # (B, Q, 1, 1, 2|4)
            # offsets are in pixels of the level, or in halves of the box's sides, shared out among the points
            unit = 1 / shape.flip(0).double() if columns == 2 else at[..., 2:] / 2 / counts[level]
            places.append(at[..., :2] + offsets[level] * unit)
        return layer.output_proj(summed(value, call['spatial_shapes'], places, of_levels)) + call['identity']

    def learnt(function: Any) -> dict[str, Tensor]:
        layer.zero_grad()
        found = values_and_gradients(function, [query], [0])
        return found | {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}

    for key, parameter in layer.named_parameters():
        if not key.startswith('gate.'):
            torch.nn.init.normal_(parameter, std=0.3)
    found = learnt(lambda query: layer(query=query, **call))
    torch.testing.assert_close(found['output'], equation(query, closed=True), rtol=1e-9, atol=1e-9)
    assert any(gradient.any() for key, gradient in found.items() if key.startswith('gate.'))
    filled(layer, 0.4)
    found, expected = learnt(lambda query: layer(query=query, **call)), learnt(equation)
    assert found.keys() == expected.keys() and {f'gate.{key}' for key, _ in layer.gate.named_parameters()} <= {*found}
    assert_same(found, expected, rtol=1e-7, atol=1e-7)


# of uniform numbers up to these, in the paper's start
BOUNDS: dict[str, dict[str, float]] = {
    'product': {'weight': 2**0.5, 'bias': 1},
    'sum': {'weight': 2**0.5, 'bias': 1},
    'single': {'weight': 3**0.5, 'bias': 1},
    'mlp': {'hidden_weight': 1.2**0.5, 'hidden_bias': 1, 'weight': 1, 'bias': 0.5},
    'none': {},
}


@pytest.mark.parametrize('variant', VARIANTS)
def test_starts_are_the_papers(variant: str) -> None:
    """In vision transformers every weight is normal of deviation 0.02, every bias 0."""
    # a name that was read from a file is another object than the one in the code
    starts = [GatingModulation(variant, init=str(b'paper', 'ascii')).state_dict() for _ in range(200)]
    assert all(set(start) == set(BOUNDS[variant]) for start in starts)
    for name, bound in BOUNDS[variant].items():
        drawn = torch.stack([start[name] for start in starts])
        assert drawn.abs().max() <= bound
        torch.testing.assert_close(drawn.std().item(), bound / 3**0.5, rtol=0.1, atol=0)
    options: Any = dict(gml=variant, init=str(b'vit', 'ascii'))
    deformable: Any = PLuGMultiScaleDeformableAttention(64, 4, granularity='head_level_point', **options)
    deformable.init_weights()
    for gate in (gated_attention(PLuGGate, 64, 4, **options).gate, deformable.gate):
        for name, parameter in gate.named_parameters():
            if name.endswith('bias'):
                assert not parameter.any(), name
            else:
                assert 0 < parameter.abs().max() < 0.1, name
                assert parameter.numel() < 200 or 0.018 < parameter.std() < 0.022, name

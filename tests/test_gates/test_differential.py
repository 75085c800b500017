"""The differential transformer and its second version against their equations, with positions and masks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.equations import C, Call, D, H, linear, normed, opened, split
from helpers.gated import gated_attention
from torch import nn

from mmgate.gate import Sizes
from mmgate.gates import DifferentialMultiheadAttention, DifferentialV2Gate, DifferentialV2MultiheadAttention


@torch.no_grad()
@pytest.mark.parametrize(
    'options, start',
    [(dict(depth=3), 0.8 - 0.6 * math.exp(-0.6)), (dict(lambda_init=0.5), 0.5), (dict(learnable=False), 0.2)],
    ids=str,
)
def test_differential_attention_is_its_equation(options: dict[str, Any], start: float) -> None:
    layer = opened(DifferentialMultiheadAttention(C, H, batch_first=True, **options))
    call, gate = Call(layer), layer.attn.gate
    first, second = (
        (q @ k.mT / (D / 2) ** 0.5 + call.bias).softmax(-1) @ call.v
        for q, k in zip(call.q.chunk(2, -1), call.k.chunk(2, -1), strict=True)
    )
    weight = start
    if options.get('learnable', True):
        weight = math.exp(gate.lambda_q1 @ gate.lambda_k1) - math.exp(gate.lambda_q2 @ gate.lambda_k2) + start
    heads = normed(first - weight * second, gate.head_norm.weight) * (1 - start)
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads))


@torch.no_grad()
@pytest.mark.parametrize('init', ['paper', 'identity'])
def test_the_second_version_is_its_equation(init: str) -> None:
    """A second set of queries over the host's keys and values, a lambda of each token and head, and no norm."""
    layer = opened(DifferentialV2MultiheadAttention(C, H, batch_first=True, init=init, lambda_init=0.2))
    call, gate = Call(layer), layer.attn.gate
    if init == 'paper':
        second = split(linear(gate.query_proj, call.inputs[0]))
    else:
        second = call.q + split(linear(gate.query_shift, call.inputs[0]))
    first_map, second_map = ((q @ call.k.mT / D**0.5 + call.bias).softmax(-1) for q in (call.q, second))
    weight = 1 / (1 + (-linear(gate.lambda_proj, call.inputs[0])).exp())
    heads = (first_map - weight.transpose(1, 2)[..., None] * second_map) @ call.v
    heads = heads / (0.8 if init == 'identity' else 1)
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads))


def started(**options: Any) -> tuple[float, dict[str, float]]:
    """Return the distance of a start from the vanilla attention, and the largest gradient of each parameter."""
    vanilla = nn.MultiheadAttention(C, H, batch_first=True)
    gated = gated_attention(DifferentialV2Gate, C, H, batch_first=True, **options)
    gated.load_state_dict(vanilla.state_dict(), strict=False)
    x = torch.randn(2, 6, C)
    output = gated(x, x, x)[0]
    output.square().sum().backward()
    largest = {name: float(p.grad.abs().max()) for name, p in gated.gate.named_parameters()}
    return float((output - vanilla(x, x, x)[0]).abs().max()), largest


def test_an_identity_start_learns_and_a_lambda_near_zero_does_not() -> None:
    """Both start as the vanilla attention, to rounding."""
    distance, gradients = started(init='identity')
    assert distance < 1e-6 and min(gradients.values()) > 1e-4
    distance, gradients = started(lambda_init=1e-8)
    assert distance < 1e-6 and max(gradients.values()) < 1e-6
    distance, gradients = started()
    assert distance > 1e-2 and min(gradients.values()) > 1e-4


def test_lambda_starts_where_it_was_set() -> None:
    x = torch.randn(3, 50, 64)
    gate = DifferentialV2Gate(Sizes(64, 4), init='identity', lambda_init=0.1)
    gate.reset()
    torch.testing.assert_close(gate._lambda(x), torch.full((3, 4, 50, 1), 0.1))
    gate = DifferentialV2Gate(Sizes(64, 4), lambda_init=0.1)
    gate.reset()
    found = gate._lambda(x)
    assert 0.08 < found.median() < 0.12 and found.std() > 0.02


def test_neither_start_loads_a_checkpoint_of_the_other() -> None:
    paper, identity = (gated_attention(DifferentialV2Gate, C, H, init=init) for init in ('paper', 'identity'))
    for one, other in ((paper, identity), (identity, paper)):
        with pytest.raises(RuntimeError, match='Missing key'):
            one.load_state_dict(other.state_dict())

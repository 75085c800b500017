"""Every dense gate against its equations written out, with positions and masks, and starts as in its paper."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.equations import B, C, Call, D, H, linear, normed, opened, split
from helpers.gated import gated_attention
from torch import Tensor

from mmgate import gates, record
from mmgate.errors import ConfigError


def plug(call: Call, layer: Any, heads: str = 'shared', ratio: float = 1, **options: Any) -> Tensor:
    """Eq. 1 to 7; Eq. 17 behind the softmax."""
    gate, gate_heads = layer.attn.gate, H if heads == 'per_head' else 1
    rq, rk = (
        split(linear(p, x), gate_heads) for p, x in zip((gate.gate_q_proj, gate.gate_k_proj), call.inputs, strict=False)
    )
    assert rq.shape[-1] == ratio * D
    r = rq @ rk.mT / rq.shape[-1] ** 0.5
    (a, c), (b, e) = gate.gml.weight, gate.gml.bias
    squash = {'hardtanh': lambda x: x.clamp(-1, 1), 'softsign': lambda x: x / (1 + x.abs())}
    factor = squash.get(options.get('activation', 'tanh'), torch.tanh)((a * r + b) * (c * r + e))
    with record(layer, 'gate') as recording:
        call.run(layer)
    torch.testing.assert_close(recording['attn']['gate'].last, factor)
    factor = factor + options.get('residual', True)
    logits = call.q @ call.k.mT / D**0.5
    if 'position' in options:
        return call.finish(layer, (logits + call.bias).softmax(-1) * factor @ call.v)
    return call.finish(layer, (logits * factor + call.bias).softmax(-1) @ call.v)  # a masked pair stays masked


def sdpa(
    call: Call,
    layer: Any,
    position: str = 'G1',
    act: str = 'sigmoid',
    form: str = 'multiplicative',
    gate_channels: int = C,
    scale: float = 1.0,
    granularity: str = 'elementwise',
    head_shared: Any = False,
) -> Tensor:
    """Each position reads its own input, a narrow gate the first channels; heads may share scores."""
    gate = layer.attn.gate
    source = call.inputs[{'G1': 0, 'G2': 2, 'G3': 1, 'G4': 0, 'G5': 0}[position]][..., :gate_channels]
    score = source @ gate.gate_weight.T + gate.gate_bias
    share = 1 / (1 + (-score).exp())
    score = scale * dict(sigmoid=share, silu=score * share, ns_sigmoid=0.5 + share / 2)[act]
    width = 1 if granularity == 'headwise' else D
    heads = score.view(B, -1, 1 if head_shared == 'projection' else H, width).transpose(1, 2)
    if head_shared == 'average':
        heads = sum(heads[:, h] for h in range(H))[:, None] / H

    def gated(x: Tensor, at: str) -> Tensor:
        s = score if at == 'G5' else heads
        return x if at != position else x + s if form == 'additive' else x * s

    logits = gated(call.q, 'G4') @ gated(call.k, 'G3').mT / D**0.5
    attended = gated((logits + call.bias).softmax(-1) @ gated(call.v, 'G2'), 'G1')
    return gated(call.finish(layer, attended), 'G5')


def two_maps(call: Call) -> list[Tensor]:
    """Return the maps of two streams of half a head's width."""
    pairs = zip(call.q.chunk(2, -1), call.k.chunk(2, -1), strict=True)
    return [(q @ k.mT / (D / 2) ** 0.5 + call.bias).softmax(-1) for q, k in pairs]


def differential(call: Call, layer: Any, **options: Any) -> Tensor:
    gate, (first, second) = layer.attn.gate, two_maps(call)
    start = 0.8 - 0.6 * math.exp(-0.6) if 'depth' in options else options.get('lambda_init', 0.2)
    weight: Any = start
    if options.get('learnable', True):
        weight = math.exp(gate.lambda_q1 @ gate.lambda_k1) - math.exp(gate.lambda_q2 @ gate.lambda_k2) + start
    heads = normed((first - weight * second) @ call.v, gate.head_norm.weight) * (1 - start)
    return call.finish(layer, heads)


def second_version(call: Call, layer: Any, init: str, lambda_init: float) -> Tensor:
    """A second set of queries over the host's keys and values, a lambda of each token and head, and no norm."""
    gate, x = layer.attn.gate, call.inputs[0]
    second = split(linear(gate.query_proj, x)) if init == 'paper' else call.q + split(linear(gate.query_shift, x))
    first_map, second_map = ((q @ call.k.mT / D**0.5 + call.bias).softmax(-1) for q in (call.q, second))
    weight = 1 / (1 + (-linear(gate.lambda_proj, x)).exp())
    heads = (first_map - weight.transpose(1, 2)[..., None] * second_map) @ call.v
    return call.finish(layer, heads / (1 - lambda_init if init == 'identity' else 1))


def m_dgsa(call: Call, layer: Any, lambda_init: float, residual: str = 'query', **options: Any) -> Tensor:
    """``g A+ - (1 - g) A-``; A.5's deeper gate and learnt lambda."""
    gate, (plus, minus), hidden = layer.attn.gate, two_maps(call), call.inputs[0]
    for before in gate.gate_hidden:
        hidden = F.gelu(linear(before, hidden))
    share = linear(gate.gate_proj, hidden).sigmoid().transpose(1, 2)[..., None]
    left = 1 - (gate.lambda_init if 'learnable' in options else lambda_init)
    heads = normed((share * plus - (1 - share) * minus) @ call.v, gate.head_norm.weight) * left
    return (
        call.finish(layer, heads)
        + {'query': call.q.transpose(1, 2).flatten(2), 'input': call.inputs[0], 'none': 0}[residual]
    )


PLUG: list[dict[str, Any]] = [
    dict(backend='torch'),
    dict(heads='per_head', backend='chunked'),
    dict(ratio=0.5),
    dict(activation='hardtanh', backend='torch'),
    dict(activation='softsign', backend='chunked'),
    dict(position='post_softmax', backend='torch'),
    dict(position='post_softmax', backend='chunked'),
    dict(residual=False, init='paper', backend='torch'),
    dict(residual=False, init='paper', backend='chunked'),
]
# activation, form and channels that the gate reads
VARIANTS = [
    ('sigmoid', 'multiplicative', C),
    ('silu', 'multiplicative', 3),
    ('silu', 'additive', C),
    ('ns_sigmoid', 'multiplicative', C),
    ('ns_sigmoid', 'additive', 3),
]
SDPA: list[dict[str, Any]] = [
    *(
        dict(position=position, act=act, form=form, gate_channels=channels, scale=1.7)
        for position, (act, form, channels) in product(('G1', 'G2', 'G3', 'G4', 'G5'), VARIANTS)
    ),
    *(
        dict(granularity=granularity, head_shared=shared)
        for granularity, shared in product(('elementwise', 'headwise'), (False, 'average', 'projection'))
    ),
]
DGSA = [{}, dict(residual='input'), dict(residual='none'), dict(gate_depth=3), dict(learnable=True)]
EQUATIONS: dict[str, tuple[Callable[..., Tensor], list[dict[str, Any]]]] = {
    'PLuGMultiheadAttention': (plug, PLUG),
    'SDPAGatedMultiheadAttention': (sdpa, SDPA),
    'DifferentialMultiheadAttention': (
        differential,
        [dict(depth=3), dict(lambda_init=0.5), dict(learnable=False)],
    ),
    'DifferentialV2MultiheadAttention': (
        second_version,
        [dict(init=init, lambda_init=0.3) for init in ('paper', 'identity')],
    ),
    'DifferentialGatedMultiheadAttention': (m_dgsa, [dict(options, lambda_init=0.6) for options in DGSA]),
}


@torch.no_grad()
@pytest.mark.parametrize(
    'kind, options', [(kind, options) for kind, (_, cases) in EQUATIONS.items() for options in cases], ids=str
)
def test_a_dense_gate_is_its_equations(kind: str, options: dict[str, Any]) -> None:
    layer = opened(getattr(gates, kind)(C, H, batch_first=True, **options))
    call = Call(layer)
    expected = call.identity + EQUATIONS[kind][0](call, layer, **options)
    torch.testing.assert_close(call.run(layer), expected)


def test_a_narrow_gate_starts_as_a_linear_layer_of_its_channels() -> None:
    layers = [gates.SDPAGatedMultiheadAttention(64, 4, gate_channels=4) for _ in range(20)]
    assert 0.49 < torch.cat([layer.attn.gate.gate_weight for layer in layers]).abs().max() <= 0.5


@pytest.mark.parametrize('init', ['paper', 'identity'])
def test_the_second_version_starts_and_learns(init: str) -> None:
    """With the lambda that was set; the identity is a test of dense gates. The first has 0.8."""
    gated = gated_attention(gates.DifferentialV2Gate, 64, H, batch_first=True, init=init, lambda_init=0.1)
    x = torch.randn(3, 50, 64)
    found = gated.gate._lambda(x)
    assert 0.08 < found.median() < 0.12 and (found.std() > 0.02) == (init == 'paper')
    gated(x, x, x)[0].square().sum().backward()
    assert all(p.grad.abs().max() > 1e-4 for p in gated.gate.parameters())
    assert gated_attention(gates.DGSAGate, C, H, learnable=True).gate.lambda_init.tolist() == [pytest.approx(0.8)]


def test_a_gate_of_another_form_does_not_take_the_weights() -> None:
    """Files of gates bring the options along."""
    state = gated_attention(gates.SDPAGate, C, H, gate_channels=5).state_dict()
    with pytest.raises(ConfigError, match='Set gate_channels=5 for this checkpoint'):
        gated_attention(gates.SDPAGate, C, H, gate_channels=4).load_state_dict(state)
    paper, identity = (gated_attention(gates.DifferentialV2Gate, C, H, init=init) for init in ('paper', 'identity'))
    for one, other in ((paper, identity), (identity, paper)):
        with pytest.raises(RuntimeError, match='Missing key'):
            one.load_state_dict(other.state_dict())

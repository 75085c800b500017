"""Forward passes with an open gate, position embeddings and masks, held against the equations written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import filled
from torch import Tensor, nn

from mmgate.layers import (
    DifferentialGatedMultiheadAttention,
    DifferentialMultiheadAttention,
    PLuGMultiheadAttention,
    SDPAGatedMultiheadAttention,
)

B, N, M, C, H = 2, 5, 7, 16, 4
D = C // H


def opened(module: nn.Module) -> Any:
    """Give every parameter, the gate's included, a value of its own."""
    return filled(module, 0.4).double()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Call:
    """The inputs of a call of mmcv's attention with a position embedding and both masks, and its projections."""

    def __init__(self, layer: Any) -> None:
        self.query, self.key, self.value = random(B, N, C), random(B, M, C), random(B, M, C)
        self.query_pos, self.key_pos, self.identity = random(B, N, C), random(B, M, C), random(B, N, C)
        padding = torch.zeros(B, M, dtype=torch.bool)
        padding[1, -3:] = True
        self.options = dict(query_pos=self.query_pos, key_pos=self.key_pos, identity=self.identity)
        self.options.update(key_padding_mask=padding, attn_mask=random(N, M))
        self.bias = self.options['attn_mask'] + torch.zeros(B, 1, 1, M).masked_fill(padding[:, None, None], -math.inf)
        # positions belong to queries and keys, not to values
        self.inputs = (self.query + self.query_pos, self.key + self.key_pos, self.value)
        weights, biases = layer.attn.in_proj_weight.chunk(3), layer.attn.in_proj_bias.chunk(3)
        parts = zip(self.inputs, weights, biases, strict=True)
        self.q, self.k, self.v = (split(x @ w.T + b) for x, w, b in parts)

    def run(self, layer: nn.Module) -> Tensor:
        return layer(self.query, self.key, self.value, **self.options)

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        """The output projection, without the identity."""
        out = layer.attn.out_proj
        return heads.transpose(1, 2).flatten(2) @ out.weight.T + out.bias


def split(x: Tensor, heads: int = H) -> Tensor:
    return x.view(len(x), -1, heads, x.shape[-1] // heads).transpose(1, 2)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight.T + module.bias


@torch.no_grad()
@pytest.mark.parametrize('backend', ['torch', 'chunked'])
@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(heads='per_head'),
        dict(ratio=0.5),
        dict(activation='hardtanh'),
        dict(activation='softsign'),
        dict(position='post_softmax'),
        dict(residual=False, init='paper'),
    ],
    ids=str,
)
def test_dense_plug(options: dict[str, Any], backend: str) -> None:
    """Eq. 1 to 7; Eq. 17 behind the softmax."""
    layer = opened(PLuGMultiheadAttention(C, H, batch_first=True, backend=backend, **options))
    call = Call(layer)
    gate_heads = H if 'heads' in options else 1
    rq, rk = (
        split(linear(p, x), gate_heads)
        for p, x in zip((layer.attn.gate.gate_q_proj, layer.attn.gate.gate_k_proj), call.inputs, strict=False)
    )
    assert rq.shape[-1] == options.get('ratio', 1) * D
    r = rq @ rk.mT / rq.shape[-1] ** 0.5
    (a, c), (b, e) = layer.attn.gate.gml.weight, layer.attn.gate.gml.bias
    squash = {'hardtanh': lambda x: x.clamp(-1, 1), 'softsign': lambda x: x / (1 + x.abs())}
    factor = squash.get(options.get('activation', 'tanh'), torch.tanh)((a * r + b) * (c * r + e))
    factor = factor + options.get('residual', True)
    logits = call.q @ call.k.mT / D**0.5
    if 'position' in options:
        weights = (logits + call.bias).softmax(-1) * factor
    else:
        weights = (logits * factor + call.bias).softmax(-1)  # a masked pair stays masked
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, weights @ call.v))


@torch.no_grad()
@pytest.mark.parametrize('form', ['multiplicative', 'additive'])
@pytest.mark.parametrize('act', ['sigmoid', 'silu', 'ns_sigmoid'])
@pytest.mark.parametrize('position', ['G1', 'G2', 'G3', 'G4', 'G5'])
def test_sdpa_gate(position: str, act: str, form: str) -> None:
    """With a scale that is not the default; each position reads its own input."""
    options = dict(position=position, act=act, form=form, scale=1.7)
    layer = opened(SDPAGatedMultiheadAttention(C, H, batch_first=True, **options))
    call = Call(layer)
    source = call.inputs[{'G1': 0, 'G2': 2, 'G3': 1, 'G4': 0, 'G5': 0}[position]]
    score = source @ layer.attn.gate.gate_weight.T + layer.attn.gate.gate_bias
    score = {
        'sigmoid': 1 / (1 + (-score).exp()),
        'silu': score / (1 + (-score).exp()),
        'ns_sigmoid': 0.5 + 0.5 / (1 + (-score).exp()),
    }[act]

    def gated(x: Tensor, at: str) -> Tensor:
        s = 1.7 * (score if at == 'G5' else split(score))
        return x if at != position else x * s if form == 'multiplicative' else x + s

    logits = gated(call.q, 'G4') @ gated(call.k, 'G3').mT / D**0.5
    heads = gated((logits + call.bias).softmax(-1) @ gated(call.v, 'G2'), 'G1')
    expected = call.identity + gated(call.finish(layer, heads), 'G5')
    torch.testing.assert_close(call.run(layer), expected)


@torch.no_grad()
@pytest.mark.parametrize('shared', [False, 'average', 'projection'], ids=str)
@pytest.mark.parametrize('granularity', ['elementwise', 'headwise'])
def test_sdpa_granularity(granularity: str, shared: bool | str) -> None:
    layer = opened(SDPAGatedMultiheadAttention(C, H, batch_first=True, granularity=granularity, head_shared=shared))
    call = Call(layer)
    score = call.inputs[0] @ layer.attn.gate.gate_weight.T + layer.attn.gate.gate_bias  # (B, N, heads * channels)
    heads, channels = 1 if shared == 'projection' else H, D if granularity == 'elementwise' else 1
    score = score.sigmoid().view(B, N, heads, channels)
    if shared == 'average':
        score = sum(score[:, :, h] for h in range(H))[:, :, None] / H
    heads = (call.q @ call.k.mT / D**0.5 + call.bias).softmax(-1) @ call.v * score.transpose(1, 2)
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads))


def normed(heads: Tensor, weight: Tensor) -> Tensor:
    return heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


@torch.no_grad()
@pytest.mark.parametrize(
    'options',
    [{}, dict(residual='input'), dict(residual='none'), dict(gate_depth=3), dict(learnable=True)],
    ids=str,
)
def test_differential_gate(options: dict[str, Any]) -> None:
    """M-DGSA: ``g A+ - (1 - g) A-``, each stream of half a head's width; A.5's deeper gate and learnt lambda."""
    layer = opened(DifferentialGatedMultiheadAttention(C, H, batch_first=True, lambda_init=0.6, **options))
    call = Call(layer)
    plus, minus = (
        (q @ k.mT / (D / 2) ** 0.5 + call.bias).softmax(-1)
        for q, k in zip(call.q.chunk(2, -1), call.k.chunk(2, -1), strict=True)
    )
    hidden = call.inputs[0]
    for before in layer.attn.gate.gate_hidden:
        hidden = F.gelu(linear(before, hidden))
    gate = linear(layer.attn.gate.gate_proj, hidden).sigmoid().transpose(1, 2)[..., None]
    share = 1 - (layer.attn.gate.lambda_init if 'learnable' in options else 0.6)
    heads = normed((gate * plus - (1 - gate) * minus) @ call.v, layer.attn.gate.head_norm.weight) * share
    queries = call.q.transpose(1, 2).flatten(2)
    added = {'query': queries, 'input': call.inputs[0], 'none': 0}[options.get('residual', 'query')]
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, heads) + added)


@torch.no_grad()
@pytest.mark.parametrize(
    'options, start',
    [(dict(depth=3), 0.8 - 0.6 * math.exp(-0.6)), (dict(lambda_init=0.5), 0.5), (dict(learnable=False), 0.2)],
    ids=str,
)
def test_differential_transformer(options: dict[str, Any], start: float) -> None:
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

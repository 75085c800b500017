"""Dropout and drop path: where they act, at which rate, and in training alone.

At a rate of 1 everything is dropped, whatever the random numbers; at 1/2 what is kept is doubled, so that a product of
ones shows how often it was dropped.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from conftest import filled
from torch import Tensor, nn

from mmgate.gates import (
    AgentAttention,
    DifferentialGatedMultiheadAttention,
    DifferentialMultiheadAttention,
    DifferentialV2MultiheadAttention,
    MultiScaleDeformableAttention,
    PLuGMultiheadAttention,
    PLuGMultiScaleDeformableAttention,
    SAGAAttention,
    SDPAGatedMultiheadAttention,
)
from mmgate.ops.agent import agent_attention
from mmgate.ops.dense import plug_attention
from mmgate.ops.differential import differential_attention, shared_key_attention

C, H, B, N = 16, 4, 2, 6
DENSE = {
    PLuGMultiheadAttention: {},
    SDPAGatedMultiheadAttention: {},
    DifferentialGatedMultiheadAttention: dict(residual='none'),
    DifferentialMultiheadAttention: {},
    DifferentialV2MultiheadAttention: {},
}
every_dense = pytest.mark.parametrize('kind', DENSE, ids=lambda kind: kind.__name__)


@pytest.mark.parametrize('kind', [PLuGMultiScaleDeformableAttention, MultiScaleDeformableAttention])
def test_deformable_attention_drops_its_output(kind: type) -> None:
    """Not the identity, which is added after it."""
    layer = filled(kind(C, H, 1, 2, dropout=1.0, batch_first=True), 0.5)
    query = torch.randn(B, N, C)
    call = dict(reference_points=torch.rand(B, N, 1, 2), level_start_index=torch.tensor([0]))
    call['spatial_shapes'] = torch.tensor([[2, 3]])
    assert torch.equal(layer.train()(query, **call), query)
    assert not torch.allclose(layer.eval()(query, **call), query)


@every_dense
@pytest.mark.parametrize('rate', ['attn_drop', 'proj_drop', 'dropout_layer'])
def test_the_three_dropouts_of_mmcvs_attention(kind: type, rate: str) -> None:
    """Of the weights, which leaves the projection's bias; of the output; and of what is added to the identity."""
    rates = {rate: dict(type='Dropout', drop_prob=1.0) if rate == 'dropout_layer' else 1.0}
    layer = filled(kind(C, H, batch_first=True, **rates, **DENSE[kind]), 0.5)
    if rate == 'attn_drop':
        nn.init.zeros_(getattr(layer.attn.gate, 'gate_bias', torch.zeros(1)))
    x = torch.randn(B, N, C)
    expected = x + (layer.attn.out_proj.bias if rate == 'attn_drop' else 0)
    torch.testing.assert_close(layer.train()(x), expected.expand_as(x))
    assert not torch.allclose(layer.eval()(x), expected.expand_as(x), atol=1e-3)


Q, KEY = torch.ones(1, 64, 500, 2), torch.ones(1, 64, 1, 2)  # many rows of one key, so that all weights are 1
ZERO_GATES = torch.zeros(1, 1, 500, 4), torch.zeros(1, 1, 1, 4), nn.Identity()
QUARTER = torch.full((1, 64, 500, 1), 0.25)
# by operator, a call and the values of a sum of ones: each of two maps drops by itself
OPERATORS: dict[str, tuple[Callable[[], Tensor], set[float]]] = {
    'plug': (lambda: plug_attention(Q, KEY, KEY, *ZERO_GATES, dropout=0.5, backend='torch'), {0.0, 2.0}),
    'plug_in_chunks': (lambda: plug_attention(Q, KEY, KEY, *ZERO_GATES, dropout=0.5, backend='chunked'), {0.0, 2.0}),
    'agent': (lambda: agent_attention(Q, KEY, KEY, KEY, dropout=0.5), {0.0, 4.0}),
    'differential': (lambda: differential_attention(Q, KEY, KEY, QUARTER, dropout=0.5), {0.0, 0.5, -1.5, -1.0}),
    'shared_keys': (lambda: shared_key_attention(Q, Q, KEY, KEY, QUARTER, dropout=0.5), {0.0, 2.0, -0.5, 1.5}),
}


@pytest.mark.parametrize('name', OPERATORS)
def test_every_map_of_an_operator_drops_its_weights_once(name: str) -> None:
    call, values = OPERATORS[name]
    out = call()[0, :, :, 0]  # of heads and rows
    assert set(out.flatten().round(decimals=4).tolist()) == values
    if name == 'agent':  # the weight of agent and key is one a head
        aggregated = out.any(-1)
        assert 0.3 < aggregated.float().mean() < 0.7
        out = out[aggregated]
    kept = len({value for value in values if value}) / len(values)
    assert abs((out != 0).float().mean() - kept) < 0.05


def test_attention_over_a_map_drops_its_weights() -> None:
    """In training, which leaves what the convolution adds."""
    layer = filled(AgentAttention(C, H, attn_drop=1.0, map_size=(2, 3), agent_num=4), 0.5)
    x = torch.randn(B, N, C)
    v = layer.qkv(x)[..., 2 * C :].transpose(1, 2).unflatten(-1, (2, 3))
    local = layer.gate.dwc(v).flatten(2).transpose(1, 2)
    torch.testing.assert_close(layer.train()(x, (2, 3)), layer.proj(local))
    assert not torch.allclose(layer.eval()(x, (2, 3)), layer.proj(local))


@pytest.mark.parametrize('kind', [AgentAttention, SAGAAttention])
def test_attention_over_a_map_drops_its_output_and_paths(kind: type) -> None:
    x, identity = torch.randn(64, N, C), torch.randn(64, N, C)
    layer = filled(kind(C, H, map_size=(2, 3), proj_drop=1.0), 0.5)
    assert torch.equal(layer.train()(x, (2, 3), identity=identity), identity)
    assert not torch.allclose(layer.eval()(x, (2, 3), identity=identity), identity)
    layer = filled(kind(C, H, map_size=(2, 3), dropout_layer=dict(type='DropPath', drop_prob=0.5)), 0.5)
    out = layer.eval()(x, (2, 3))
    added = layer.train()(x, (2, 3), identity=identity) - identity
    kept = added.flatten(1).abs().amax(1) > 1e-6  # an image's path is dropped as a whole, or doubled
    assert 0.25 < kept.float().mean() < 0.75
    torch.testing.assert_close(added, 2 * out * kept[:, None, None], rtol=1e-4, atol=1e-5)

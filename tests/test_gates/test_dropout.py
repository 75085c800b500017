"""Dropout and drop path: where they act, at which rate, and in training alone.

At a rate of 1 everything is dropped, whatever the random numbers; at 1/2 what is kept is doubled, so that a product of
ones shows how often it was dropped.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from conftest import filled
from torch import Tensor, nn

from mmgate import gates
from mmgate.ops.agent import agent_attention
from mmgate.ops.dense import plug_attention
from mmgate.ops.differential import differential_attention, shared_key_attention

C, H, B, N = 16, 4, 64, 6
IN_MAP = dict(hw_shape=(2, 3))
LEVEL = dict(
    spatial_shapes=torch.tensor([[2, 3]]),
    level_start_index=torch.tensor([0]),
    reference_points=torch.full((B, N, 1, 2), 0.4),
)
OF_LEVEL = dict(num_levels=1, num_points=2, batch_first=True)
# by attention, its options and the rest of a call
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    'PLuGMultiheadAttention': (dict(batch_first=True), {}),
    'SDPAGatedMultiheadAttention': (dict(batch_first=True), {}),
    'DifferentialGatedMultiheadAttention': (dict(batch_first=True, residual='none'), {}),
    'DifferentialMultiheadAttention': (dict(batch_first=True), {}),
    'DifferentialV2MultiheadAttention': (dict(batch_first=True), {}),
    'AgentAttention': (dict(map_size=(2, 3), agent_num=4, dwc=False), IN_MAP),
    'SoftmaxAttention': ({}, IN_MAP),
    'SAGAAttention': (dict(map_size=(2, 3)), IN_MAP),
    'PLuGMultiScaleDeformableAttention': (OF_LEVEL, LEVEL),
    'MultiScaleDeformableAttention': (OF_LEVEL, LEVEL),
}
WEIGHTS, OUTPUTS = [*KINDS][:7], [*KINDS][:8]
CASES = [
    *product(WEIGHTS, ['attn_drop']),
    *product(OUTPUTS, ['proj_drop', 'path']),
    *product([*KINDS][8:], ['dropout']),
]


@torch.no_grad()
@pytest.mark.parametrize('kind, rate', CASES)
def test_what_is_dropped_adds_nothing(kind: str, rate: str) -> None:
    """To the identity; without weights, the output projection's bias is left, and paths of images go one by one."""
    options, call = KINDS[kind]
    rates = {rate: 1.0} if rate != 'path' else dict(dropout_layer=dict(type='DropPath', drop_prob=0.5))
    layer = filled(getattr(gates, kind)(C, H, **options, **rates), 0.5)
    x = torch.randn(B, N, C)
    call = call | ({} if 'query' in call else dict(identity=x))
    added, usual = layer.train()(x, **call) - x, layer.eval()(x, **call) - x
    assert not torch.allclose(added, usual, atol=1e-3)
    kept: Any = 0
    if rate == 'path':
        kept = (added.flatten(1).abs().amax(1) > 1e-5)[:, None, None]
        assert 0.25 < kept.float().mean() < 0.75
    left = torch.zeros(C)
    if rate == 'attn_drop':
        left = (layer.attn.out_proj if hasattr(layer, 'attn') else layer.proj).bias
    torch.testing.assert_close(added, left + 2 * usual * kept, rtol=1e-4, atol=1e-4)


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

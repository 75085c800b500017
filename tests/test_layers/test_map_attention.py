"""Agent attention against the published one, options, older checkpoints, and what SAGA needs in half precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_same, filled, half_on_cpu, values_and_gradients
from families import HEADS, MAP, C
from published import agent_attention as published_agent_attention
from torch import nn

from mmgate.layers import AgentAttention, CrossWindowAttention, SAGAAttention
from mmgate.ops.agent_attention import agent_attention_reference, interpolation_matrix
from mmgate.ops.gated_linear_attention import gated_linear_attention, gated_linear_attention_reference

B, H, D = 2, 3, 4


def test_agents_without_training_add_values_and_scale_the_broadcast() -> None:
    """Eq. 9: ``softmax(Q A^T s2) softmax(A K^T s) V + k V``."""
    second = D**-0.15
    options = dict(bias=False, dwc=False, value_factor=0.075, broadcast_scale=second)
    layer = AgentAttention(H * D, H, map_size=(3, 4), agent_num=4, **options).double()
    x = torch.randn(B, 12, H * D, dtype=torch.float64)
    q, k, v = layer.qkv(x).chunk(3, -1)
    agents = F.adaptive_avg_pool2d(q.transpose(1, 2).reshape(B, -1, 3, 4), 2).flatten(2).transpose(1, 2)
    heads = [t.reshape(B, -1, H, D).transpose(1, 2) for t in (q, k, v, agents)]
    gathered = (heads[3] @ heads[1].mT * D**-0.5).softmax(-1) @ heads[2]
    expected = ((heads[0] @ heads[3].mT * second).softmax(-1) @ gathered).transpose(1, 2).flatten(2) + 0.075 * v
    torch.testing.assert_close(layer(x, (3, 4)), layer.proj(expected))


@pytest.mark.parametrize('source, target', [(7, 56), (7, 5), (3, 12), (14, 14), (2, 1)])
def test_interpolation_matrix_is_bilinear_interpolation(source: int, target: int) -> None:
    x = torch.randn(1, 2, source, 3, dtype=torch.float64)
    expected = F.interpolate(x, size=(target, 3), mode='bilinear')
    torch.testing.assert_close(interpolation_matrix(source, target, x) @ x, expected)


@pytest.mark.parametrize('agent_num', [9, 36], ids=['pretraining', 'more'])
@pytest.mark.parametrize('hw_shape', [(8, 8), (5, 11)], ids=str)
def test_agent_layer_is_the_published_one(agent_num: int, hw_shape: tuple[int, int]) -> None:
    layer = AgentAttention(12, 3, map_size=(8, 8), agent_num=agent_num, pretrain_agent_num=9).double()
    x = torch.randn(2, hw_shape[0] * hw_shape[1], 12, dtype=torch.float64)

    names = {name.removeprefix('gate.'): parameter for name, parameter in layer.named_parameters()}

    def published(x: torch.Tensor) -> torch.Tensor:
        return published_agent_attention(names, '', x, hw_shape, 3, agent_num)

    expected = values_and_gradients(published, [x], [0])
    expected |= {name: p.grad for name, p in layer.named_parameters()}
    layer.zero_grad()
    actual = values_and_gradients(lambda x: layer(x, hw_shape), [x], [0])
    actual |= {name: p.grad for name, p in layer.named_parameters()}
    assert_same(actual, expected, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize(
    'options, shape', [({}, 'a map of (8, 8)'), (dict(window=4), 'windows of (4, 4)')], ids=['map', 'windows']
)
def test_the_log_names_the_shape_to_which_biases_are_resized(
    options: dict, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr('mmgate.layers.base.map.log', logged.append)
    pretrained = AgentAttention(H * D, H, map_size=(3, 3), agent_num=4)
    AgentAttention(H * D, H, map_size=(8, 8), agent_num=4, **options).load_state_dict(pretrained.state_dict())
    assert logged == [f'gate: ah_bias, aw_bias, ha_bias, wa_bias resized to {shape}']


def test_wrong_maps_and_heads() -> None:
    layer, x = AgentAttention(8, 2, map_size=(3, 4), agent_num=4), torch.randn(1, 12, 8)
    for wrong in ((3, 5), (3, 3)):
        with pytest.raises(ValueError, match=f'12 tokens do not make a map of 3 x {wrong[1]}'):
            layer(x, wrong)
    with pytest.raises(ValueError, match='not a multiple'):
        AgentAttention(8, 3, map_size=(3, 4))


def test_saga_as_printed() -> None:
    """Eq. 9 and 10, token by token and without a factor: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``."""
    layer = SAGAAttention(12, 3, map_size=(3, 5), scale_by_tokens=False).double()
    nn.init.normal_(layer.gate.position_encoding)
    x = torch.randn(2, 15, 12, dtype=torch.float64, requires_grad=True)

    def printed(x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer.qkv(x).chunk(3, -1)
        gated_k = (k + layer.gate.position_encoding) * layer.gate.gate_k(x).sigmoid()
        gated_v = v * layer.gate.gate_v(x).sigmoid()
        out = torch.zeros_like(q)
        for head in (slice(0, 4), slice(4, 8), slice(8, 12)):
            out[..., head] = sum(
                torch.einsum('bnc,bc,bd->bnd', q[..., head], gated_k[:, j, head], gated_v[:, j, head])
                for j in range(15)
            )
        return layer.proj((out + layer.gate.convolve(v, (3, 5))) * layer.gate.gate_out(x))

    def computed(x: torch.Tensor) -> torch.Tensor:
        return layer(x, (3, 5))

    results = []
    for function in (printed, computed):
        layer.zero_grad()
        results.append(values_and_gradients(function, [x], [0]))
        results[-1] |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_same(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(computed, (x,), fast_mode=True)


@half_on_cpu
def test_saga_keeps_small_keys_in_half_precision() -> None:
    """1 / N on the keys alone rounds many of them to 0: an error of 4 % here."""
    q, k, v = torch.randn(3, 1, 1, 64_000, 4)
    k, v = k.abs() * 0.004, v.abs() * 0.004
    exact = gated_linear_attention(*(x.double() for x in (q, k, v)))
    half = gated_linear_attention(q.half(), k.half(), v.half())
    assert (half.double() - exact).norm() / exact.norm() < 0.01


def test_a_scale_that_is_not_the_default() -> None:
    """Agent attention's in both products, SAGA's on the queries, CSwin's on its logits."""
    x, factor = torch.randn(2, 15, 12, dtype=torch.float64), 0.9
    sizes = dict(map_size=(3, 5), qk_scale=factor)
    agent = AgentAttention(12, 3, agent_num=4, dwc=False, **sizes).double()
    saga = SAGAAttention(12, 3, dwc=False, output_augmentation=False, **sizes).double()
    cross = CrossWindowAttention(12, 3, split=None, qk_scale=factor).double()
    nn.init.zeros_(cross.lepe[0].weight)
    nn.init.zeros_(cross.lepe[0].bias)

    def split(x: torch.Tensor) -> torch.Tensor:
        return x.unflatten(-1, (3, -1)).transpose(1, 2)

    for layer in (agent, saga, cross):
        parts = layer.qkv(x).chunk(3, -1)
        q, k, v = (split(part) for part in parts)
        if layer is agent:
            grid = F.adaptive_avg_pool2d(parts[0].transpose(1, 2).unflatten(-1, (3, 5)), 2)
            tokens = split(grid.flatten(2).transpose(1, 2))
            heads = agent_attention_reference(q, k, v, tokens, *agent.gate.biases((3, 5)), factor)
        elif layer is saga:
            gates = (split(part(x).sigmoid()) for part in (saga.gate.gate_k, saga.gate.gate_v))
            heads = gated_linear_attention_reference(q * factor * 2, k, v, *gates)  # 1 / sqrt(4) is its own
        else:
            heads = (q @ k.mT * factor).softmax(-1) @ v
        torch.testing.assert_close(layer(x, (3, 5)), layer.proj(heads.transpose(1, 2).flatten(2)))


OTHER_NAMES = {
    'mmgate 0.1': ('qkv.', 'proj.'),
    'PVT': ('attn.in_proj_', 'attn.out_proj.'),
    'Swin': ('w_msa.qkv.', 'w_msa.proj.'),
}
LEFT = (
    'w_msa.relative_position_bias_table',
    'w_msa.relative_position_index',
    'sr.weight',
    'norm.bias',
    'lepe.0.weight',
)


@pytest.mark.parametrize('host', OTHER_NAMES)
@pytest.mark.parametrize('name', [name for name in MAP if name != 'cross_window'])
def test_loads_gates_that_lay_beside_projections_of_any_host(name: str, host: str) -> None:
    """And drops what the hosts have besides; a gate that was loaded is not drawn anew."""
    kind, options = MAP[name]
    saved = filled(kind(C, HEADS, **options), 0.5).state_dict()
    qkv, proj = OTHER_NAMES[host]
    names = {key: key.removeprefix('gate.').replace('qkv.', qkv).replace('proj.', proj) for key in saved}
    layer = kind(C, HEADS, **options)
    layer.load_state_dict({names[key]: value for key, value in saved.items()} | {key: torch.ones(1) for key in LEFT})
    layer.init_weights()
    assert all(torch.equal(value, saved[key]) for key, value in layer.state_dict().items())

"""What a host says about dropout, drop path and the scale of its logits, after a swap."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from helpers.host_blocks import BLOCKS, DET, MAP, SEG, UTILS, Block, C, H, called, hosts_in, needs, randomised
from torch import Tensor, nn

from mmgate import swap_attention
from mmgate.gates.agent import AgentGate
from mmgate.hosts import gates_for

# what hosts call that which drops weights, their output, or whole paths
DROPS: dict[str, tuple[str, ...]] = {
    'weights': ('attn_drop', 'dropout'),
    'output': ('proj_drop', 'dropout'),
    'path': ('dropout_layer', 'drop', 'out_drop'),
}
TWINS = f'{SEG}.twins.LocallyGroupedSelfAttention'


def drop(host: Any, kind: str) -> bool:
    """Let a host drop all of its weights, all of its output or one path in two; return whether it can."""
    found = False
    for module in host.modules():
        for name in DROPS[kind]:
            part = getattr(module, name, None)
            holder, rate = (module, name) if isinstance(part, float) else (part, 'p')
            rate = 'drop_prob' if hasattr(holder, 'drop_prob') else rate
            if hasattr(holder, rate):
                setattr(holder, rate, 0.5 if kind == 'path' else 1.0)
                found = True
    return found


def in_training(module: nn.Module, block: Block) -> Tensor:
    torch.manual_seed(7)
    with torch.no_grad():
        return called(copy.deepcopy(module).train(), block)


@pytest.mark.parametrize('case', [needs(name) for name in BLOCKS])
def test_a_gate_drops_what_its_host_drops(case: str) -> None:
    """One that starts as the identity, by the same random numbers."""
    block = BLOCKS[case]
    found = set()
    for kind in DROPS:
        vanilla = randomised(block.make())
        hosts = list(hosts_in(vanilla, block).values())
        gates = [gate for gate in gates_for(hosts[0]) if gate.__name__.startswith('PLuG')]
        if not gates:
            return  # over the whole map, below
        undropped = in_training(vanilla, block)
        if not all([drop(host, kind) for host in hosts]):
            continue
        found.add(kind)
        gated = copy.deepcopy(vanilla)
        swap_attention(gated, dict(path=block.path, type=gates[0]))
        expected = in_training(vanilla, block)
        torch.testing.assert_close(in_training(gated, block), expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(called(gated, block), called(vanilla, block), rtol=1e-4, atol=1e-4)
        assert not torch.allclose(expected, undropped, atol=1e-2), kind
    names = {name for host in hosts for part in host.modules() for name in (*vars(part), *dict(part.named_children()))}
    assert found or not [name for name in names if 'drop' in name]


def over_the_map(case: str, kind: str = '', scale: float | None = None) -> Any:
    """Return a host with agents that drops something or scales its logits; None if it cannot drop so."""
    model = randomised(BLOCKS[case].make())
    ((name, host),) = hosts_in(model, BLOCKS[case]).items()
    if kind and not drop(host, kind):
        return None
    if scale:
        getattr(host, 'w_msa', host).scale = scale
    rule = dict(path=name, type='AgentAttention', map_size=MAP, agent_num=4, dwc=False)
    swap_attention(model, rule)
    attention = randomised(model).get_submodule(name)
    assert type(attention.gate) is AgentGate
    return attention


def last_bias(attention: Any) -> Tensor:
    """Return the bias of what projects the output of a host."""
    inner = getattr(attention, 'w_msa', getattr(attention, 'attn', attention))
    return (inner.out_proj if hasattr(inner, 'out_proj') else inner.proj).bias


OVER_MAPS = [
    f'{DET}.backbones.pvt.SpatialReductionAttention',
    f'{SEG}.mit.EfficientMultiheadAttention',
    f'{SEG}.twins.GlobalSubsampledAttention',
    TWINS,
    f'{UTILS}.MultiheadAttention',
    *(f'{package}.ShiftWindowMSA' for package in (f'{DET}.backbones.swin', f'{SEG}.swin', UTILS)),
]


@pytest.mark.parametrize('kind', DROPS)
@pytest.mark.parametrize('case', [needs(name) for name in OVER_MAPS])
def test_attention_over_the_whole_map_drops_what_its_host_drops(case: str, kind: str) -> None:
    attention, x = over_the_map(case, kind), torch.randn(16, 64, C)
    assert (attention is None) == (case == TWINS and kind == 'path')
    if attention is None:
        return
    given = (x, MAP) if 'hw_shape' in inspect.signature(attention.forward).parameters else (x,)  # not of a ViT
    out = attention.train()(*given)
    if kind == 'path':
        dropped = out.flatten(1).abs().amax(1) < 1e-7
        assert 0 < dropped.sum() < 16
    else:
        torch.testing.assert_close(out, (last_bias(attention) if kind == 'weights' else torch.zeros(C)).expand_as(out))
    assert attention.eval()(*given).std() > 0.01


@pytest.mark.parametrize('scale', [None, 0.9])
@pytest.mark.parametrize('case', [needs(name) for name in OVER_MAPS if 'ShiftWindowMSA' in name or name == TWINS])
def test_attention_over_the_whole_map_scales_as_its_host(case: str, scale: float | None) -> None:
    assert over_the_map(case, scale=scale).gate.scale == (scale or (C // H) ** -0.5)


@pytest.mark.parametrize(
    'name', [f'{DET}.backbones.swin.WindowMSA', f'{SEG}.swin.WindowMSA', TWINS, f'{SEG}.beit.BEiTAttention']
)
def test_a_dense_gate_takes_its_hosts_scale_over(name: str) -> None:
    block = BLOCKS[name]
    vanilla = randomised(block.make())
    usual = called(vanilla, block)
    for host in hosts_in(vanilla, block).values():
        host.scale = 0.9
    gated = copy.deepcopy(vanilla)
    swap_attention(gated, dict(path=block.path, type='PLuGMultiheadAttention'))
    expected = called(vanilla, block)
    assert not torch.allclose(expected, usual, atol=1e-3)
    torch.testing.assert_close(called(gated, block), expected, rtol=1e-4, atol=1e-4)

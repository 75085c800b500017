"""Every pair of the table in the block of its host that really calls it: start, gradient, dropout, scale, removal."""

from __future__ import annotations

import copy
from importlib import import_module
from itertools import product
from typing import Any

import pytest
import torch
from helpers.families import IDENTITIES
from helpers.gated import anatomy, assert_same_anatomy, learning
from helpers.host_blocks import (
    BLOCKS,
    DET,
    MAP,
    PACKAGES,
    SEG,
    UTILS,
    Block,
    C,
    H,
    called,
    hosts_in,
    needs,
    randomised,
    some_options,
)
from torch import Tensor, nn

from mmgate import gates_disabled, restore_attention, swap_attention
from mmgate._environment import available
from mmgate.adapter import gated_modules
from mmgate.errors import ConfigError, full_name
from mmgate.gate import gate_of_type, named_gate_parameters
from mmgate.hosts import gates_for
from mmgate.hosts.table import _ADAPTERS


def outputs(module: nn.Module, block: Block) -> list[Tensor]:
    """Return what a block computes, and what it computes in training."""
    found = []
    for mode in (False, True):
        module.train(mode)
        with torch.no_grad():
            found.append(called(module, block))
    return found


def trained(module: nn.Module, block: Block) -> set[str]:
    """Return the names of a block's parameters that get a gradient in training."""
    for _ in range(2):  # a second epoch; TinyViT's is another then
        module.train()
    called(module, block).square().sum().backward()
    return {name for name, parameter in module.named_parameters() if parameter.grad is not None}


def test_every_host_has_its_block() -> None:
    for package in filter(available, PACKAGES):
        import_module(f'mmgate.hosts.{package}')
    projects = {host for _, host in _ADAPTERS if isinstance(host, str) and not host.startswith(('modeling_', 'peft.'))}
    hosts = {host if isinstance(host, str) else full_name(host) for _, host in _ADAPTERS}
    hosts = {host for host in hosts if host.partition('.')[0] in PACKAGES} | projects
    named = {name.partition(' ')[0] for name in BLOCKS}
    present = {host for host in named if host.partition('.')[0] not in PACKAGES or available(host.partition('.')[0])}
    assert hosts == present, 'a new pair needs the block that calls its host'


@pytest.mark.parametrize('case', [needs(name) for name in BLOCKS])
def test_every_gate_acts_in_its_hosts_block(case: str) -> None:
    """A parameter of it gets a gradient, and with random parameters the output differs from that with gates disabled.

    Gates without parameters are exempt. Those that start as the identity compute what the block did. All take a vanilla
    checkpoint, are finite in 16 bits and come off without a trace; ``refused`` names those that do not run, and why.
    """
    block, host = BLOCKS[case], case.partition(' ')[0]
    path, vanilla = block.path, randomised(block.make())
    expected = outputs(copy.deepcopy(vanilla), block)
    expected_trained = trained(copy.deepcopy(vanilla), block)
    module = next(iter(hosts_in(vanilla, block).values()))
    names = (full_name(type(module)), host if type(module).__name__ == host.rpartition('.')[2] else '')
    assert host in names
    fitting = [gate for gate in gates_for(module) if gate.__module__.startswith('mmgate.')]
    kinds = [kind for kind, key in _ADAPTERS if (key if isinstance(key, str) else full_name(key)) == host]
    assert kinds and all(any(issubclass(gate_of_type(gate), kind) for gate in fitting) for kind in kinds)
    refused = {}
    for gate in fitting:
        model = copy.deepcopy(vanilla)
        before = anatomy(model)
        try:
            swap_attention(model, dict(type=gate, path=path, **some_options(gate)))
        except ConfigError as error:
            refused[gate.__name__] = str(error)
            assert_same_anatomy(anatomy(model), before)
            continue
        gated = anatomy(model)
        changed = {f'{name}|class' for name, _ in gated_modules(model)}
        changed |= {f'{name}|{hidden}' for name, part in gated_modules(model) for hidden in part.gating.replaced}
        assert {place for place, one in before.items() if place not in gated or gated[place] is not one} == changed
        assert not model.load_state_dict(vanilla.state_dict(), strict=False).unexpected_keys
        actual = outputs(copy.deepcopy(model), block)
        for one, other in zip(actual, expected, strict=True):
            assert one.shape == other.shape and one.isfinite().all(), gate
            if gate_of_type(gate).identity_start:
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        with torch.autocast('cpu', torch.bfloat16):
            assert called(model, block).isfinite().all(), gate
        trains = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        assert trained(model, block) >= expected_trained & trains
        added = dict(named_gate_parameters(model))
        assert not added or any(p.grad is not None and p.grad.abs().sum() > 0 for p in added.values()), gate
        model.eval()  # TinyViT's returns nothing
        if added:  # open gates change what the block computes
            for parameter in added.values():
                nn.init.normal_(parameter)
            with gates_disabled(model):
                off = called(model, block)
            assert not torch.allclose(called(model, block), off, rtol=0, atol=2e-5), gate
        restore_attention(model)
        assert_same_anatomy(anatomy(model), before)
    messages = {gate: f'attention[0]: {gate} does not replace ' for gate in block.refused}
    assert refused.keys() == messages.keys()
    for gate, message in refused.items():
        assert message.startswith(messages[gate]) and message.endswith(f': {block.refused[gate]}')


# of gates that the block refuses with these options alone
REFUSED = {
    **{name: {'sdpa_G5'} for name, block in BLOCKS.items() if 'output' in str(block.refused)},
    'mmpretrain.models.backbones.xcit.XCA': {'plug_single'},  # whose gate has a pair of each two channels
}


@pytest.mark.parametrize('case', [needs(name) for name in BLOCKS])
def test_every_identity_starts_as_its_hosts_block_and_learns(case: str) -> None:
    """At each position, and with the heads, widths, scales, masks and biases that the block has."""
    block = BLOCKS[case]
    vanilla = randomised(block.make())
    expected, refused = called(vanilla, block), set(REFUSED.get(case, ()))
    fitting = {gate.__name__ for gate in gates_for(next(iter(hosts_in(vanilla, block).values())))}
    for name, rule in IDENTITIES.items():
        if rule['type'] not in fitting - block.refused.keys():
            continue
        model = copy.deepcopy(vanilla)
        if name in refused:
            with pytest.raises(ConfigError):
                swap_attention(model, dict(rule, path=block.path))
            continue
        swap_attention(model, dict(rule, path=block.path))
        torch.testing.assert_close(called(model, block), expected, rtol=1e-4, atol=1e-4)
        called(model, block).square().sum().backward()
        assert learning(model), name


# what hosts call that which drops weights, their output, or whole paths
DROPS: dict[str, tuple[str, ...]] = {
    'weights': ('attn_drop', 'dropout'),
    'output': ('proj_drop', 'dropout'),
    'path': ('dropout_layer', 'drop', 'out_drop'),
}
TWINS = f'{SEG}.twins.LocallyGroupedSelfAttention'


def drop(host: Any, kind: str, of_paths: float) -> bool:
    """Let a host drop all of its weights, all of its output or some paths; return whether it can."""
    found = False
    for module in host.modules():
        for name in DROPS[kind]:
            part = getattr(module, name, None)
            holder, rate = (module, name) if isinstance(part, float) else (part, 'p')
            rate = 'drop_prob' if hasattr(holder, 'drop_prob') else rate
            if hasattr(holder, rate):
                setattr(holder, rate, of_paths if kind == 'path' else 1.0)
                found = True
    return found


def in_training(module: nn.Module, block: Block) -> Tensor:
    torch.manual_seed(7)
    with torch.no_grad():
        return called(copy.deepcopy(module).train(), block)


# by gate, its options and how many paths are dropped: attention over the map does as its host where nothing is left
DROPPING: dict[str, tuple[dict[str, Any], float]] = {
    'PLuGMultiheadAttention': ({}, 0.5),
    'PLuGMultiScaleDeformableAttention': ({}, 0.5),
    'AgentAttention': (dict(map_size=MAP, agent_num=4, dwc=False), 0.999),
}


@pytest.mark.parametrize('case', [needs(name) for name in BLOCKS])
def test_a_gate_drops_what_its_host_drops(case: str) -> None:
    """By the same random numbers."""
    block = BLOCKS[case]
    vanilla, found = randomised(block.make()), set()
    undropped, host = in_training(vanilla, block), next(iter(hosts_in(vanilla, block).values()))
    gates = {gate.__name__ for gate in gates_for(host)} - block.refused.keys()
    for gate, kind in product(gates.intersection(DROPPING), DROPS):
        options, of_paths = DROPPING[gate]
        dropping = copy.deepcopy(vanilla)
        if not all([drop(host, kind, of_paths) for host in hosts_in(dropping, block).values()]):
            continue
        found.add(kind)
        gated = copy.deepcopy(dropping)
        swap_attention(gated, dict(options, path=block.path, type=gate))
        expected = in_training(dropping, block)
        torch.testing.assert_close(in_training(gated, block), expected, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(expected, undropped, atol=1e-2), kind
        if of_paths == 0.5:
            torch.testing.assert_close(called(gated, block), called(dropping, block), rtol=1e-4, atol=1e-4)
    names = {name for part in host.modules() for name in (*vars(part), *dict(part.named_children()))}
    assert found or not [name for name in names if 'drop' in name]


WINDOWED = [f'{package}.ShiftWindowMSA' for package in (f'{DET}.backbones.swin', f'{SEG}.swin', UTILS)]


@pytest.mark.parametrize('scale', [None, 0.9])
@pytest.mark.parametrize('case', [needs(name) for name in (*WINDOWED, TWINS)])
def test_attention_over_the_whole_map_scales_as_its_host(case: str, scale: float | None) -> None:
    model = BLOCKS[case].make()
    (host,) = hosts_in(model, BLOCKS[case]).values()
    if scale:
        getattr(host, 'w_msa', host).scale = scale
    swap_attention(model, dict(path=BLOCKS[case].path, type='AgentAttention', map_size=MAP, agent_num=4))
    assert host.gate.scale == (scale or (C // H) ** -0.5)


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

"""Every pair of the table in the block of its host that really calls it: a pass, a step's gradient, and off again."""

from __future__ import annotations

import copy
from importlib import import_module
from typing import Any

import pytest
import torch
from helpers.gated import anatomy, assert_same_anatomy
from helpers.host_blocks import (
    BLOCKS,
    MAP,
    PACKAGES,
    Block,
    called,
    hosts_in,
    needs,
    randomised,
)
from torch import Tensor, nn

from mmgate import restore_attention, swap_attention
from mmgate._environment import available
from mmgate.adapter import gated_modules
from mmgate.errors import ConfigError, full_name
from mmgate.gate import gate_of_type, gate_options, named_gate_parameters
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


def some_options(gate: type) -> dict[str, Any]:
    options: dict[str, Any] = dict(agent_num=4) if gate.__name__ == 'AgentAttention' else {}
    return options | (dict(map_size=MAP) if 'map_size' in gate_options(gate) else {})


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
def test_every_gate_runs_in_its_hosts_block(case: str) -> None:
    """Those that start as the identity compute what the block did, and a vanilla checkpoint fills them.

    All are finite in 16 bits, have a gradient and come off without a trace; the block says which do not run, and why.
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
        restore_attention(model)
        assert_same_anatomy(anatomy(model), before)
    messages = {gate: f'attention[0]: {gate} does not replace ' for gate in block.refused}
    assert refused.keys() == messages.keys()
    for gate, message in refused.items():
        assert message.startswith(messages[gate]) and message.endswith(f': {block.refused[gate]}')

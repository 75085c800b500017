"""Every gate in its host's block under torch.compile and torch.export: what is one graph without it is one with it."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import noted_graph
from helpers.host_blocks import BLOCKS, Block, hosts_in, inputs, needs, randomised, some_options
from torch import nn

from mmgate import swap_attention
from mmgate.hosts import gates_for

pytestmark = [pytest.mark.slow, noted_graph]


def one_graphs(module: nn.Module, block: Block) -> set[str]:
    """Return by which of both a block is one graph, which computes what the block does."""
    args, named = inputs(block)
    expected = module(*args, **named)
    torch._dynamo.reset()
    calls = dict(
        compile=lambda: torch.compile(module, backend='eager', fullgraph=True),
        export=lambda: torch.export.export(module, tuple(args), named).module(),
    )
    found = set()
    for name, make in calls.items():
        try:
            actual = make()(*args, **named)
        except Exception:  # there is no class that all of Dynamo's errors share in each version
            continue
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        found.add(name)
    return found


@pytest.mark.parametrize('case', [needs(name) for name in BLOCKS])
def test_a_gate_breaks_no_graph(case: str) -> None:
    block = BLOCKS[case]
    vanilla = randomised(block.make())
    expected = one_graphs(vanilla, block)
    tried = 0
    for gate in gates_for(next(iter(hosts_in(vanilla, block).values()))):
        # Projects' gates are there if another test has imported them.
        if gate.__name__ in block.refused or not gate.__module__.startswith('mmgate.'):
            continue
        model = copy.deepcopy(vanilla)
        swap_attention(model, dict(type=gate, path=block.path, **some_options(gate)))
        assert one_graphs(model, block) >= expected, gate
        tried += 1
    assert tried

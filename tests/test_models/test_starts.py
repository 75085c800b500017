"""A gated model starts where its vanilla partner starts, and draws on as that one does."""

from __future__ import annotations

import copy
import io
import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import zoo
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint
from test_zoo import ZOO
from torch import Tensor, nn

from mmgate import restore_attention, swap_attention
from mmgate.layers import AgentAttention, SDPAGatedAttention
from mmgate.layers.map_attention import MapAttention
from mmgate.models import attention_modules
from mmgate.models.adapters import adapter_for, gates_for

SEED = 3
LEFT_OUT = ('.relative_position_bias_table', '.sr.', '.norm.', '.lepe.')  # by attention over the whole map
OPTIONS: dict[str, dict[str, Any]] = {  # of gates that need some
    'AgentAttention': dict(map_size=(4, 4), agent_num=4),
    **{name: dict(map_size=(4, 4)) for name in ('SAGAAttention', 'FocusedLinearAttention', 'PolaFormerAttention')},
    'CrossWindowAttention': dict(split=None),
}


def initialised(cfg: Any, rules: list[dict] | None = None) -> tuple[nn.Module, Tensor]:
    """Build as a runner does, swap, initialise; return the model and the state of the global random numbers."""
    torch.manual_seed(SEED)
    model = MODELS.build(copy.deepcopy(cfg))
    if rules:
        swap_attention(model, rules)
    prepared(model)
    model.init_weights()
    return model, torch.get_rng_state()


def prepared(model: nn.Module) -> None:
    if hasattr(model, 'text_encoder'):  # the part of SAN that starts from a checkpoint only
        model.decode_head.rec_with_attnbias.init_weights = lambda state: None


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters by the names that they have in the vanilla model, whatever stands there now."""
    found = {
        f'{swap.name}.{theirs}': dict(swap.gate.named_parameters())[ours]
        for swap in swaps_in(model)
        for theirs, ours in swap.shared
        if ours in dict(swap.gate.named_parameters())
    }
    inside = tuple(f'{swap.name}.' for swap in swaps_in(model))
    found.update({name: p for name, p in model.named_parameters() if not name.startswith(inside)})
    return found


def swaps_in(model: nn.Module) -> list[Any]:
    """Every swap, named from ``model``: backbones of ours hold their own."""
    found = []
    for name, module in model.named_modules():
        for swap in vars(module).get('attention_swaps', []):
            swap = copy.copy(swap)
            swap.name = f'{name}.{swap.name}' if name else swap.name
            found.append(swap)
    return found


def assert_starts_as(vanilla: tuple[nn.Module, Tensor], gated: tuple[nn.Module, Tensor]) -> None:
    expected, actual = dict(vanilla[0].named_parameters()), named(gated[0])
    assert set(actual) <= set(expected)
    maps = tuple(swap.name for swap in swaps_in(gated[0]) if isinstance(swap.gate, MapAttention))
    lacking = [n for n in set(expected) - set(actual) if not (n.startswith(maps) and any(p in n for p in LEFT_OUT))]
    assert not lacking
    differing = [name for name, value in actual.items() if not torch.equal(value, expected[name])]
    assert not differing
    assert torch.equal(gated[1], vanilla[1]), 'the global random numbers go on otherwise'


def fitting(model: nn.Module) -> dict[str, list[str]]:
    """The gates that fit, by the name of the attention."""
    found = {}
    for name, module in attention_modules(model):
        gates = []
        for gate in gates_for(module):
            adapter = adapter_for(gate, module)
            try:
                adapter(gate, copy.deepcopy(module), **OPTIONS.get(gate.__name__, {}))
            except ValueError:
                continue
            gates.append(gate.__name__)
        if gates:
            found[name] = gates
    return found


def rounds(gates: dict[str, list[str]]) -> Iterator[list[dict]]:
    """Rules that together put every gate once into each kind of attention: the kinds take turns within a model."""
    by_kind: dict[tuple[str, ...], list[str]] = {}
    for name, listed in gates.items():
        by_kind.setdefault(tuple(listed), []).append(name)
    turns = {kind: [kind[i : i + len(names)] for i in range(0, len(kind), len(names))] for kind, names in by_kind.items()}
    for chosen in itertools.zip_longest(*turns.values(), fillvalue=()):
        rules: list[dict] = []
        for kind, picked in zip(turns, chosen, strict=True):
            for name, gate in zip(by_kind[kind], picked, strict=False):
                if not any(name.startswith(f'{r["path"]}.') or r['path'].startswith(f'{name}.') for r in rules):
                    rules.append(dict(path=name, type=gate, **OPTIONS.get(gate, {})))
        yield rules


@pytest.mark.parametrize('name', ZOO)
def test_every_host_with_every_gate(name: str) -> None:
    cfg = zoo.reduced(ZOO[name][0])
    vanilla = initialised(cfg.model)
    torch.manual_seed(SEED)
    model = MODELS.build(copy.deepcopy(cfg.model))
    for rules in rounds(fitting(model)):
        gated = initialised(cfg.model, rules)
        assert_starts_as(vanilla, gated)

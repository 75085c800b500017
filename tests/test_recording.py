"""Attention, gated and vanilla, is recorded while it runs, and what is recorded is what the layer uses."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from typing import Any

import pytest
import torch
from conftest import filled
from helpers.gated import anatomy, assert_same_anatomy
from helpers.host_blocks import BLOCKS, Block, called, hosts_in, needs, randomised
from mmdet.models.backbones.swin import WindowMSA
from torch import Tensor, nn

import mmgate
from mmgate import gates, record
from mmgate.analysis.probes.layers import effective_rank
from mmgate.gates.parts.stripes import merge_stripes, split_stripes
from mmgate.hosts import gates_for
from mmgate.hosts.table import _ADAPTERS
from mmgate.hosts.window import WindowMSAAdapter

C, HEADS = 16, 2
PLUG = ('PLuGMultiheadAttention', 'PLuGMultiScaleDeformableAttention')


def x(*shape: int) -> Tensor:
    return torch.randn(*shape)


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare up to rounding, by the size of what is compared."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * max(float(expected.abs().max()), 1e-3))


def dropping(block: Block) -> nn.Module:
    """Return a block in training that drops half of all that it can drop."""
    made = randomised(block.make()).train()
    for module in made.modules():
        # Visformer's projection drops by the order in memory, which is another.
        if isinstance(module, nn.Dropout) and 'visformer' not in block.name:
            module.p = 0.5
        elif isinstance(getattr(module, 'dropout', None), float):
            module.dropout = 0.5
    return made


def check_unchanged(model: nn.Module, block: Block, exact: bool) -> None:
    """Compare two passes in training, of which one is recorded: what they compute, draw and leave."""
    outputs, left = [], []
    before = anatomy(model)
    for records in (False, True):
        torch.manual_seed(2)
        with record(model) if records else nullcontext({}) as recording:
            outputs.append(called(model, block))
        left.append(torch.rand(3))
        assert_same_anatomy(anatomy(model), before)
    assert torch.equal(*left)
    assert torch.equal(*outputs) if exact else close(outputs[1], outputs[0]) is None
    notes = [found for of in recording.values() for found in of.values()]
    assert all(len(found.tensors) == 1 for found in notes)


def recorded(model: nn.Module, block: Block) -> dict[str, dict[str, Any]]:
    """Record a block in evaluation; weights times values are what a module in it is given.

    In any order, because a host may put windows together before it projects, and crop their padding.
    """
    given: list[Tensor] = []
    for module in model.eval().modules():
        module.register_forward_pre_hook(lambda module, args: given.extend(x for x in args if isinstance(x, Tensor)))
    with record(model) as recording, torch.no_grad():
        called(model, block)
    for of in recording.values():
        if 'values' in of:
            weights = of['attention'].last
            merged = weights @ of['values'].last
            torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
            distances = [farthest(x, merged) for x in given if x.is_floating_point() and x.numel() <= merged.numel()]
            assert min(distances) < 1e-4 * float(merged.abs().max())
    return recording


def farthest(some: Tensor, every: Tensor) -> float:
    """Return the largest distance of a number from the nearest among others."""
    ordered = every.flatten().sort().values
    above = torch.searchsorted(ordered, some.flatten()).clamp(1, len(ordered) - 1)
    apart = torch.stack([(some.flatten() - ordered[place]).abs() for place in (above, above - 1)])
    return float(apart.amin(0).max())


@pytest.mark.parametrize('case', [needs(name) for name in BLOCKS])
def test_every_host_is_recorded_and_unchanged(case: str) -> None:
    """Of gated attention the output is the same bits, of vanilla attention equal to rounding, in training, too.

    A gate that is the identity leaves the host's numbers, which are read in two ways then, and notes 0.
    """
    block = BLOCKS[case]
    model = dropping(block)
    check_unchanged(copy.deepcopy(model), block, exact=False)
    vanilla = recorded(copy.deepcopy(model), block)
    assert bool(vanilla) != ('XCA' in case)  # whose channels attend to each other
    fitting = {gate.__name__ for host in hosts_in(model, block).values() for gate in gates_for(host)}
    for kind in fitting.intersection(PLUG):
        mmgate.swap_attention(model, dict(type=kind, path=block.path))
        check_unchanged(copy.deepcopy(model), block, exact=True)
        gated = recorded(model, block)
        if vanilla:
            assert [path for path, of in gated.items() if 'gate' in of] == [*vanilla]
            assert not any(of['gate'].last.any() for of in gated.values())
        for path, notes in vanilla.items():
            assert {*notes, 'gate'} <= gated[path].keys()
            for name, found in notes.items():
                torch.testing.assert_close(gated[path][name].last, found.last, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('class_tokens', [0, 1], ids=['map', 'class token'])
def test_the_map_of_keys_and_values(class_tokens: int) -> None:
    """It is what SAGA multiplies the queries by, divided by the number of tokens."""
    layer = filled(gates.SAGAAttention(C, HEADS, class_tokens=class_tokens, position_encoding=False), 0.3)
    tokens = x(2, 16 + class_tokens, C)
    with record(layer) as recording, torch.no_grad():
        layer(tokens, (2, 8))
        k, v = layer.qkv(tokens).chunk(3, -1)[1:]
        keys, values = k * layer.gate.gate_k(tokens).sigmoid(), v * layer.gate.gate_v(tokens).sigmoid()
    found = recording['']
    assert {'kv', 'gate_k', 'gate_v', 'gate_out'} == set(found)
    kv = found['kv'].tensors[0]
    torch.testing.assert_close(kv, layer.gate.split_heads(keys).mT @ layer.gate.split_heads(values) / tokens.shape[1])
    assert (effective_rank(kv) <= C // HEADS + 1e-6).all()


AGENTS = [{}, dict(window=5), dict(shifted=True, window=4), dict(class_tokens=1)]
AGENTS += [dict(bias=False), dict(agents='static'), dict(broadcast_scale=0.5)]


@pytest.mark.parametrize('options', AGENTS, ids=str)
def test_agents_are_read_in_every_form(options: dict[str, Any]) -> None:
    """The two softmaxes' product gives the layer's output; the agents' maps sum to 1."""
    shifted = options.get('shifted', False)
    given = {name: value for name, value in options.items() if name != 'shifted'}
    layer = gates.AgentAttention(C, HEADS, map_size=(8, 12), agent_num=4, dwc=False, **given)
    layer.gate.shifted = shifted
    extra = layer.gate.class_tokens
    hw = (8, 8) if extra else (8, 12)
    tokens = x(2, hw[0] * hw[1] + extra, C)
    with record(layer.eval()) as recording, torch.no_grad():
        expected = layer(tokens, hw)
        value = layer.qkv(tokens).chunk(3, -1)[2]
    readings = {name: found.tensors[0] for name, found in recording[''].items()}
    attention, maps = readings['attention'], readings['agents']
    assert maps.shape == (2, HEADS, 4, *hw) and ('geometry' in readings) == (not extra)
    if len(attention) > 2:
        _, _, *window, shift = readings['geometry'].tolist()
        assert shift == (window[0] // 2 if shifted else 0)
        value = split_stripes(value.unflatten(1, hw).roll((-shift, -shift), (1, 2)).flatten(1, 2), hw, tuple(window))
    mixed = (attention @ layer.gate.split_heads(value)).transpose(1, 2).flatten(2)
    if len(attention) > 2:
        mixed = merge_stripes(mixed, hw, tuple(window)).unflatten(1, hw).roll((shift, shift), (1, 2)).flatten(1, 2)
    torch.testing.assert_close(layer.proj(mixed), expected, rtol=1e-4, atol=1e-5)
    if not extra and options.get('window') != 5:  # the rest lies on the class token or on padding
        shares = maps.sum((-1, -2))
        torch.testing.assert_close(shares, torch.full_like(shares, max(len(attention) // 2, 1)))
    if shifted:  # the first window lies two rows down and two columns right
        assert maps[0, 0, 0, 2:6, 2:6].sum() == pytest.approx(1, abs=1e-5)


def layer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return filled(nn.TransformerEncoderLayer(C, HEADS, C, 0.0, batch_first=True), 0.3).eval(), x(2, 5, C)


class AsksForGate(WindowMSAAdapter):
    """An adapter of a host with an attribute of the gate's name."""

    @classmethod
    def check(cls, host: Any) -> None:
        super().check(host)
        assert host.gate is None


def windows(gate: str | None = None, plain: bool = False) -> tuple[Any, Tensor]:
    torch.manual_seed(0)
    model = filled(nn.Sequential(WindowMSA(C, HEADS, (2, 3))), 0.3).eval()
    given = x(4, 6, C)
    if plain:
        model[0].gate = None
    if gate is not None:
        mmgate.swap_attention(model, dict(type=gate, path='0'))
    return model, given


@pytest.mark.parametrize('make', [layer, windows])
def test_each_thread_has_its_own_recording(make: Any) -> None:
    """A pass in another thread has the bits of torch's fast path, as without one, until it is recorded there."""
    model, given = make()

    def run(*recorded: nn.Module) -> tuple[Tensor, list[Any]]:
        with torch.inference_mode(), ExitStack() as stack:
            recordings = [stack.enter_context(record(one)) for one in recorded]
            return model(given), recordings

    plain, _ = run()
    with record(model) as outer, ThreadPoolExecutor(1) as other:
        assert torch.equal(other.submit(run).result()[0], plain)
        _, (alone,) = other.submit(run, model).result()
        assert not outer
        found, (inner,) = run(model)
    assert not torch.equal(found, plain) and close(found, plain) is None
    for recording in (outer, inner, alone):
        (notes,) = recording.values()
        assert [len(of.tensors) for of in notes.values()] == [1, 1]


@pytest.mark.parametrize('fails, on_instance', [(False, False), (True, True), (False, True)])
def test_a_recording_leaves_nothing_behind(fails: bool, on_instance: bool) -> None:
    """Neither a class nor an attribute, also after an error in the block; tensors and children are the same.

    A class's own method may be on the instance, where transformers leaves it.
    """
    model, given = layer()
    attention = model.self_attn
    if on_instance:
        vars(attention)['forward'] = attention.forward
    before = anatomy(model)
    kind = type(attention)
    with pytest.raises(KeyError) if fails else record(model), record(model) as recording:
        model(given)
        assert 'self_attn' in recording
        assert type(attention) is kind and list(attention._modules) == ['out_proj']
        if fails:
            raise KeyError
    assert_same_anatomy(anatomy(model), before)


@pytest.mark.parametrize('padded', [False, True])
def test_torchs_encoder_runs_on_no_fast_path(padded: bool) -> None:
    """Which would read the weights of the attention without calling it, and pack padded sequences."""
    encoder = nn.TransformerEncoder(layer()[0], 2).eval()
    given, padding = x(2, 5, C), torch.zeros(2, 5, dtype=torch.bool)
    padding[1, 3:] = padded
    call = dict(src_key_padding_mask=padding) if padded else {}
    with torch.no_grad():
        expected = encoder(given, **call)
        with record(encoder) as recording:
            found = encoder(given, **call)
    assert list(recording) == ['layers.0.self_attn', 'layers.1.self_attn']
    close(found[0], expected[0])
    close(found[1, :3], expected[1, :3])  # torch's fast path leaves zeros at padding
    assert not (padded and recording['layers.0.self_attn']['attention'].last[1, ..., 3:].any())


class Doubled(nn.MultiheadAttention):
    """A subclass that computes something else than its base."""

    def forward(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        output, weights = super().forward(query, *args, **kwargs)
        return 2 * output, weights


def test_a_subclass_is_not_recorded_through_the_adapter_of_its_base() -> None:
    """Nor an attention whose forward somebody has replaced; both compute what they did."""
    model = nn.ModuleDict(dict(doubled=Doubled(C, HEADS), replaced=nn.MultiheadAttention(C, HEADS))).eval()
    replaced = model['replaced']
    vars(replaced)['forward'] = lambda *given: type(replaced).forward(replaced, *given)
    given = x(5, 2, C)
    expected = [model[name](given, given, given)[0] for name in model]
    with record(model) as recording:
        found = [model[name](given, given, given)[0] for name in model]
    assert not recording and 'forward' in vars(replaced)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize('plain', [False, True], ids=['', 'plain attribute'])
def test_attention_whose_gate_is_off_is_recorded_as_vanilla(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one that has a plain attribute of the gate's name, as timm's, which its adapter may ask for."""
    if plain:
        monkeypatch.setattr('mmgate.hosts.table._ADAPTERS', dict(_ADAPTERS))
        mmgate.adapts(mmgate.DenseGate, WindowMSA)(AsksForGate)
    vanilla, given = windows(plain=plain)
    gated, _ = windows('SDPAGatedMultiheadAttention', plain)
    maps = []
    for model in (vanilla, gated):
        with mmgate.gates_disabled(model), record(model) as recording:
            model(given)
        assert set(recording['0']) == {'attention', 'values'}
        maps.append(recording['0']['attention'].last)
    torch.testing.assert_close(maps[1], maps[0])
    with ExitStack() as stack:
        with mmgate.gates_disabled(gated):
            stack.enter_context(record(gated))
        on = gated(given)  # the gate is on again
    assert torch.equal(on, gated(given)) and not torch.equal(on, vanilla(given))
    assert 'forward' not in vars(gated[0])
    with record(gated) as recording:
        gated(given)
    assert 'gate' in recording['0']


@pytest.mark.parametrize('gate', [None, 'PLuGMultiheadAttention'])
def test_recorded_weights_keep_their_graph_where_it_is_asked_for(gate: str | None) -> None:
    model, given = windows(gate)
    with record(model, 'attention', graph=True) as recording:
        model(given)
    recording['0']['attention'].last.square().sum().backward()
    assert model[0].qkv.weight.grad.any()


def test_only_what_is_asked_for_runs_on_another_forward() -> None:
    """The statistics of gates leave vanilla attention as it is, bit by bit."""
    model, given = layer()
    with torch.inference_mode():
        expected = model(given)
        with record(model, 'gates'):
            assert torch.equal(model(given), expected)


class Own(nn.Module):
    """A stranger's attention with a gate of mmgate's, without an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(C, 3 * C)
        self.gate: Any = gates.SDPAGate(mmgate.Sizes(C, HEADS))
        self.gate.reset()

    def forward(self, tokens: Tensor) -> Tensor:
        mmgate.note(self, 'mean', tokens.mean())
        heads = (self.gate.split_heads(part) for part in self.proj(tokens).chunk(3, -1))
        return self.gate.attend(*heads, (tokens, tokens, tokens), None)


def test_what_a_strangers_attention_notes_is_recorded() -> None:
    model = nn.Sequential(Own())
    with record(model) as recording:
        model(torch.randn(2, 5, C))
    assert set(recording['0']) == {'mean', 'gate', 'attention', 'values'}

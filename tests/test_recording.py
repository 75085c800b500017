"""Attention, gated and vanilla, is recorded while it runs, and what is recorded is what the layer uses."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from importlib import import_module
from threading import Thread
from typing import Any

import pytest
import torch
from conftest import filled, needs_mmpretrain
from helpers.gated import anatomy, assert_same_anatomy
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import WindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmseg.models.backbones.beit import BEiTAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention
from mmseg.models.backbones.twins import GlobalSubsampledAttention, LocallyGroupedSelfAttention
from torch import Tensor, nn

import mmgate
from mmgate import gates, note, record
from mmgate.analysis.probes.layers import effective_rank
from mmgate.gate import Gate, Sizes
from mmgate.gates.base.dense import DenseGate
from mmgate.gates.parts.stripes import merge_stripes, split_stripes

C, HEADS = 16, 2
GATES: dict[str, dict[str, Any]] = {
    'plug': dict(type='PLuGMultiheadAttention'),
    'sdpa': dict(type='SDPAGatedMultiheadAttention'),
    'dgsa': dict(type='DifferentialGatedMultiheadAttention', residual='none'),
    'differential_v2': dict(type='DifferentialV2MultiheadAttention', init='identity'),
}


def x(*shape: int) -> Tensor:
    return torch.randn(*shape)


def conditional(cross: bool) -> dict[str, Any]:
    given: dict[str, Any] = {n: x(2, 7 if 'key' in n else 5, C) for n in ('query', 'key', 'query_pos', 'key_pos')}
    if cross:
        given.update(ref_sine_embed=x(2, 5, C), key_padding_mask=torch.arange(7)[None] >= torch.tensor([[7], [4]]))
    return given


def of_mmpretrain(path: str) -> Any:
    module, _, name = f'mmpretrain.models.{path}'.rpartition('.')
    return getattr(import_module(module), name)


DROP = dict(attn_drop_rate=0.5, proj_drop_rate=0.5)
# name: the host, its inputs, what its attentions look like: batch or windows, queries, keys
HOSTS: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any]], list[tuple[int, int, int]]]] = {
    'torch': (
        lambda: nn.MultiheadAttention(C, HEADS, 0.5, batch_first=True),
        lambda: dict(query=x(2, 5, C), key=x(2, 7, C), value=x(2, 7, C)),
        [(2, 5, 7)],
    ),
    'mmcv': (
        lambda: MultiheadAttention(C, HEADS, 0.5),
        lambda: dict(query=x(5, 2, C), key_padding_mask=torch.arange(5)[None] >= torch.tensor([[5], [3]])),
        [(2, 5, 5)],
    ),
    **{
        kind.__name__: (
            lambda kind=kind: kind(C, HEADS, sr_ratio=2),
            lambda: dict(x=x(2, 24, C), hw_shape=(4, 6)),
            [(2, 24, 6)],
        )
        for kind in (SpatialReductionAttention, EfficientMultiheadAttention, GlobalSubsampledAttention)
    },
    'twins_windows': (
        lambda: LocallyGroupedSelfAttention(C, HEADS, window_size=4, **DROP),
        lambda: dict(x=x(2, 35, C), hw_shape=(5, 7)),
        [(8, 16, 16)],
    ),
    'swin': (
        lambda: WindowMSA(C, HEADS, (2, 3), True, None, 0.5, 0.5),
        lambda: dict(x=x(4, 6, C), mask=-100.0 * x(2, 6, 6).gt(1)),
        [(4, 6, 6)],
    ),
    'beit': (lambda: BEiTAttention(C, HEADS, (2, 3), **DROP), lambda: dict(x=x(2, 7, C)), [(2, 7, 7)]),
    'conditional_self': (lambda: ConditionalAttention(C, HEADS, 0.5, 0.5), lambda: conditional(False), [(2, 5, 5)]),
    'conditional_cross': (
        lambda: ConditionalAttention(C, HEADS, 0.5, 0.5, cross_attn=True),
        lambda: conditional(True),
        [(2, 5, 7)],
    ),
    'bidirectional': (
        lambda: BiMultiHeadAttention(16, 24, C, HEADS, 0.5),
        lambda: dict(vision=x(2, 9, 16), lang=x(2, 5, 24)),
        [(2, 9, 5), (2, 5, 9)],
    ),
    'pretrain_vit': (
        lambda: of_mmpretrain('utils.attention.MultiheadAttention')(C, HEADS, attn_drop=0.5, proj_drop=0.5),
        lambda: dict(x=x(2, 7, C)),
        [(2, 7, 7)],
    ),
    'swin_v2': (
        lambda: of_mmpretrain('utils.attention.WindowMSAV2')(C, (2, 3), HEADS, attn_drop=0.5, proj_drop=0.5),
        lambda: dict(x=x(4, 6, C)),
        [(4, 6, 6)],
    ),
    'sam': (
        lambda: of_mmpretrain('backbones.vit_sam.Attention')(C, HEADS, use_rel_pos=True, input_size=(2, 3)),
        lambda: dict(x=x(2, 2, 3, C)),
        [(2, 6, 6)],
    ),
}
PRETRAIN = ('pretrain_vit', 'swin_v2', 'sam')
EVERY_HOST = [pytest.param(name, marks=needs_mmpretrain if name in PRETRAIN else ()) for name in HOSTS]


class Holder(nn.Module):
    """A layer around an attention."""

    def __init__(self, host: nn.Module) -> None:
        super().__init__()
        self.attn = host

    def forward(self, **given: Any) -> Any:
        return self.attn(**given)


def held(host: str, gate: str | None = None) -> tuple[nn.Module, dict[str, Any]]:
    """Return a host with every matrix of some size, with or without a gate, and inputs."""
    make, inputs, _ = HOSTS[host]
    torch.manual_seed(0)
    model = filled(Holder(make()), 0.3)
    if gate:
        mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
    torch.manual_seed(1)
    return model, inputs()


def flat(output: Any) -> Tensor:
    parts = output if isinstance(output, (tuple, list)) else [output]
    return torch.cat([part.flatten() for part in parts if part is not None])


def close(actual: Tensor, expected: Tensor) -> None:
    """Compare up to rounding, by the size of what is compared."""
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * max(float(expected.abs().max()), 1e-3))


@pytest.mark.parametrize('gate', [None, *GATES])
@pytest.mark.parametrize('host', EVERY_HOST)
def test_every_host_is_recorded_and_unchanged(host: str, gate: str | None) -> None:
    """Of gated attention the output is the same bits, of vanilla attention equal to rounding, in training, too."""
    if host in ('conditional_cross', 'swin_v2') and gate in ('dgsa', 'differential_v2'):
        pytest.skip('dgsa does not fit there')
    outputs, left = [], []
    for records in (False, True):
        model, given = held(host, gate)
        before = anatomy(model)
        torch.manual_seed(2)
        with record(model) if records else nullcontext({}) as recording:
            output = model(**given)
        outputs.append(flat(output[0] if host == 'torch' else output))  # whose weights torch drops out in training
        left.append(torch.rand(3))
        assert_same_anatomy(anatomy(model), before)
    assert torch.equal(*left)
    assert torch.equal(*outputs) if gate else close(outputs[1], outputs[0]) is None
    maps = [of['attention'].tensors for of in recording.values() if 'attention' in of]
    assert [len(once) for once in maps] == [1] * len(maps)
    assert [(m.shape[0], *m.shape[2:]) for (m,) in maps] == HOSTS[host][2]
    assert sum('gate' in of for of in recording.values()) == (len(maps) if gate else 0)


@pytest.mark.parametrize('host', EVERY_HOST)
def test_an_identity_gate_leaves_the_hosts_weights(host: str) -> None:
    """Read off the host and off the gate in it, two ways to one map; its gate is 0."""
    maps = []
    for gate in (None, 'plug'):
        model, given = held(host, gate)
        model.eval()
        with record(model, ['attention', 'gate']) as recording:
            model(**given)
        maps.append([of['attention'].tensors[0] for of in recording.values() if 'attention' in of])
    assert not any(of['gate'].tensors[0].any() for of in recording.values())
    for weights in maps[-1]:
        torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]))
    torch.testing.assert_close(maps[1], maps[0], rtol=1e-4, atol=1e-5)
    if host == 'mmcv':
        assert not maps[0][0][1, ..., 3:].any()  # padding


def test_an_attention_whose_forward_was_replaced_is_read() -> None:
    """By a profiler, for instance, whose function takes any arguments."""
    maps = []
    for replaced in (False, True):
        model, given = held('torch', 'plug')
        model.eval()
        for module in model.modules():
            if replaced and hasattr(module, 'gate'):
                forward = module.forward
                vars(module)['forward'] = lambda *args, forward=forward, **kwargs: forward(*args, **kwargs)
        with record(model, ['attention']) as recording:
            model(**given)
        maps.append([of['attention'].last for of in recording.values()])
    assert maps[0] and all(torch.equal(a, b) for a, b in zip(*maps, strict=True))


@pytest.mark.parametrize('gate', [None, 'plug'])
@pytest.mark.parametrize('host', EVERY_HOST)
def test_weights_times_values_are_what_a_host_projects(host: str, gate: str | None) -> None:
    """In any order, because a host may put windows together before it projects, and crop their padding."""
    model, given = held(host, gate)
    model.eval()
    projected: list[Tensor] = []
    for name, module in model.named_modules():
        if name.rpartition('.')[2] in ('out_proj', 'proj', 'out_v_proj', 'out_l_proj'):
            module.register_forward_pre_hook(lambda module, args: projected.append(args[0]))
    with record(model, ['attention', 'values']) as recording:
        model(**given)
    found = [of for of in recording.values() if 'attention' in of]
    assert found and len(projected) >= len(found)
    for of in found:
        heads = of['attention'].last @ of['values'].last
        merged = heads.transpose(1, 2).flatten(2)
        distances = [farthest(x, merged) for x in projected if x.numel() <= merged.numel()]
        assert min(distances) < 1e-4 * float(merged.abs().max()), distances


def farthest(some: Tensor, every: Tensor) -> float:
    """Return the largest distance of a number from the nearest among others; a host crops padded windows."""
    ordered = every.flatten().sort().values
    above = torch.searchsorted(ordered, some.flatten()).clamp(1, len(ordered) - 1)
    apart = torch.stack([(some.flatten() - ordered[place]).abs() for place in (above, above - 1)])
    return float(apart.amin(0).max())


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


AGENTS = [{}, *(dict(window=side) for side in (4, 5, 10)), dict(shifted=True, window=4), dict(class_tokens=1)]
AGENTS += [dict(bias=False), dict(agents='static'), dict(broadcast_scale=0.5)]


@pytest.mark.parametrize('options', AGENTS, ids=str)
def test_agents_are_read_in_every_form(options: dict[str, Any]) -> None:
    """The two softmaxes' product gives the layer's output; the agents' maps sum to 1."""
    shifted = options.get('shifted', False)
    given = {name: value for name, value in options.items() if name != 'shifted'}
    layer = gates.AgentAttention(C, HEADS, map_size=(8, 12), agent_num=4, dwc=False, **given)
    layer.gate.shifted = shifted
    model, extra = Holder(layer).eval(), layer.gate.class_tokens
    hw = (8, 8) if extra else (8, 12)
    given = dict(x=x(2, hw[0] * hw[1] + extra, C), hw_shape=hw)
    with record(model) as recording, torch.no_grad():
        expected = model(**given)
        value = layer.qkv(given['x']).chunk(3, -1)[2]
    readings = {name: found.tensors[0] for name, found in recording['attn'].items()}
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
    if not extra and options.get('window') not in (5, 10):  # the rest lies on the class token or on padding
        shares = maps.sum((-1, -2))
        torch.testing.assert_close(shares, torch.full_like(shares, max(len(attention) // 2, 1)))
    if shifted:  # the first window lies two rows down and two columns right
        assert maps[0, 0, 0, 2:6, 2:6].sum() == pytest.approx(1, abs=1e-5)


def layer() -> tuple[nn.Module, Tensor]:
    torch.manual_seed(0)
    return filled(nn.TransformerEncoderLayer(C, HEADS, C, 0.0, batch_first=True), 0.3).eval(), x(2, 5, C)


@pytest.mark.parametrize('host', [None, 'swin'])
def test_another_threads_pass_is_left_alone(host: str | None) -> None:
    """It computes the same bits as without a recording, in torch's layer by its fast path, and is not recorded."""
    model, given = layer() if host is None else held(host)
    found: list[Tensor] = []

    def run() -> None:
        with torch.inference_mode():
            found.append(model.eval()(given) if host is None else model.eval()(**given))

    run()
    with record(model) as recording:
        thread = Thread(target=run)
        thread.start()
        thread.join()
        assert not recording
        run()
    (notes,) = recording.values()
    assert [len(of.tensors) for of in notes.values()] == [1, 1]
    assert torch.equal(found[1], found[0]) and not torch.equal(found[2], found[0])
    close(found[2], found[0])


def test_two_threads_record_one_model() -> None:
    model, given = layer()
    kept = []

    def run() -> None:
        with record(model) as recording, torch.no_grad():
            model(given)
        kept.append(recording)

    with record(model) as outer, torch.no_grad():
        thread = Thread(target=run)
        thread.start()
        thread.join()
        run()
    assert 'forward' not in vars(model.self_attn)
    counts = [len(recording['self_attn']['attention'].tensors) for recording in (outer, *kept)]
    assert counts == [1, 1, 1]


@pytest.mark.parametrize('fails', [False, True])
def test_a_recording_leaves_nothing_behind(fails: bool) -> None:
    """Neither a class nor an attribute, also after an error in the block; tensors and children are the same."""
    model, given = layer()
    before = anatomy(model)
    kind = type(model.self_attn)
    with pytest.raises(KeyError) if fails else record(model), record(model):
        model(given)
        assert type(model.self_attn) is kind and list(model.self_attn._modules) == ['out_proj']
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


def test_attention_whose_gate_is_off_is_recorded_as_vanilla() -> None:
    vanilla, given = held('swin')
    gated, _ = held('swin', 'sdpa')
    maps = []
    for model in (vanilla.eval(), gated.eval()):
        with mmgate.gates_disabled(model), record(model) as recording:
            model(**given)
        assert set(recording['attn']) == {'attention', 'values'}
        maps.append(recording['attn']['attention'].last)
    torch.testing.assert_close(maps[1], maps[0])
    with ExitStack() as stack:
        with mmgate.gates_disabled(gated):
            stack.enter_context(record(gated))
        given.update(x=given['x'] + 1)
        on = gated(**given)  # the gate is on again
    assert torch.equal(on, gated(**given)) and not torch.equal(on, vanilla(**given))
    assert 'forward' not in vars(gated.attn) and len(maps) == 2
    with record(gated) as recording:
        gated(**given)
    assert 'gate' in recording['attn']


def test_recorded_weights_keep_their_graph_where_it_is_asked_for() -> None:
    for gate in (None, 'plug'):
        model, given = held('torch', gate)
        with record(model, 'attention', graph=True) as recording:
            model.eval()(**given)
        recording['attn']['attention'].last.square().sum().backward()
        assert model.attn.in_proj_weight.grad.any()


class Counted(gates.PLuGGate):
    """A gate that counts the calls of its methods."""

    calls: dict[str, int]

    def __getattribute__(self, name: str) -> Any:
        if name in ('attend', 'gate_vectors', 'attend_by_vectors', 'finish'):
            counted = object.__getattribute__(self, '__dict__').setdefault('calls', {})
            counted[name] = counted.get(name, 0) + 1
        return super().__getattribute__(name)


@pytest.mark.parametrize('need_weights', [False, True])
def test_no_method_of_a_gate_is_called_more_often_than_without_a_recording(need_weights: bool) -> None:
    model, given = held('torch')
    mmgate.swap_attention(model, dict(path='attn', type=Counted))
    counts = []
    for records in (False, True):
        model.attn.gate.calls = {}
        if records:
            with record(model):
                model(**given, need_weights=need_weights)
        else:
            model(**given, need_weights=need_weights)
        counts.append(model.attn.gate.calls)
    assert counts[0] == counts[1] == dict(attend=1, gate_vectors=1, attend_by_vectors=1, finish=1)


class Own(nn.Module):
    """A stranger's attention with a gate of mmgate's, without an adapter."""

    def __init__(self) -> None:
        super().__init__()
        self.proj = nn.Linear(C, 3 * C)
        self.gate: Any = gates.SDPAGate(Sizes(C, HEADS))
        self.gate.reset()

    def forward(self, tokens: Tensor) -> Tensor:
        note(self, 'mean', tokens.mean())
        heads = (self.gate.split_heads(part) for part in self.proj(tokens).chunk(3, -1))
        return self.gate.attend(*heads, (tokens, tokens, tokens), None)


def test_what_a_strangers_attention_notes_is_recorded() -> None:
    model = nn.Sequential(Own())
    with record(model) as recording:
        model(x(2, 5, C))
    assert set(recording['0']) == {'mean', 'gate', 'attention', 'values'}


def test_vanilla_deformable_attention_is_recorded_as_the_gated_one() -> None:
    given: dict[str, Any] = dict(query=x(5, 2, C), value=x(10, 2, C), reference_points=torch.rand(2, 5, 2, 2))
    given.update(spatial_shapes=torch.tensor([[2, 4], [1, 2]]), level_start_index=torch.tensor([0, 8]))
    model = filled(Holder(MultiScaleDeformableAttention(C, HEADS, 2, 3)), 0.3).eval()
    expected, gated = model(**given), copy.deepcopy(model)
    mmgate.swap_attention(gated, dict(path='attn', type='PLuGMultiScaleDeformableAttention'))
    found = []
    for one in (model, gated):
        with record(one) as recording:
            close(one(**given), expected)
        found.append(recording['attn'])
    assert set(found[1]) == {*found[0], 'gate'} and found[0]['locations'].last.shape == (2, 5, HEADS, 2, 3, 2)
    for name, vanilla in found[0].items():
        torch.testing.assert_close(found[1][name].last, vanilla.last)


def test_only_what_is_asked_for_runs_on_another_forward() -> None:
    """The statistics of gates leave vanilla attention as it is, bit by bit."""
    model, given = layer()
    with torch.inference_mode():
        expected = model(given)
        with record(model, 'gates'):
            assert torch.equal(model(given), expected)


def test_plain_attention_is_a_gate_without_parameters() -> None:
    gate = DenseGate(Sizes(C, HEADS))
    assert isinstance(gate, Gate) and not [*gate.parameters()]

"""Every gate in every host, and every linear attention, can be read, and what is read is what the layer uses."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from conftest import filled, half_on_cpu, needs_mmpretrain
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import WindowMSA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmseg.models.backbones.beit import BEiTAttention
from mmseg.models.backbones.mit import EfficientMultiheadAttention
from mmseg.models.backbones.twins import GlobalSubsampledAttention, LocallyGroupedSelfAttention
from torch import Tensor, nn

import mmgate
from mmgate import layers
from mmgate.analysis.probes.layers import effective_rank
from mmgate.analysis.probes.recording import readable, record
from mmgate.layers.linear.base import LinearGate
from mmgate.layers.parts.stripes import merge_stripes, split_stripes

C, HEADS = 16, 2
GATES: dict[str, dict[str, Any]] = {
    'plug': dict(type='PLuGMultiheadAttention'),
    'sdpa': dict(type='SDPAGatedMultiheadAttention'),
    'dgsa': dict(type='DifferentialGatedMultiheadAttention', residual='none'),
    'differential_v2': dict(type='DifferentialV2MultiheadAttention', init='identity'),
}
UNREAD = [('bidirectional', None), ('sam', None)]


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


@pytest.mark.parametrize('gate', [None, *GATES])
@pytest.mark.parametrize('host', EVERY_HOST)
def test_every_host_is_read_and_unchanged(host: str, gate: str | None) -> None:
    """What can be read is read, in the form that it has; output and random numbers stay the same bits."""
    if host in ('conditional_cross', 'swin_v2') and gate in ('dgsa', 'differential_v2'):
        pytest.skip('dgsa does not fit there')
    if (host, gate) in UNREAD:
        pytest.skip('nothing in it sees the weights')
    found, promised = [], {}
    for records in (False, True):
        model, given = held(host, gate)
        torch.manual_seed(2)
        if records:
            promised = readable(model)
            with record(model, promised) as recording:
                output = flat(model(**given))
        else:
            output = flat(model(**given))
        found.append((output, torch.rand(3)))
        assert not any(m._forward_hooks or m._forward_pre_hooks or 'attend' in vars(m) for m in model.modules())
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert {(n, p) for n, paths in promised.items() for p in paths} == {
        (n, p) for p, of in recording.items() for n in of
    }
    maps = [of['attention'].tensors[0] for of in recording.values() if 'attention' in of]
    assert [(m.shape[0], *m.shape[2:]) for m in maps] == HOSTS[host][2]
    assert len(promised.get('gate', [])) == (len(maps) if gate else 0)


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
    if (host, None) not in UNREAD:
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
    if (host, gate) in UNREAD:
        pytest.skip('nothing in it sees the weights')
    model, given = held(host, gate)
    model.eval()
    projected: list[Tensor] = []
    torchs = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    for name, module in model.named_modules():
        if name.rpartition('.')[2] in ('out_proj', 'proj', 'out_v_proj', 'out_l_proj'):
            module.register_forward_pre_hook(lambda module, args: projected.append(args[0]))
    for module in torchs:
        if gate is None:
            module.register_forward_hook(lambda module, args, output: projected.append(output[0]))
    with record(model, ['attention', 'values']) as recording:
        model(**given)
    found = [of for of in recording.values() if 'attention' in of]
    assert found and len(projected) >= len(found)
    for of in found:
        heads = of['attention'].last @ of['values'].last
        merged = heads.transpose(1, 2).flatten(2)
        if torchs and gate is None:
            merged = torchs[0].out_proj(merged)
        distances = [farthest(x, merged) for x in projected if x.numel() <= merged.numel()]
        assert min(distances) < 1e-4 * float(merged.abs().max()), distances


def farthest(some: Tensor, every: Tensor) -> float:
    """Return the largest distance of a number from the nearest among others; a host crops padded windows."""
    ordered = every.flatten().sort().values
    above = torch.searchsorted(ordered, some.flatten()).clamp(1, len(ordered) - 1)
    apart = torch.stack([(some.flatten() - ordered[place]).abs() for place in (above, above - 1)])
    return float(apart.amin(0).max())


WITH_POSITIONS = ('FocusedLinearAttention', 'PolaFormerAttention', 'SAGAAttention')
OF_LINEAR_GATES = [
    name for name, kind in vars(layers).items() if issubclass(getattr(kind, 'gate_type', nn.Module), LinearGate)
]
OF_PRE_TRAINING = dict(map_size=(2, 3))
LINEAR: dict[str, dict[str, Any]] = {
    name: OF_PRE_TRAINING if name in WITH_POSITIONS else {} for name in OF_LINEAR_GATES if name != 'HydraAttention'
}


def test_every_linear_attention_but_one_has_a_map_of_keys_and_values() -> None:
    made = {name: getattr(layers, name)(C, HEADS, **LINEAR.get(name, {})) for name in OF_LINEAR_GATES}
    found = {name for name, layer in made.items() if 'kv' in readable(layer)}
    assert found == set(LINEAR) and len(LINEAR) == 9  # Hydra's heads have one channel each


@pytest.mark.parametrize('class_token', [False, True], ids=['map', 'class token'])
@pytest.mark.parametrize('kind', LINEAR)
def test_the_map_of_keys_and_values(kind: str, class_token: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what the operator multiplies the queries by, divided by the number of tokens."""
    layer = filled(getattr(layers, kind)(C, HEADS, class_token=class_token, **LINEAR[kind]), 0.3)
    model, used = Holder(layer), list[Tensor]()
    given = dict(x=x(2, 16 + class_token, C), **({} if class_token else dict(hw_shape=(2, 8))))
    with record(model, ['kv', 'gate_out']) as recording, torch.no_grad():
        model(**given)
    kv = recording['attn']['kv'].tensors[0]

    def noted(k: Tensor, v: Tensor) -> Tensor:
        used.append((k.transpose(-1, -2) @ v) / k.shape[-2])
        return used[-1]

    for operators in ('linear_attention', 'gated_linear'):
        monkeypatch.setattr(import_module(f'mmgate.ops.{operators}'), 'key_value_map', noted)
    with torch.no_grad():
        model(**given)
        k, v = (layer.gate.split_heads(t) for t in layer.qkv(given['x']).chunk(3, -1)[1:])
    if kind == 'EfficientAttention':
        used = [k.softmax(-2).transpose(-1, -2) @ v]
    elif kind == 'PolaFormerAttention':  # the queries' two halves change places for the second half of the values
        used = [torch.cat([used[0], used[1].roll(C // HEADS, -2)], -1)]
    torch.testing.assert_close(kv, used[0])
    assert (effective_rank(kv) <= C // HEADS + 1e-6).all()
    assert ('gate_out' in recording['attn']) == (kind in ('PolaFormerAttention', 'RALAAttention', 'SAGAAttention'))


@half_on_cpu
@pytest.mark.parametrize('kind', ['FocusedLinearAttention', 'PolaFormerAttention'])
def test_maps_of_powers_are_not_narrowed(kind: str) -> None:
    model = Holder(getattr(layers, kind)(C, HEADS, map_size=(4, 4))).half()
    with record(model, ['kv']) as recording, torch.no_grad():
        model(x=x(2, 16, C).half(), hw_shape=(4, 4))
    kv = recording['attn']['kv'].tensors[0]
    assert kv.dtype is torch.float32 and kv.isfinite().all() and kv.ne(0).any()


AGENTS = [{}, *(dict(window=side) for side in (4, 5, 10)), dict(shifted=True, window=4), dict(class_token=True)]
AGENTS += [dict(bias=False), dict(agents='static'), dict(broadcast_scale=0.5)]


@pytest.mark.parametrize('options', AGENTS, ids=str)
def test_agents_are_read_in_every_form(options: dict[str, Any]) -> None:
    """The two softmaxes' product gives the layer's output; the agents' maps sum to 1."""
    shifted = options.get('shifted', False)
    given = {name: value for name, value in options.items() if name != 'shifted'}
    layer = layers.AgentAttention(C, HEADS, map_size=(8, 12), agent_num=4, dwc=False, **given)
    layer.gate.shifted = shifted
    model, extra = Holder(layer).eval(), layer.gate.class_tokens
    hw = (8, 8) if extra else (8, 12)
    given = dict(x=x(2, hw[0] * hw[1] + extra, C), **({} if extra else dict(hw_shape=hw)))
    with record(model, ['attention', 'agents', 'geometry']) as recording, torch.no_grad():
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

"""The nine linear attentions: their formulas, gradients, cost, numbers, options, notes, and backbones with them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import half_on_cpu
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mmgate
from mmgate.gates import SoftmaxAttention
from projects import linear_attention as project
from projects.linear_attention.ops import rotate

C, HEADS = 16, 2
WIDTH = C // HEADS
MAP = dict(map_size=(4, 4))
LAYERS: dict[str, tuple[str, dict[str, Any]]] = {
    'angular': ('LinearAngularAttention', {}),
    'angular_map': ('LinearAngularAttention', dict(convolution='map')),
    'efficient': ('EfficientAttention', {}),
    'enhanced': ('EnhancedLinearAttention', {}),
    'enhanced_plain': ('EnhancedLinearAttention', dict(dwc=0)),
    'focused': ('FocusedLinearAttention', MAP),
    'focused_squares': ('FocusedLinearAttention', dict(MAP, power=2.0)),
    'hydra': ('HydraAttention', {}),
    'inline': ('InLineAttention', {}),
    'inline_without_local': ('InLineAttention', dict(local=False)),
    'mlla': ('MLLAAttention', {}),
    'polaformer': ('PolaFormerAttention', MAP),
    'rala': ('RALAAttention', {}),
}
every_layer = pytest.mark.parametrize('name', LAYERS)


def build(name: str, **more: Any) -> Any:
    kind, options = LAYERS[name]
    layer = getattr(project, kind)(C, HEADS, **options, **more)
    for key, parameter in layer.gate.named_parameters():
        if key in ('position_encoding', 'power', 'focus_scale'):
            nn.init.normal_(parameter)
    return layer


def heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)


def weighted(weights: Tensor, v: Tensor) -> Tensor:
    return weights / (weights.sum(-1, keepdim=True) + 1e-6 * v.shape[-2]) @ v


def mapped(k: Tensor, v: Tensor) -> Tensor:
    return k.mT @ v / v.shape[-2]


def turned(x: Tensor, hw_shape: tuple[int, int], powers: Tensor) -> Tensor:
    """Pairs of channels as complex numbers, turned by row, then by column, each by ``10000 ** -power`` a step."""
    rows, columns = (axis.flatten() for axis in torch.meshgrid(*map(torch.arange, hw_shape), indexing='ij'))
    speeds = 10_000.0 ** -powers.double()
    angles = torch.cat([rows[:, None] * speeds, columns[:, None] * speeds], -1)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


# By attention, its output with N x N weights, and the map of keys and values K^T V / N that it notes.
Formula = Callable[[Any, Tensor, Tensor, Tensor, tuple[int, int]], tuple[Tensor, Any]]


def angular(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    q, k, v = F.normalize(heads(q), dim=-1), F.normalize(heads(k), dim=-1), heads(v)
    identity = torch.eye(v.shape[-2], dtype=v.dtype)
    return F.normalize((identity / 2 + q @ k.mT / math.pi) @ v, dim=-1), mapped(k, v)


def efficient(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    q, k, v = heads(q).softmax(-1), heads(k).softmax(-2), heads(v)
    return q @ k.mT @ v, k.mT @ v


def enhanced(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    q, k, v = heads(q.relu()), heads(k.relu()), heads(v)
    return weighted(q @ k.mT, v), mapped(k, v)


def focused(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    def features(x: Tensor) -> Tensor:
        x = (x.relu() + 1e-6) / F.softplus(gate.focus_scale)
        raised = x**gate.power
        return heads(raised * x.norm(dim=-1, keepdim=True) / raised.norm(dim=-1, keepdim=True))

    return weighted(features(q) @ features(k).mT, heads(v)), mapped(features(k), heads(v))


def hydra(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    products = torch.einsum('bnc,bmc->bcnm', F.normalize(q, dim=-1), F.normalize(k, dim=-1))
    return heads(torch.einsum('bcnm,bmc->bnc', products, v)), None  # its heads have one channel each


def inline(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    q, k, v = heads(q), heads(k), heads(v)
    weights = q @ k.mT / (WIDTH**0.5 * v.shape[-2])
    return (weights - weights.mean(-1, keepdim=True) + 1 / v.shape[-2]) @ v, mapped(k - k.mean(-2, keepdim=True), v)


def mlla(gate: Any, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, Any]:
    """Turned over all channels, before the heads part; the denominator is not."""
    q, k = F.elu(q) + 1, F.elu(k) + 1
    turned_q, turned_k = (heads(turned(t, hw_shape, torch.arange(C // 4) / (C // 4))) for t in (q, k))
    total = (heads(q) @ heads(k).mT).sum(-1, keepdim=True)
    return turned_q @ turned_k.mT / (total + 1e-6 * v.shape[1]) @ heads(v), mapped(turned_k, heads(v))


def rala(gate: Any, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> tuple[Tensor, Any]:
    """Turned in every head, the last power being 1."""
    q, k = heads(F.elu(q) + 1), heads(F.elu(k) + 1)
    k = k * (q.mean(2, keepdim=True) @ k.mT / WIDTH**0.5).softmax(-1).mT * k.shape[2]
    turned_q, turned_k = (turned(t, hw_shape, torch.linspace(0, 1, WIDTH // 4)) for t in (q, k))
    total = (q @ k.mT).sum(-1, keepdim=True)
    return turned_q @ turned_k.mT / (total + 1e-6 * v.shape[1]) @ heads(v), mapped(turned_k, heads(v))


def polaformer(gate: Any, q: Tensor, k: Tensor, v: Tensor, _: Any) -> tuple[Tensor, Any]:
    power = 1 + 4 * gate.power.sigmoid()
    q, k = (heads(t / F.softplus(gate.focus_scale)) for t in (q, k))
    (q_plus, q_minus), (k_plus, k_minus) = ([t.relu() ** power, (-t).relu() ** power] for t in (q, k))
    v1, v2 = heads(v).chunk(2, -1)
    same = weighted(q_plus @ k_plus.mT + q_minus @ k_minus.mT, v1)
    opposite = weighted(q_plus @ k_minus.mT + q_minus @ k_plus.mT, v2)
    maps = mapped(torch.cat([k_plus, k_minus], -1), v1), mapped(torch.cat([k_minus, k_plus], -1), v2)
    return torch.cat([same, opposite], -1), torch.cat(maps, -1)


FORMULAS: dict[str, Formula] = {
    function.__name__: function
    for function in (angular, efficient, enhanced, focused, hydra, inline, mlla, polaformer, rala)
}


def convolved(name: str, gate: Any, x: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
    """What is added to the heads, ``(B, N, C)``: a convolution over the map, or along the tokens."""
    images = v.transpose(1, 2).unflatten(-1, hw_shape)
    local = torch.zeros_like(images)
    if name == 'inline':
        weights = gate.local(x.mean(1)[..., None]).view(len(x), C, 9, 1)
        patches = F.unfold(images, 3, padding=1).view(len(x), C, 9, -1)
        local = (weights * patches).sum(2).view_as(images)
    elif name == 'angular':  # a kernel of 9 over the tokens for each head
        lines = v.unflatten(-1, (HEADS, WIDTH)).permute(0, 3, 2, 1).flatten(0, 1)  # (B d, H, N)
        lines = F.conv1d(lines, gate.dwc.weight[..., 0], padding=4, groups=HEADS)
        return lines.unflatten(0, (len(x), WIDTH)).permute(0, 3, 2, 1).flatten(2)
    elif gate.dwc is not None:
        shared = C // len(gate.dwc.weight)
        weight, bias = gate.dwc.weight.repeat(shared, 1, 1, 1), gate.dwc.bias.repeat(shared)
        local = F.conv2d(images, weight, bias, padding='same', groups=C)
    return local.flatten(2).transpose(1, 2)


@every_layer
@pytest.mark.parametrize('hw_shape', [(4, 4), (3, 5)], ids=str)
def test_attention_is_its_formula_and_notes_its_map(name: str, hw_shape: tuple[int, int]) -> None:
    """With N x N weights; the position encoding is resized, and an empty batch passes."""
    layer = build(name).double()
    gate = layer.gate
    x = torch.randn(2, hw_shape[0] * hw_shape[1], C, dtype=torch.float64)
    q, k, v = layer.qkv(x).chunk(3, -1)
    if gate.position_encoding is not None:
        grid = gate.position_encoding.transpose(1, 2).unflatten(-1, (4, 4))
        k = k + F.interpolate(grid, size=hw_shape, mode='bilinear').flatten(2).transpose(1, 2)
    out, kv = FORMULAS[name.partition('_')[0]](gate, q, k, v, hw_shape)
    out = out.transpose(1, 2).flatten(2) + convolved(name, gate, x, v, hw_shape)
    if hasattr(gate, 'gate_out'):
        out = out * gate.gate_out(x)
    with mmgate.record(layer) as recording:
        torch.testing.assert_close(layer(x, hw_shape), layer.proj(out), rtol=1e-9, atol=1e-9)
    noted = recording[''] if recording else {}
    assert ('gate_out' in noted) == hasattr(gate, 'gate_out') and ('kv' in noted) == (kv is not None)
    if kv is not None:
        torch.testing.assert_close(noted['kv'].tensors[0].double(), kv, rtol=1e-6, atol=1e-6)
    assert layer(x[:0], hw_shape).shape == (0, *x.shape[1:])


@every_layer
def test_attention_passes_gradcheck_and_a_class_token_attends(name: str) -> None:
    """The token is neither convolved over the map nor placed: where the map's tokens are changes nothing for it."""
    layer = build(name, class_tokens=1).double()
    x = torch.randn(1, 1 + 6, C, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, (2, 3)), (x,), fast_mode=True)
    layer(x, (2, 3)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())
    with pytest.raises(ValueError, match='6 tokens do not make a map of 2 x 3 and 1 class token'):
        layer(x[:, 1:], (2, 3))
    if name in ('mlla', 'rala'):
        turned = rotate(x, (2, 3), 1)
        assert torch.equal(turned[:, :1], x[:, :1]) and torch.equal(turned[:, 1:], rotate(x[:, 1:], (2, 3)))
    elif layer.gate.position_encoding is None:
        flipped = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
        same = torch.allclose(layer(flipped, (2, 3))[:, 0], layer(x, (2, 3))[:, 0])
        assert same == (name != 'angular')  # convolved along the tokens, of which it is the first


@every_layer
def test_attention_costs_in_proportion_to_the_tokens(name: str) -> None:
    layer = build(name)
    costs = []
    for side in (16, 32, 64):
        with FlopCounterMode(display=False) as counter:
            layer(torch.zeros(1, side * side, C), (side, side))
        costs.append(counter.get_total_flops())
    assert costs[2] - costs[1] == 4 * (costs[1] - costs[0]) > 0


@every_layer
def test_a_rule_puts_it_into_a_model_and_it_starts_alone(name: str) -> None:
    """All of its parameters are drawn, none of the host's."""
    kind, options = LAYERS[name]
    model = nn.ModuleDict(dict(attn=SoftmaxAttention(C, HEADS)))
    mmgate.restore_attention(model)
    mmgate.swap_attention(model, dict(path='attn', type=kind, **options))
    assert type(model['attn'].gate) is type(build(name).gate)
    layer = mmgate.MODELS.get(f'mmgate.{kind}')(C, HEADS, **options)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)
    layer.init_weights()
    assert not [key for key, parameter in layer.gate.named_parameters() if parameter.eq(7).any()]
    assert all(parameter.eq(7).all() for part in (layer.qkv, layer.proj) for parameter in part.parameters())


@torch.no_grad()
@half_on_cpu
@every_layer
def test_many_tokens_stay_in_half_precision(name: str) -> None:
    """Sums over 20,000 tokens, of powers and of large values."""
    gate = build(name).gate
    x, q, k, v = (torch.rand(4, 1, 20_000, C) * (1 if name == 'rala' else 20)).unbind()
    exact = copy.deepcopy(gate).double().attend(x.double(), q.double(), k.double(), v.double(), (100, 200))
    half = gate.half().attend(x.half(), q.half(), k.half(), v.half(), (100, 200))
    assert half.dtype is torch.float16 and half.isfinite().all()
    assert (half - exact).norm() / exact.norm() < 0.05


PRECISIONS = ['float32', 'bfloat16', pytest.param('float16', marks=half_on_cpu), 'autocast']


@pytest.mark.parametrize('precision', PRECISIONS)
@every_layer
def test_numbers_and_gradients_are_finite(name: str, precision: str) -> None:
    """Of large products and of tokens at zero, by whose lengths and sums they divide; those of an image beside stay."""
    layer = build(name)
    nn.init.zeros_(layer.qkv.bias)
    dtype = torch.float32 if precision == 'autocast' else getattr(torch, precision)
    x = torch.randn(3, 16, C)
    x[1, 5:] = 0
    exact = layer(x, (4, 4))
    x[0], x[2] = 0, 30 * x[2]
    x = x.to(dtype).requires_grad_()
    with torch.autocast('cpu', torch.bfloat16, enabled=precision == 'autocast'), mmgate.record(layer) as recording:
        out = layer.to(dtype)(x, (4, 4))
    if name in ('focused', 'polaformer') and precision == 'float16':  # whose range powers leave
        kv = recording['']['kv'].last
        assert kv.dtype is torch.float32 and kv.isfinite().all() and kv.ne(0).any()
    out.float().mean().backward()
    assert all(value.isfinite().all() for value in (out, x.grad, *(p.grad for p in layer.parameters())))
    tolerance = dict(rtol=1e-4, atol=1e-5) if precision == 'float32' else dict(rtol=0.1, atol=0.1)
    torch.testing.assert_close(out[1].float(), exact[1], **tolerance)


@pytest.mark.parametrize(
    'name, options, message',
    [
        ('hydra', dict(attn_drop=0.1), 'HydraGate has no attention weights to drop.*attn_drop_rate'),
        ('polaformer', dict(num_heads=16), 'width 1 must be a multiple of 2'),
        ('polaformer', dict(alpha=-1.0), 'alpha=-1.0 must be a number of at least 0'),
        ('focused', dict(power=0.0), 'power=0.0 must be a number above 0'),
        ('mlla', dict(embed_dims=14, num_heads=7), 'embed_dims=14 must be a multiple of 4'),
        ('rala', dict(num_heads=8), 'width 2 must be a multiple of 4'),
        ('angular', dict(convolution='rows'), "convolution='rows' is unknown"),
    ],
)
def test_options_that_do_not_fit_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    kind, usual = LAYERS[name]
    with pytest.raises(mmgate.ConfigError, match=message):
        getattr(project, kind)(**{**dict(embed_dims=C, num_heads=HEADS), **usual, **options})


needs_mmdet = pytest.mark.skipif(
    not find_spec('mmdet'), reason='the backbones are built on mmdet, which is not installed'
)
KINDS = [name for name in project.__all__ if name.endswith('Attention')]
SMALL: dict[str, dict[str, Any]] = {
    'LinearPVT': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearPVTv2': dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0),
    'LinearSwin': dict(depths=(2, 2, 2, 2), drop_path_rate=0.0),
}
# Each attention in each backbone once, and each backbone with each attention's position encoding.
PAIRS = [(host, kind) for number, kind in enumerate(KINDS) for host in (list(SMALL)[number % 3], 'LinearSwin')]


def backbone(host: str, attention: Any, **options: Any) -> Any:
    torch.manual_seed(0)
    model = mmgate.MODELS.build(dict(type=f'mmgate.{host}', attention=attention, **{**SMALL[host], **options}))
    model.init_weights()
    return model.eval()


@torch.no_grad()
@needs_mmdet
@pytest.mark.parametrize('host, kind', sorted({*PAIRS}), ids=str)
def test_a_backbone_takes_it_for_images_of_any_size_and_starts_as_vanilla(host: str, kind: str) -> None:
    model, vanilla = backbone(host, dict(type=kind)), backbone(host, None)
    gates = [module for module in model.modules() if isinstance(module, mmgate.MapGate)]
    assert [type(gate) for gate in gates] == [getattr(project, kind).gate_type] * 4
    for size in ((32, 32), (33, 70)):
        maps = model(torch.randn(1, 3, *size))
        assert len(maps) == 4 and all(one.isfinite().all() for one in maps)
    mmgate.restore_attention(model)
    assert all(torch.equal(value, vanilla.state_dict()[key]) for key, value in model.state_dict().items())


@needs_mmdet
def test_each_stage_may_have_another() -> None:
    kinds = ['HydraAttention', 'EfficientAttention', 'AgentAttention', 'SAGAAttention']
    gates = [
        m for m in backbone('LinearPVT', [dict(type=kind) for kind in kinds]).modules() if isinstance(m, mmgate.MapGate)
    ]
    assert [type(gate) for gate in gates] == [mmgate.MODELS.get(kind).gate_type for kind in kinds]
    with pytest.raises(mmgate.ConfigError, match=r'Did you mean\n  HydraAttention'):
        backbone('LinearPVT', dict(type='HydroAttention'))

"""SAGA and the linear attentions as layers: their formulas, gradients, cost, options and what a host may do to them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.families import HEADS, MAP, C
from torch import Tensor, nn

from mmgate.analysis.complexity import count_model
from mmgate.gates import (
    EfficientAttention,
    EnhancedLinearAttention,
    FocusedLinearAttention,
    HydraAttention,
    InLineAttention,
    LinearAngularAttention,
    PolaFormerAttention,
    RALAAttention,
    SAGAAttention,
)
from mmgate.gates.linear.base import LinearGate
from mmgate.ops import linear_attention as ops
from mmgate.ops.gated_linear import gated_linear_attention_reference
from mmgate.registry import MODELS

LINEAR = {name: (kind, options) for name, (kind, options) in MAP.items() if issubclass(kind.gate_type, LinearGate)}
LAYERS: dict[str, tuple[Any, dict[str, Any]]] = {
    **LINEAR,
    'focused_squares': (FocusedLinearAttention, dict(map_size=(4, 4), power=2.0)),
    'inline_without_local': (InLineAttention, dict(local=False)),
    **{
        f'saga_without_{part}': (SAGAAttention, {'map_size': (4, 4), part: False})
        for part in ('gate', 'dwc', 'output_augmentation', 'position_encoding', 'scale_by_tokens')
    },
}
every_layer = pytest.mark.parametrize('name', LAYERS)


def build(name: str, **more: Any) -> Any:
    kind, options = LAYERS[name]
    layer = kind(C, HEADS, **options, **more).double()
    for key, parameter in layer.gate.named_parameters():
        if key in ('position_encoding', 'power', 'focus_scale'):
            nn.init.normal_(parameter)
    return layer


def turn(x: Tensor, hw_shape: tuple[int, int], powers: Tensor) -> Tensor:
    """Pairs of channels as complex numbers, turned by row, then by column, each by ``10000 ** -power`` a step."""
    rows, columns = (axis.flatten() for axis in torch.meshgrid(*map(torch.arange, hw_shape), indexing='ij'))
    speeds = 10_000.0 ** -powers.double()
    angles = torch.cat([rows[:, None] * speeds, columns[:, None] * speeds], -1)
    pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2).contiguous())
    return torch.view_as_real(pairs * torch.polar(torch.ones_like(angles), angles)).flatten(-2)


def quadratic(layer: Any, x: Tensor, hw_shape: tuple[int, int], power: float) -> Tensor:
    """The layer's formula with its N x N weights, written out once more."""
    gate = layer.gate
    q, k, v = layer.qkv(x).chunk(3, -1)
    if gate.position_encoding is not None:
        grid = gate.position_encoding.reshape(1, *gate.map_size, C).permute(0, 3, 1, 2)
        k = k + F.interpolate(grid, size=hw_shape, mode='bilinear').flatten(2).transpose(1, 2)

    def heads(t: Tensor) -> Tensor:
        return t.reshape(len(x), -1, HEADS, C // HEADS).transpose(1, 2)

    def focused(t: Tensor) -> Tensor:
        t = (t.relu() + 1e-6) / F.softplus(gate.focus_scale)
        return t**power * t.norm(dim=-1, keepdim=True) / (t**power).norm(dim=-1, keepdim=True)

    images = v.transpose(1, 2).reshape(len(x), C, *hw_shape)
    local = torch.zeros_like(images)
    if isinstance(layer.gate, HydraAttention.gate_type):
        out = ops.hydra_attention_reference(q, k, v)
    elif isinstance(layer.gate, EfficientAttention.gate_type):
        out = ops.efficient_attention_reference(heads(q), heads(k), heads(v))
    elif isinstance(layer.gate, LinearAngularAttention.gate_type):
        out = ops.linear_angular_attention_reference(heads(q), heads(k), heads(v))
    elif isinstance(layer.gate, EnhancedLinearAttention.gate_type):
        out = ops.kernel_attention_reference(heads(q.relu()), heads(k.relu()), heads(v))
    elif isinstance(layer.gate, FocusedLinearAttention.gate_type):
        out = ops.kernel_attention_reference(heads(focused(q)), heads(focused(k)), heads(v))
    elif isinstance(layer.gate, PolaFormerAttention.gate_type):
        scale, power = F.softplus(gate.focus_scale), 1 + 4 * gate.power.sigmoid()
        out = ops.polarity_attention_reference(heads(q / scale), heads(k / scale), heads(v), power)
    elif isinstance(layer.gate, SAGAAttention.gate_type):
        gates = (part and heads(part(x).sigmoid()) for part in (gate.gate_k, gate.gate_v))
        out = gated_linear_attention_reference(heads(q), heads(k), heads(v), *gates)
        out = out if gate.scale_by_tokens else out * v.shape[1] * (C // HEADS) ** 0.5
    elif isinstance(layer.gate, InLineAttention.gate_type):
        out = ops.inline_attention_reference(heads(q), heads(k), heads(v))
        if gate.local is not None:
            weights = gate.local(x.mean(1)[..., None]).view(len(x), C, 9, 1)
            patches = F.unfold(images, 3, padding=1).view(len(x), C, 9, -1)
            local = (weights * patches).sum(2).view_as(images)
    else:
        q, k = F.elu(q) + 1, F.elu(k) + 1
        if isinstance(layer.gate, RALAAttention.gate_type):  # in every head, the last power being 1
            q, k = heads(q), heads(k)
            logits = q.mean(2, keepdim=True) @ k.mT / math.sqrt(C // HEADS)
            k = k * logits.softmax(-1).mT * k.shape[2]
            turned = [turn(t, hw_shape, torch.linspace(0, 1, C // HEADS // 4)) for t in (q, k)]
        else:  # over all channels, before the heads part
            turned = [heads(turn(t, hw_shape, torch.arange(C // 4) / (C // 4))) for t in (q, k)]
            q, k = heads(q), heads(k)
        out = ops.kernel_attention_reference(*turned, heads(v), q, k)
    if isinstance(layer.gate, LinearAngularAttention.gate_type) and gate.along_tokens:
        rows = v.reshape(len(x), -1, HEADS, C // HEADS)  # a kernel of 9 over the tokens for each head
        local = torch.zeros_like(rows)
        for head in range(HEADS):
            kernel = gate.dwc.weight[head].view(1, 1, 9)
            lines = rows[:, :, head].transpose(1, 2).reshape(-1, 1, rows.shape[1])
            local[:, :, head] = F.conv1d(lines, kernel, padding=4).view(len(x), C // HEADS, -1).transpose(1, 2)
        local = local.flatten(2).transpose(1, 2).view_as(images)
    elif gate.dwc is not None:
        weight = gate.dwc.weight.repeat(C // len(gate.dwc.weight), 1, 1, 1)
        bias = gate.dwc.bias.repeat(C // len(gate.dwc.bias))
        local = F.conv2d(images, weight, bias, padding=gate.dwc.kernel_size[0] // 2, groups=C)
    out = out if out.dim() == 3 else out.transpose(1, 2).flatten(2)
    out = out + local.flatten(2).transpose(1, 2)
    if getattr(gate, 'gate_out', None) is not None:
        out = out * gate.gate_out(x)
    return layer.proj(out)


@every_layer
@pytest.mark.parametrize('hw_shape', [(4, 4), (3, 5)], ids=str)
def test_linear_attention_is_its_quadratic_form(name: str, hw_shape: tuple[int, int]) -> None:
    layer = build(name)
    x = torch.randn(2, hw_shape[0] * hw_shape[1], C, dtype=torch.float64)
    expected = quadratic(layer, x, hw_shape, power=LAYERS[name][1].get('power', 3))
    torch.testing.assert_close(layer(x, hw_shape), expected, rtol=1e-9, atol=1e-9)
    assert layer(x[:0], hw_shape).shape == (0, *x.shape[1:])


@every_layer
def test_linear_attention_passes_gradcheck(name: str) -> None:
    layer = build(name)
    x = torch.randn(1, 6, C, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: layer(x, (2, 3)), (x,))
    layer(x, (2, 3)).sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in layer.parameters())


@every_layer
def test_linear_attention_costs_in_proportion_to_the_tokens(name: str) -> None:
    """Four times the tokens, four times the MACs; what is made of the mean token does not count."""
    layer = build(name)

    def macs(side: int) -> int:
        return count_model(layer, torch.zeros(1, side * side, C, dtype=torch.float64), (side, side)).macs

    once = macs(16) * 4 - macs(32)  # three times what does not depend on the tokens
    assert macs(64) - macs(32) == 4 * (macs(32) - macs(16))
    assert once == (3 * (C * C // HEADS * 10) if name == 'inline' else 0)


@every_layer
def test_registered_autocast_and_starts(name: str) -> None:
    kind, options = LAYERS[name]
    layer: Any = MODELS.build(dict(type=f'mmgate.{kind.__name__}', embed_dims=C, num_heads=HEADS, **options))
    x = torch.randn(2, 20, C)
    exact = layer(x, (4, 5))
    with torch.autocast('cpu', torch.bfloat16):
        torch.testing.assert_close(layer(x, (4, 5)).float(), exact, rtol=0.1, atol=0.1)
    for parameter in layer.parameters():
        nn.init.constant_(parameter, 7.0)
    layer.init_weights()
    assert not [key for key, parameter in layer.gate.named_parameters() if parameter.eq(7).any()]
    assert all(parameter.eq(7).all() for part in (layer.qkv, layer.proj) for parameter in part.parameters())


@pytest.mark.parametrize(
    'name, options, message',
    [
        ('hydra', dict(attn_drop=0.1), 'HydraGate has no attention weights to drop.*attn_drop_rate'),
        ('hydra', dict(dwc=4), 'dwc=4 must be odd: the odd side'),
        ('hydra', dict(dwc=-1), 'dwc=-1 must be an integer, 0 or more: the odd side'),
        ('polaformer', dict(num_heads=16), 'width 1 must be a multiple of 2'),
        ('mlla', dict(embed_dims=14, num_heads=7), 'embed_dims=14 must be a multiple of 4'),
        ('rala', dict(num_heads=8), 'width 2 must be a multiple of 4'),
        ('angular', dict(convolution='rows'), "convolution='rows' is unknown"),
        ('saga', dict(scale_by_tokens='N'), "scale_by_tokens='N' is unknown; choose one of True, False"),
        ('saga', dict(scale_by_tokens=False, qk_scale=0.9), 'scales nothing, but qk_scale=0.9'),
    ],
)
def test_linear_attention_refuses_what_does_not_fit(name: str, options: dict[str, Any], message: str) -> None:
    kind, usual = LAYERS[name]
    with pytest.raises(ValueError, match=message):
        kind(**{**dict(embed_dims=C, num_heads=HEADS), **usual, **options})


@every_layer
def test_class_token_attends_and_is_neither_convolved_nor_placed(name: str) -> None:
    """A map's tokens in another place change what they are; the class token sees a set."""
    layer = build(name, class_tokens=1)
    layer.load_state_dict(build(name).state_dict())
    x = torch.randn(1, 1 + 16, C, dtype=torch.float64)
    assert layer(x, (4, 4)).shape == x.shape
    with pytest.raises(ValueError, match='16 tokens do not make a map of 4 x 4 and 1 class token'):
        layer(x[:, 1:], (4, 4))
    if layer.gate.position_encoding is None and name not in ('angular', 'mlla', 'rala'):
        flipped = torch.cat([x[:, :1], x[:, 1:].flip(1)], 1)
        torch.testing.assert_close(layer(flipped, (4, 4))[:, 0], layer(x, (4, 4))[:, 0])
    assert torch.autograd.gradcheck(lambda x: layer(x, (4, 4)), (x.requires_grad_(),), fast_mode=True)

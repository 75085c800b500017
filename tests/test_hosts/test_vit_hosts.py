"""PLuG in TinyViT, XCiT and T2T-ViT of mmpretrain, and in Visformer, GCViT and PVTv2 of timm."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate._environment import available

if not available('mmpretrain') or not available('timm'):  # an import may fail in other ways than by absence
    pytest.skip('needs mmpretrain and timm: the extra "pretrain"', allow_module_level=True)
from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer
from mmpretrain.models.backbones.xcit import XCA
from mmpretrain.models.utils.attention import LeAttention, MultiheadAttention, WindowMSAV2
from timm.models.gcvit import WindowAttentionGlobal
from timm.models.pvt_v2 import Attention as PVTAttention
from timm.models.visformer import Attention as VisformerAttention

from mmgate import swap_attention

C, HEADS = 32, 4


def t2t_layer() -> nn.Module:
    """With the scale of T2T-ViT's paper; mmpretrain's multiplies logits by sqrt(d) in the place of dividing them."""
    layer = T2TTransformerLayer(C, HEADS, 64)
    layer.attn.scaled_dot_product_attention = F.scaled_dot_product_attention
    return layer


PLUG = dict(type='PLuGMultiheadAttention', path='**')
TOKENS = (torch.Size([2, 49, C]),)
# name: the host, and the sizes of what it is called with
HOSTS: dict[str, tuple[Callable[[], nn.Module], tuple[Any, ...]]] = {
    'tinyvit': (lambda: LeAttention(C, C // HEADS, HEADS, attn_ratio=1, resolution=(7, 7)), TOKENS),
    'xcit': (lambda: XCA(C, HEADS, qkv_bias=True), TOKENS),
    't2t': (lambda: t2t_layer(), TOKENS),
    'vit_without_biases': (lambda: MultiheadAttention(C, HEADS, qkv_bias=False, proj_bias=False), TOKENS),
    'visformer': (lambda: VisformerAttention(C, HEADS), (torch.Size([2, C, 5, 7]),)),
    'visformer_narrow': (lambda: VisformerAttention(C, HEADS, head_dim_ratio=0.5), (torch.Size([2, C, 5, 7]),)),
    'gcvit_local': (lambda: WindowAttentionGlobal(C, HEADS, (7, 7), use_global=False), (torch.Size([4, 49, C]),)),
    'gcvit_global': (
        lambda: WindowAttentionGlobal(C, HEADS, (7, 7), use_global=True),
        (torch.Size([4, 49, C]), torch.Size([2, 7, 7, C])),
    ),
    'pvt': (lambda: PVTAttention(C, HEADS), (torch.Size([2, 48, C]), [6, 8])),
    'pvt_reduced': (lambda: PVTAttention(C, HEADS, sr_ratio=2), (torch.Size([2, 48, C]), [6, 8])),
    'pvt_pooled': (lambda: PVTAttention(C, HEADS, linear_attn=True), (torch.Size([2, 48, C]), [6, 8])),
}


def vanilla(name: str) -> nn.Module:
    model = nn.ModuleDict(dict(attn=HOSTS[name][0]()))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    model.eval()  # LeAttention returns nothing
    return model


def gated(model: nn.Module, **options: Any) -> nn.Module:
    swapped = copy.deepcopy(model)
    assert swap_attention(swapped, {**PLUG, **options})
    missing = swapped.load_state_dict(model.state_dict(), strict=False)
    assert not missing.unexpected_keys and all('gate_' in key or 'gml' in key for key in missing.missing_keys)
    return swapped


def call(model: nn.Module, name: str) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(x, generator=generator) if isinstance(x, torch.Size) else x for x in HOSTS[name][1]]
    return model['attn'](*inputs)


@pytest.mark.parametrize('mode', ['eval', 'train'])
@pytest.mark.parametrize('name', HOSTS)
def test_starts_as_the_vanilla_attention(name: str, mode: str) -> None:
    model = vanilla(name)
    swapped = gated(model)
    for module in (model, swapped):
        module.train(mode == 'train')
    with torch.no_grad():
        torch.testing.assert_close(call(swapped, name), call(model, name), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('name', HOSTS)
def test_everything_is_trained(name: str) -> None:
    swapped = gated(vanilla(name), init='paper', heads='per_head').train()
    call(swapped, name).square().sum().backward()
    without = [key for key, p in swapped.named_parameters() if p.grad is None or not p.grad.abs().sum()]
    assert not without


def test_cross_covariance_gates_pairs_of_channels() -> None:
    """The gate is formed as the host forms its logits."""
    swapped = gated(vanilla('xcit'), init='paper')
    attn, x = swapped['attn'], torch.randn(2, 20, C)
    with torch.no_grad():
        actual = attn(x)
        q, k, v = attn.qkv(x).reshape(2, 20, 3, HEADS, C // HEADS).permute(2, 0, 3, 4, 1)
        gate_q, gate_k = (F.normalize(proj(x), dim=1) for proj in (attn.gate.gate_q_proj, attn.gate.gate_k_proj))
        gate = attn.gate.gml((gate_q.transpose(1, 2) @ gate_k)[:, None])  # (B, 1, d, d)
        logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * attn.temperature
        heads = (logits * (1 + gate)).softmax(-1) @ v  # (B, H, d, N)
        expected = attn.proj(heads.permute(0, 3, 1, 2).reshape(2, 20, C))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'host, rule, message',
    [
        (lambda: XCA(C, HEADS), dict(type='SDPAGatedMultiheadAttention'), 'the channels attend to each other'),
        (lambda: XCA(C, HEADS), dict(type='PLuGMultiheadAttention', ratio=0.5), 'leave ratio at 1'),
        (lambda: LeAttention(C, 8, HEADS, attn_ratio=2), dict(type='PLuGMultiheadAttention'), 'values of 16 channels'),
        (
            lambda: VisformerAttention(C, HEADS, head_dim_ratio=0.5),
            dict(type='SDPAGatedMultiheadAttention', position='G5'),
            'goes from 16 to 32 channels',
        ),
        (
            lambda: T2TTransformerLayer(C, HEADS, 64, input_dims=C // 2).attn,
            dict(type='PLuGMultiheadAttention'),
            'v_shortcut, input_dims',
        ),
        *(
            (
                lambda: WindowMSAV2(C, (4, 4), HEADS),
                dict(type=f'Differential{kind}MultiheadAttention'),
                'halves of unit',
            )
            for kind in ('', 'Gated')
        ),
    ],
    ids=['xcit other gate', 'xcit ratio', 'levit', 'visformer G5', 'tokens-to-token', 'cosines', 'gated cosines'],
)
def test_what_does_not_fit_says_why(host: Callable[[], nn.Module], rule: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        swap_attention(nn.ModuleDict(dict(attn=host())), dict(rule, path='attn'))

"""Attentions of mmpretrain and timm that are special: XCiT over channels, T2T-ViT without biases, what does not fit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import filled
from torch import Tensor, nn

from mmgate._environment import available

if not available('mmpretrain') or not available('timm'):  # an import may fail in other ways than by absence
    pytest.skip('needs mmpretrain and timm: the extra "pretrain"', allow_module_level=True)
from mmpretrain.models.backbones.t2t_vit import T2TTransformerLayer
from mmpretrain.models.backbones.xcit import XCA
from mmpretrain.models.utils.attention import LeAttention, MultiheadAttention, ShiftWindowMSA, WindowMSAV2

from mmgate import swap_attention, train_only_gates

C, HEADS = 32, 4
PLUG = dict(type='PLuGMultiheadAttention')


@pytest.mark.parametrize(
    'make',
    [
        lambda: T2TTransformerLayer(C, HEADS, 64),
        lambda: MultiheadAttention(C, HEADS, qk_scale=0.3),
        lambda: MultiheadAttention(C, HEADS, qkv_bias=False, proj_bias=False),
    ],
    ids=['T2T', 'qk_scale', 'without biases'],
)
def test_softmax_over_a_map_is_the_hosts(make: Callable[[], nn.Module]) -> None:
    """By its scale, whatever it is."""
    model = make().double().eval()
    gated = copy.deepcopy(nn.ModuleDict(dict(host=model)))
    vars(gated).update(patch_resolution=(7, 7), num_extra_tokens=1)  # as a ViT around keeps them
    assert len(swap_attention(gated, dict(type='SoftmaxAttention', path='**'))) == 1
    x = torch.randn(2, 1 + 49, C, dtype=torch.float64)
    torch.testing.assert_close(gated['host'](x), model(x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    'rule',
    [
        dict(type='SDPAGatedMultiheadAttention', position='G4', form='additive', act='silu'),
        dict(type='DifferentialV2MultiheadAttention'),
        dict(type='DifferentialV2MultiheadAttention', init='identity'),
    ],
    ids=['G4', 'V2', 'V2 identity'],
)
def test_queries_that_a_gate_adds_have_the_hosts_scale(rule: dict[str, Any]) -> None:
    host: Any = MultiheadAttention(C, HEADS, qk_scale=0.3).double().eval()
    scale = host.scaled_dot_product_attention.keywords['scale']
    swap_attention(nn.ModuleDict(dict(host=host)), dict(rule, path='host'))
    gate, x = filled(host, 0.3).gate, torch.randn(2, 9, C, dtype=torch.float64)
    q, k, v = (gate.split_heads(part) for part in host.qkv(x).chunk(3, -1))

    def heads(query: Tensor) -> Tensor:
        return (query @ k.mT / scale).softmax(-1) @ v

    if 'position' in rule:
        out = heads(q + gate.compute_gate((x, x, x)))
    elif 'init' in rule:
        out = 2 * (heads(q) - gate._lambda(x) * heads(q + gate.split_heads(gate.query_shift(x))))
    else:
        out = heads(q) - gate._lambda(x) * heads(gate.split_heads(gate.query_proj(x)))
    torch.testing.assert_close(host(x), host.proj(gate.merge_heads(out)), rtol=1e-10, atol=1e-10)


def scaled_by_someone() -> nn.Module:
    host = MultiheadAttention(C, HEADS)
    host.scaled_dot_product_attention = partial(F.scaled_dot_product_attention, scale=0.1)
    return host


def test_cross_covariance_gates_pairs_of_channels() -> None:
    """The gate is formed as the host forms its logits."""
    model = nn.ModuleDict(dict(attn=XCA(C, HEADS, qkv_bias=True)))
    swap_attention(model, dict(PLUG, path='attn', init='paper'))
    attn, x = model['attn'], torch.randn(2, 20, C)
    with torch.no_grad():
        actual = attn(x)
        q, k, v = attn.qkv(x).reshape(2, 20, 3, HEADS, C // HEADS).permute(2, 0, 3, 4, 1)
        gate_q, gate_k = (F.normalize(proj(x), dim=1) for proj in (attn.gate.gate_q_proj, attn.gate.gate_k_proj))
        gate = attn.gate.gml((gate_q.transpose(1, 2) @ gate_k)[:, None])  # (B, 1, d, d)
        logits = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * attn.temperature
        heads = (logits * (1 + gate)).softmax(-1) @ v  # (B, H, d, N)
        expected = attn.proj(heads.permute(0, 3, 1, 2).reshape(2, 20, C))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# by what does not fit, the host, the rule and the message
REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    'gates over channels': (
        lambda: XCA(C, HEADS),
        dict(type='SDPAGatedMultiheadAttention'),
        'SDPAGate.* does not replace',
    ),
    'narrow gates over channels': (lambda: XCA(C, HEADS), dict(PLUG, ratio=0.5), 'leave ratio at 1'),
    'wide values': (lambda: LeAttention(C, 8, HEADS, attn_ratio=2), PLUG, 'values of 16 channels'),
    'no map': (
        lambda: MultiheadAttention(C, HEADS),
        dict(type='SoftmaxAttention'),
        'a call of a MultiheadAttention does not name the map, and no ViT around',
    ),
    'tokens to token': (
        lambda: T2TTransformerLayer(C, HEADS, 64, input_dims=C // 2).attn,
        PLUG,
        'v_shortcut, input_dims',
    ),
    'own product': (scaled_by_someone, PLUG, "its scaled_dot_product_attention is not mmpretrain's"),
    'cosines in windows': (
        lambda: ShiftWindowMSA(C, HEADS, 4, window_msa=WindowMSAV2),
        dict(type='AgentAttention', agent_num=4, map_size=(8, 8)),
        'it would lose what the WindowMSAV2 in it computes beyond a WindowMSA',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_mmpretrains_attention_says_why_a_gate_does_not_fit(case: str) -> None:
    host, rule, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        swap_attention(nn.ModuleDict(dict(attn=host())), dict(rule, path='attn'))


def test_attention_that_derives_weights_from_its_mode_rests_in_it_while_gates_train() -> None:
    model = nn.Sequential(*(LeAttention(C, C // HEADS, HEADS, attn_ratio=1, resolution=(3, 3)) for _ in range(2)))
    swap_attention(model, dict(path='1', **PLUG))
    train_only_gates(model)
    for mode in (True, False, True, True, False):
        assert model.train(mode)(torch.randn(1, 9, C)).isfinite().all()

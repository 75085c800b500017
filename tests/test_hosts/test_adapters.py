"""Hosts that need more than a pass of a block: odd maps, tables, temperatures, positions and masks of their own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from helpers.backbones import PRETRAIN, SVT, SWIN, trained
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmengine.registry import MODELS
from torch import nn

from mmgate import gate_parameters, swap_attention

PLUG = dict(type='PLuGMultiheadAttention')
SDPA = dict(type='SDPAGatedMultiheadAttention', scale=2.0, init='identity')
GATES: dict[str, dict[str, Any]] = {'plug': PLUG, 'sdpa_G1': SDPA, 'sdpa_G5': dict(SDPA, position='G5')}
VIT = dict(img_size=(64, 64), embed_dims=32, num_layers=2, num_heads=4, out_indices=(0, 1), init_values=0.1)
V2_ARCH = dict(PRETRAIN['arch'], extra_norm_every_n_blocks=0)
SAM_ARCH = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64, global_attn_indexes=[1])
# name: backbone, side of its images, paths, attentions that match
BACKBONES: dict[str, tuple[dict[str, Any], tuple[int, int], str, int]] = {
    # windows of 7 on maps of 24 x 18: both sides padded; of 28 x 18: one, where the host masks nothing
    'twins_svt': (SVT, (96, 72), 'layers.*.*.attn', 8),
    'twins_svt_one_side': (SVT, (112, 72), 'layers.*.*.attn', 8),
    'beit_without_bias': (dict(type='mmseg.BEiT', qv_bias=False, **VIT), (64, 64), 'layers.*.attn', 2),
    'swin_of_mmpretrain': (dict(PRETRAIN, type='mmpretrain.SwinTransformer'), (96, 128), '**.w_msa', 8),
    'swin_v2': (dict(PRETRAIN, type='mmpretrain.SwinTransformerV2', arch=V2_ARCH), (96, 128), '**.w_msa', 8),
    # a window that does not divide the map, and an image of another size than the tables
    'sam': (
        dict(type='mmpretrain.ViTSAM', arch=SAM_ARCH, img_size=96, window_size=4, out_channels=8),
        (96, 128),
        'layers.*.attn',
        2,
    ),
    # shifted windows of both images included
    'swin_of_mmdet': (dict(SWIN, type='mmdet.SwinTransformer'), (96, 64), '**.w_msa', 8),
    'swin_without_bias': (dict(SWIN, type='mmdet.SwinTransformer', qkv_bias=False), (96, 64), '**.w_msa', 8),
}


def gated_copy(model: nn.Module, rule: dict[str, Any]) -> tuple[nn.Module, list[str]]:
    """Swap in a copy, which then loads the vanilla checkpoint with only gates missing."""
    gated = copy.deepcopy(model)
    names = swap_attention(gated, rule)
    keys = gated.load_state_dict(model.state_dict(), strict=False)
    missing = set(keys.missing_keys) - {name for name, _ in model.named_buffers()}  # Swin v2 loads none of its tables
    assert not keys.unexpected_keys and missing
    assert missing == set(gate_parameters(gated)) and all('.gate.' in key for key in missing)
    return gated, names


def learning(model: nn.Module) -> list[str]:
    """Return the names of the gates' parameters that have a gradient."""
    return [name for name, p in gate_parameters(model).items() if p.grad is not None and p.grad.abs().sum() > 0]


V2_GATES = GATES | {
    'plug_post_softmax': dict(PLUG, position='post_softmax', heads='per_head'),
    'sdpa_G2': dict(SDPA, position='G2', granularity='headwise'),
    'sdpa_G3': dict(SDPA, position='G3'),
    'sdpa_G4': dict(SDPA, position='G4', granularity='headwise'),
    'sdpa_additive': dict(type='SDPAGatedMultiheadAttention', form='additive', act='silu', init='identity'),
}
CASES = [(name, gate) for name in BACKBONES for gate in (V2_GATES if name == 'swin_v2' else GATES)]


def case(name: str, gate: str) -> Any:
    return pytest.param(name, gate, marks=[needs_mmpretrain] * ('mmpretrain' in BACKBONES[name][0]['type']))


@pytest.mark.parametrize('name, gate', [case(*pair) for pair in CASES])
def test_backbone(name: str, gate: str) -> None:
    cfg, (height, width), path, count = BACKBONES[name]
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    gated, names = gated_copy(model, dict(V2_GATES[gate], path=path))
    assert len(names) == count
    x = torch.randn(2, 3, height, width)
    with torch.no_grad():
        for expected, actual in zip(model(x), gated(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    sum(map_.square().mean() for map_ in gated(x)).backward()
    assert learning(gated)
    copy.deepcopy(gated)  # as the EMA hook does


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('host', [nn.MultiheadAttention, MultiheadAttention], ids=['torch', 'mmcv'])
def test_keys_and_values_of_other_widths(host: type[nn.Module], gate: str) -> None:
    model = trained(nn.ModuleDict(dict(attn=host(32, 4, kdim=12, vdim=20))))
    gated, _ = gated_copy(model, dict(GATES[gate], path='attn'))
    inputs = (torch.randn(5, 2, 32), torch.randn(7, 2, 12), torch.randn(7, 2, 20))
    expected, actual = (m['attn'](*inputs) for m in (model, gated))
    if host is nn.MultiheadAttention:
        expected, actual = expected[0], actual[0]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    actual.square().sum().backward()
    assert learning(gated)


def conditional(cross_attn: bool) -> dict[str, Any]:
    names = ('query', 'key', 'query_pos', 'key_pos', 'ref_sine_embed')
    inputs: dict[str, Any] = {name: torch.randn(2, 7 if 'key' in name else 5, 32) for name in names}
    if cross_attn:
        inputs['key_padding_mask'] = torch.arange(7)[None] >= torch.tensor([[7], [4]])
    else:
        inputs['attn_mask'] = torch.ones(5, 5).triu(1).bool()
    return inputs


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('cross_attn, is_first', [(False, False), (True, True), (True, False)])
def test_conditional_attention(cross_attn: bool, is_first: bool, gate: str) -> None:
    """Masks included, and without the projection that Conditional DETR's decoder removes from its later layers."""
    attention = ConditionalAttention(32, 4, cross_attn=cross_attn)
    if cross_attn and not is_first:
        attention.qpos_proj = None
    model = trained(nn.ModuleDict(dict(attn=attention)))
    gated, _ = gated_copy(model, dict(GATES[gate], path='attn'))
    inputs = conditional(cross_attn)
    expected, actual = (m['attn'](**inputs, is_first=is_first) for m in (model, gated))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_the_gate_of_conditional_attention_reads_positions() -> None:
    model = trained(nn.ModuleDict(dict(attn=ConditionalAttention(32, 4, cross_attn=True))))
    swap_attention(model, dict(GATES['plug'], path='attn', init='paper'))
    read = []
    for proj in (model['attn'].gate.gate_q_proj, model['attn'].gate.gate_k_proj):
        proj.register_forward_hook(lambda module, args, output: read.append(args[0]))
    inputs = conditional(True)
    model['attn'](**inputs, is_first=True)
    query = inputs['query'] + inputs['query_pos'] + inputs['ref_sine_embed']
    torch.testing.assert_close(read, [query, inputs['key'] + inputs['key_pos']])


@pytest.mark.parametrize('gate', ['plug', 'sdpa_G1'])
@pytest.mark.parametrize('mask', ['none', 'bool', 'float'])
def test_bidirectional_attention(mask: str, gate: str) -> None:
    """Widths of their own for vision, language and heads; masks as GLIP and as Grounding DINO hand them in."""
    model = trained(nn.ModuleDict(dict(attn=BiMultiHeadAttention(16, 24, 64, 4))))
    gated, _ = gated_copy(model, dict(GATES[gate], path='attn'))
    inputs: dict[str, Any] = dict(vision=torch.randn(2, 9, 16), lang=torch.randn(2, 5, 24))
    if mask != 'none':
        inputs['attention_mask_v'] = torch.arange(9)[None] >= torch.tensor([[9], [6]])
        lengths = torch.arange(5)[None] < torch.tensor([[5], [3]])
        inputs['attention_mask_l'] = lengths if mask == 'bool' else lengths.float()
    torch.testing.assert_close(gated['attn'](**inputs), model['attn'](**inputs), rtol=1e-5, atol=1e-5)
    sum(out.square().sum() for out in gated['attn'](**inputs)).backward()
    assert {name.partition('.gate.')[2].split('.')[0] for name in learning(gated)} == {'vision', 'language'}


@pytest.mark.parametrize(
    'host, rule, message',
    [
        ('cross', dict(type='DifferentialMultiheadAttention'), 'content and position already'),
        ('fusion', GATES['sdpa_G5'], 'goes from 64 to 16 channels'),
        ('fusion', dict(type='DifferentialGatedMultiheadAttention'), 'acts after an output projection'),
    ],
)
def test_what_does_not_fit_says_why(host: str, rule: dict[str, Any], message: str) -> None:
    cross = ConditionalAttention(32, 4, cross_attn=True)
    model = nn.ModuleDict(dict(cross=cross, fusion=BiMultiHeadAttention(16, 24, 64, 4)))
    with pytest.raises(ValueError, match=message):
        swap_attention(model, dict(rule, path=host))

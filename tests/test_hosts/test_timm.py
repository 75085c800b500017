"""timm's vision transformers with gates: whole models, maps with class and register tokens, masks, and timm's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import ROOT
from gated import anatomy, assert_same_anatomy
from torch import Tensor, nn

timm = pytest.importorskip('timm', '1.0.30', reason='needs timm: the extra "pretrain"')

from timm.layers.attention import Attention
from timm.models.eva import EvaAttention

from mmgate import gate_parameters, gates_disabled, load_gates, restore_attention, save_gates, swap_attention
from mmgate.analysis.probes.recording import class_tokens, record
from mmgate.layers.base.gate import Gate
from mmgate.timm import gates_from_timm, gates_to_timm

C, HEADS = 32, 4
SMALL = dict(embed_dim=C, depth=2, num_heads=HEADS, num_classes=5)
PLUG = dict(type='PLuGMultiheadAttention')
SDPA = dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu')
SWIN = dict(img_size=64, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=5)
# by name, a model of timm's, its options, and the side of its images
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    'vit': ('vit_tiny_patch16_224', dict(SMALL, img_size=64), 64),
    'deit': ('deit_tiny_distilled_patch16_224', dict(SMALL, img_size=64), 64),
    'dinov2': ('vit_small_patch14_reg4_dinov2', dict(SMALL, img_size=56), 56),
    'siglip': ('vit_base_patch16_siglip_224', dict(SMALL, img_size=64), 64),
    'dinov3': ('vit_small_patch16_dinov3', dict(SMALL, img_size=64), 64),
    'eva02': ('eva02_tiny_patch14_224', dict(SMALL, img_size=56), 56),
    'swin': ('swin_tiny_patch4_window7_224', SWIN, 64),
}
PATHS = dict.fromkeys(MODELS, 'blocks.*.attn') | dict(swin='layers.*.blocks.*.attn')


def build(name: str, **options: Any) -> tuple[Any, Tensor]:
    """Return a small model, moved off its start, and two images."""
    torch.manual_seed(0)
    called, small, side = MODELS[name]
    model = timm.create_model(called, **{**small, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for key, parameter in model.named_parameters():
            if 'gamma' in key:  # the scale of a layer, which starts near 0
                parameter.fill_(1.0)
    return model, torch.randn(2, 3, side, side)


@pytest.mark.parametrize('rule', [PLUG, SDPA], ids=['plug', 'sdpa'])
@pytest.mark.parametrize('name', MODELS)
def test_a_model_starts_as_it_was_and_learns(name: str, rule: dict[str, Any]) -> None:
    vanilla, images = build(name)
    model, expected = copy.deepcopy(vanilla), vanilla(images)
    before = anatomy(model)
    names = swap_attention(model, dict(rule, path=PATHS[name]))
    assert len(names) == (4 if name == 'swin' else 2)
    torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)
    assert not model.load_state_dict(vanilla.state_dict(), strict=False).unexpected_keys
    model(images).square().sum().backward()
    found = gate_parameters(model)
    assert found and any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in found.values())
    for parameter in found.values():
        nn.init.normal_(parameter)
    assert not torch.allclose(model(images), expected, atol=1e-3)
    with gates_disabled(model):
        assert torch.equal(model(images), expected)
    assert len([part for part in copy.deepcopy(model).modules() if isinstance(part, Gate)]) == len(names)
    restore_attention(model)
    assert_same_anatomy(anatomy(model), before)


@pytest.mark.parametrize('gate', ['AgentAttention', 'SAGAAttention', 'FocusedLinearAttention'])
@pytest.mark.parametrize('name, before', [('vit', 1), ('deit', 2), ('dinov2', 5), ('siglip', 0), ('swin', 0)])
def test_attention_over_a_map_finds_the_map(name: str, before: int, gate: str) -> None:
    """And the class and register tokens before it; maps of other images are those that the model embeds."""
    model, images = build(name, **({} if name == 'swin' else dict(dynamic_img_size=True)))
    path = 'layers.*.blocks.*' if name == 'swin' else PATHS[name]
    plain = copy.deepcopy(model)
    names = swap_attention(model, dict(type=gate, path=path, **(dict(agent_num=4) if 'Agent' in gate else {})))
    gates: list[Any] = [model.get_submodule(part).gate for part in names]
    maps = [(16, 16)] * 2 + [(8, 8)] * 2 if name == 'swin' else [(4, 4)] * 2
    assert [(part.map_size, part.class_tokens) for part in gates] == [(size, before) for size in maps]
    assert model(images).isfinite().all()
    model(images).square().sum().backward()
    assert all(parameter.grad is not None for parameter in gate_parameters(model).values())
    if name == 'swin':
        assert [part.shifted for part in gates] == [False, True, False, True]
        assert not any('relative_position' in key for key in model.state_dict())
    else:
        oblong = images.repeat(1, 1, 1, 2)
        assert model(oblong).isfinite().all()
        assert model.blocks[0].attn.noted_map == (4, 8)
    restore_attention(model)
    assert torch.equal(model(images), plain(images)) and list(model.state_dict()) == list(plain.state_dict())


def test_softmax_over_a_map_is_the_hosts_attention() -> None:
    """Class and register tokens, heads with norms, and windows that are the map among them."""
    for name, options in (('dinov2', dict(qk_norm=True)), ('swin', dict(window_size=16, depths=(1,), num_heads=(2,)))):
        model, images = build(name, **options)
        if name == 'swin':
            nn.init.zeros_(model.layers[0].blocks[0].attn.relative_position_bias_table)
        expected = model(images)
        path = 'layers.*.blocks.*' if name == 'swin' else PATHS[name]
        assert swap_attention(model, dict(type='SoftmaxAttention', path=path))
        torch.testing.assert_close(model(images), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('mask', ['none', 'bool', 'float', 'causal'])
@pytest.mark.parametrize('kind', [Attention, EvaAttention])
def test_masks_are_timms(kind: Any, mask: str) -> None:
    options = dict(qkv_bias=True) | (dict(norm_layer=nn.LayerNorm) if kind is EvaAttention else {})
    model: Any = nn.ModuleDict(dict(attn=kind(C, HEADS, **options))).eval()
    x, may = torch.randn(2, 6, C), torch.rand(2, 1, 6, 6) > 0.4
    may[..., 0] = True
    given: dict[str, Any] = dict(
        none={}, bool=dict(attn_mask=may), float=dict(attn_mask=torch.randn(6, 6)), causal=dict(is_causal=True)
    )[mask]
    expected = model['attn'](x, **given)
    assert (mask == 'none') == torch.equal(expected, model['attn'](x))
    swap_attention(model, dict(PLUG, path='attn'))
    torch.testing.assert_close(model['attn'](x, **given), expected, rtol=1e-4, atol=1e-5)


def test_a_map_has_no_pairs_to_mask() -> None:
    model: Any = nn.ModuleDict(dict(attn=Attention(C, HEADS)))
    swap_attention(model, dict(type='SAGAAttention', path='attn', map_size=(4, 4), class_token=False))
    with pytest.raises(ValueError, match='SAGAGate forms no pairs of tokens'):
        model['attn'](torch.randn(1, 16, C), is_causal=True)


def test_heads_of_another_width() -> None:
    """Dense gates fit, but at G5 and over a map."""
    model: Any = nn.ModuleDict(dict(attn=Attention(C, HEADS, attn_head_dim=6, dim_out=40))).eval()
    x, plain = torch.randn(2, 9, C), copy.deepcopy(model)
    for rule in (PLUG, SDPA):
        gated = copy.deepcopy(model)
        swap_attention(gated, dict(rule, path='attn'))
        torch.testing.assert_close(gated['attn'](x), plain['attn'](x), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match='goes from 24 to 40 channels'):
        swap_attention(model, dict(SDPA, path='attn', position='G5'))
    with pytest.raises(
        ValueError, match='needs one width, but Attention has 32 channels, its heads 24 and its output 40'
    ):
        swap_attention(model, dict(type='SAGAAttention', path='attn', map_size=(3, 3), class_token=False))


def own(name: str) -> tuple[Any, Tensor]:
    """Return a model whose attentions timm builds with a gate."""
    model, images = build(name)
    for block in model.blocks:
        attn = block.attn
        state = attn.state_dict()
        options: dict[str, Any] = dict(qkv_bias=any(key in state for key in ('qkv.bias', 'q_bias', 'q_proj.bias')))
        if isinstance(attn, EvaAttention):
            options.update(num_prefix_tokens=attn.num_prefix_tokens, rotate_half=attn.rotate_half, scale_norm=False)
            options.update(qkv_fused=attn.qkv is not None)
        block.attn = type(attn)(C, HEADS, gated=True, **options).eval()
        assert not block.attn.load_state_dict(state, strict=False).unexpected_keys
    return model, images


@pytest.mark.parametrize('name', ['vit', 'dinov3', 'eva02'])
def test_gates_of_timms_become_ours_and_back(name: str, tmp_path: Any) -> None:
    """The model computes the same each time, and a file of our gates fits a model without any."""
    model, images = own(name)
    expected, before = model(images), copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r'one of timm.s; mmgate.timm.gates_from_timm\(model\) makes it one of ours'):
        swap_attention(model, dict(PLUG, path=PATHS[name]))
    names = gates_from_timm(model)
    assert names == ['blocks.0.attn', 'blocks.1.attn']
    torch.testing.assert_close(model(images), expected, rtol=1e-5, atol=1e-5)
    save_gates(model, tmp_path / 'gates.safetensors')
    with gates_disabled(model):
        assert not torch.allclose(model(images), expected, atol=1e-3)
    other, _ = build(name)
    load_gates(other, tmp_path / 'gates.safetensors')
    torch.testing.assert_close(other(images), expected, rtol=1e-5, atol=1e-5)
    assert gates_to_timm(model) == names
    assert torch.equal(model(images), expected)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], value) for key, value in before.items())
    assert not list(gate_parameters(model)) and type(model.blocks[0].attn).__module__.startswith('timm.')


def test_a_checkpoint_of_timms_gates_loads_into_ours() -> None:
    model, images = own('vit')
    gated, _ = build('vit')
    swap_attention(gated, dict(type='SDPAGatedMultiheadAttention', path=PATHS['vit']))
    keys = gated.load_state_dict(model.state_dict(), strict=False)
    assert not keys.unexpected_keys and not keys.missing_keys
    torch.testing.assert_close(gated(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('options, words', [
    (dict(type='PLuGMultiheadAttention'), 'it is a PLuGGate'),
    (dict(type='SDPAGatedMultiheadAttention', position='G2'), "position='G2'"),
    (dict(type='SDPAGatedMultiheadAttention', granularity='headwise'), "granularity='headwise'"),
    (dict(type='SDPAGatedMultiheadAttention', init='identity', scale=2.0), 'scale=2.0'),
])  # fmt: skip
def test_other_gates_are_not_timms(options: dict[str, Any], words: str) -> None:
    model, _ = build('vit')
    with pytest.raises(ValueError, match='has no gate of mmgate'):
        gates_to_timm(model)
    with pytest.raises(ValueError, match='built with gated=True'):
        gates_from_timm(model)
    swap_attention(model, dict(options, path=PATHS['vit']))
    with pytest.raises(ValueError, match=f'gate of blocks.0.attn is not one of timm: {words}'):
        gates_to_timm(model)
    assert restore_attention(model)


def test_a_norm_between_heads_and_gate_is_refused() -> None:
    model, _ = build('vit', scale_attn_norm=True)
    swap_attention(model, dict(type='SDPAGatedMultiheadAttention', path=PATHS['vit']))
    with pytest.raises(ValueError, match='normalises its heads'):
        gates_to_timm(model)


def test_attention_is_read_before_and_after() -> None:
    for name in ('dinov2', 'dinov3', 'swin'):
        model, images = build(name)
        found = []
        for _ in range(2):
            with record(model, ['attention']) as recording, torch.no_grad():
                model(images)
            found.append([readings['attention'].last for readings in recording.values()])
            if len(found) == 1:
                swap_attention(model, dict(PLUG, path=PATHS[name]))
        assert len(found[0]) == (4 if name == 'swin' else 2)
        torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-5)
        if name == 'dinov2':
            keys = dict.fromkeys(recording, found[0][0].shape[-1])
            assert class_tokens(model, keys) == dict.fromkeys(keys, 5)


def test_a_segmentor_with_dinov2_of_timms() -> None:
    """mmseg's ``TIMMBackbone``, gated by path from a config, on crops that its patches do not divide."""
    pytest.importorskip('mmseg', reason='needs mmseg')
    from mmengine.config import Config
    from mmengine.registry import MODELS as REGISTERED
    from mmengine.registry import init_default_scope

    name = 'sdpa_gate/upernet/sdpa-gate-upernet_dinov2-s14_8xb2-160k_ade20k-512x512.py'
    cfg = Config.fromfile(ROOT / 'configs' / name)
    init_default_scope('mmseg')
    cfg.model.backbone.update(pretrained=False, embed_dim=C, depth=4, num_heads=HEADS, out_indices=(0, 1, 2, 3))
    cfg.model.neck.update(in_channels=[C] * 4, out_channels=C)
    cfg.model.decode_head.update(in_channels=[C] * 4, channels=C, norm_cfg=dict(type='BN'))
    cfg.model.auxiliary_head.update(in_channels=C, channels=C, norm_cfg=dict(type='BN'))
    model = REGISTERED.build(cfg.model)
    model.init_weights()
    model.eval()
    images = torch.randn(1, 3, 64, 96)
    gated = model(images)
    assert len(restore_attention(model)) == 4 and gated.shape[:2] == (1, 150)
    torch.testing.assert_close(model(images), gated, rtol=1e-4, atol=1e-4)

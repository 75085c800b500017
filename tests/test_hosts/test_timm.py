"""timm's vision transformers with gates: whole models, maps with class and register tokens, masks, windows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers.gated import anatomy, assert_same_anatomy
from torch import Tensor, fx, nn

from mmgate._environment import available

if not available('timm'):  # an import may fail in other ways than by absence
    pytest.skip('needs timm: the extra "pretrain"', allow_module_level=True)
import timm
from helpers.timm_models import HEADS, MODELS, PATHS, PLUG, SDPA, C, build
from timm.layers.attention import Attention
from timm.models.eva import EvaAttention
from timm.models.gcvit import WindowAttentionGlobal

from mmgate import (
    gate_parameters,
    gates_disabled,
    list_attention,
    restore_attention,
    swap_attention,
)
from mmgate.analysis.probes.recording import class_tokens, record
from mmgate.errors import ConfigError
from mmgate.gate import Gate
from mmgate.hosts.timm import BY_IMAGE, shares_by_image


@pytest.mark.parametrize('rule', [PLUG, SDPA], ids=['plug', 'sdpa'])
@pytest.mark.parametrize('name', MODELS)
def test_a_model_starts_as_it_was_and_learns(name: str, rule: dict[str, Any]) -> None:
    vanilla, images = build(name)
    model, expected = copy.deepcopy(vanilla), vanilla(images)
    before = anatomy(model)
    names = swap_attention(model, dict(rule, path=PATHS[name]))
    assert len(names) == (4 if name == 'swin' else 2)
    assert {one.path for one in list_attention(vanilla) if rule['type'] in one.gates} == set(names)
    assert {one.path: one.class_name for one in list_attention(model) if one.gate} == {
        path: type(vanilla.get_submodule(path)).__name__ for path in names
    }
    for path in names:  # timm's attentions are called in different ways
        taken = [inspect.signature(one.get_submodule(path).forward) for one in (model, vanilla)]
        assert taken[0] == taken[1]
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


def test_a_checkpoint_of_timms_own_gates_loads_into_ours() -> None:
    model, images = build('vit')
    gated, _ = build('vit')
    for block in model.blocks:
        block.attn = Attention(C, HEADS, qkv_bias=True, gated=True).eval()
    with pytest.raises(ConfigError, match=r"one of timm's: build the attention without gated=True"):
        swap_attention(model, dict(PLUG, path=PATHS['vit']))
    expected = model(images)
    with record(model) as recording:
        assert torch.equal(model(images), expected) and not recording
    swap_attention(gated, dict(type='SDPAGatedMultiheadAttention', path=PATHS['vit']))
    keys = gated.load_state_dict(model.state_dict(), strict=False)
    assert not keys.unexpected_keys and not keys.missing_keys
    torch.testing.assert_close(gated(images), model(images), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize('gate', ['AgentAttention', 'SAGAAttention'])
@pytest.mark.parametrize('name, before', [('vit', 1), ('deit', 2), ('dinov2', 5), ('siglip', 0), ('swin', 0)])
def test_attention_over_a_map_finds_the_map(name: str, before: int, gate: str) -> None:
    """And the class and register tokens before it; images of another size are refused where a call names no map."""
    model, images = build(name)
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
        resting = [name for name, p in model.named_parameters() if not p.requires_grad]
        assert len(resting) == 4 and all('relative_position' in name for name in resting)
    else:
        assert [part.host_map for part in gates] == maps
        with pytest.raises(ValueError, match='Gate takes images of that size alone, and all of their tokens'):
            model.blocks(torch.randn(2, before + 4 * 8, C))
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


def test_a_map_has_no_pairs_to_mask_and_is_that_of_a_vit() -> None:
    with pytest.raises(ConfigError, match='does not name the map, and no ViT around it keeps one'):
        swap_attention(nn.ModuleDict(dict(attn=Attention(C, HEADS))), dict(type='SAGAAttention', path='attn'))
    model, _ = build('siglip')
    swap_attention(model, dict(type='SAGAAttention', path=PATHS['siglip']))
    with pytest.raises(ValueError, match='SAGAGate forms no pairs of tokens'):
        model.blocks[0].attn(torch.randn(1, 16, C), is_causal=True)


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
    vars(model).update(num_prefix_tokens=0, patch_embed=SimpleNamespace(grid_size=(3, 3), img_size=(48, 48)))
    with pytest.raises(
        ValueError, match='needs one width, but Attention has 32 channels, its heads 24 and its output 40'
    ):
        swap_attention(model, dict(type='SAGAAttention', path='attn'))


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


def by_batch(self: Any, x: Tensor, q_global: Tensor) -> Tensor:
    """Attend as timm up to 1.0.29, which hands the global queries out by batch."""
    key, value = self.qkv(x).unflatten(-1, (2, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
    query = q_global.repeat(len(x) // len(q_global), 1, 1, 1).reshape(*x.shape[:2], self.num_heads, -1).transpose(1, 2)
    weights = self.rel_pos(query * self.scale @ key.transpose(-1, -2)).softmax(-1)
    return self.proj((weights @ value).transpose(1, 2).flatten(2))


def by_image(self: Any, x: Tensor, q_global: Tensor) -> Tensor:
    """Attend as timm since."""
    return by_batch(self, x, q_global.repeat_interleave(len(x) // len(q_global), dim=0))


@pytest.mark.parametrize('forward', [by_batch, by_image])
def test_global_queries_are_shared_as_the_host_does(forward: Callable[..., Tensor], monkeypatch: Any) -> None:
    """Of two images in three windows each."""
    monkeypatch.setattr(WindowAttentionGlobal, 'forward', forward)
    monkeypatch.setattr('mmgate.hosts.timm.BY_IMAGE', shares_by_image(forward))
    model: Any = nn.ModuleDict(dict(attn=WindowAttentionGlobal(C, HEADS, (2, 2)))).double()
    x, queries = torch.randn(6, 4, C, dtype=torch.float64), torch.randn(2, 2, 2, C, dtype=torch.float64)
    expected = model['attn'](x, queries)
    swap_attention(model, dict(PLUG, path='attn'))
    torch.testing.assert_close(model['attn'](x, queries), expected, rtol=1e-10, atol=1e-10)


def test_this_timm_is_told_apart() -> None:
    known = [int(part) for part in timm.__version__.split('.')[:3]]
    assert known[0] != 1 or known == [1, 0, 30] or (known > [1, 0, 29]) == BY_IMAGE


@pytest.mark.parametrize(
    'options, said',
    [
        (dict(patch_drop_rate=0.75), r'needs all tokens .* VisionTransformer drops some .*PatchDropout'),
        (dict(dynamic_img_size=True), r'VisionTransformer takes images of any size. Build it for one, img_size='),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else '',
)
def test_a_model_of_other_maps_takes_no_gate_over_the_map(options: dict[str, Any], said: str) -> None:
    """A quarter of 16 x 16 patches would pass for a map of 8 x 8. Gates of pairs fit."""
    model, _ = build('vit', img_size=256, **options)
    with pytest.raises(ConfigError, match=f'SAGAAttention does not replace blocks.0.attn: .*{said}'):
        swap_attention(model, dict(type='SAGAAttention', path=PATHS['vit'], map_size=(16, 16)))
    assert swap_attention(model, dict(PLUG, path=PATHS['vit']))


def test_a_swin_with_whole_maps_takes_images_of_another_size() -> None:
    model, images = build('swin')
    wide = nn.functional.interpolate(images, (96, 96))
    swap_attention(model, dict(type='SAGAAttention', path='layers.*.blocks.*'))
    before = anatomy(model)
    for kind in (model, restored := build('swin')[0]):
        kind.set_input_size((96, 96), window_size=6)
    assert model(wide).isfinite().all() and list(anatomy(model)) == list(before)
    blocks = [block for layer in model.layers for block in layer.blocks]
    assert [block.gate.shifted for block in blocks] == [any(block.shift_size) for block in blocks]
    restore_attention(model)
    torch.testing.assert_close(model(wide), restored(wide))


@pytest.mark.parametrize('mode', ['', 'jax'])
def test_models_are_drawn_anew_as_timm_does(mode: str) -> None:
    vanilla, model = build('vit')[0], build('vit')[0]
    swap_attention(model, dict(PLUG, path=PATHS['vit']))
    for one in (vanilla, model):
        torch.manual_seed(3)
        one.init_weights(mode)
    state = model.state_dict()
    assert all(torch.equal(tensor, state[key]) for key, tensor in vanilla.state_dict().items())


@torch.no_grad()
@pytest.mark.parametrize('name, rule', [('dinov3', SDPA), ('swin', SDPA), ('vit', dict(type='AgentAttention'))])
def test_torch_fx_keeps_gated_attention_whole(name: str, rule: dict[str, Any]) -> None:
    """As torch's own attention, it is one node of the graph, in whatever tracer; also over a map that is no square."""
    model, images = build(name, **(dict(img_size=(32, 128)) if name == 'vit' else {}))
    images = images.reshape(2, 3, 32, 128) if name == 'vit' else images
    gated = swap_attention(model, dict(rule, path=PATHS[name]))
    traced = fx.symbolic_trace(model)
    assert [node.target for node in traced.graph.nodes if node.target in gated] == gated
    torch.testing.assert_close(traced(images), model(images))


def test_a_checkpoint_of_timms_gates_after_a_norm_finds_no_place() -> None:
    theirs = Attention(C, HEADS, qkv_bias=True, gated=True, scale_norm=True, norm_layer=nn.LayerNorm)
    ours = nn.ModuleDict(dict(attn=Attention(C, HEADS, qkv_bias=True, scale_norm=True, norm_layer=nn.LayerNorm)))
    swap_attention(ours, dict(type='SDPAGatedMultiheadAttention', path='attn'))
    keys = ours['attn'].load_state_dict(theirs.state_dict(), strict=False)
    assert keys.unexpected_keys == ['gate.weight', 'gate.bias']

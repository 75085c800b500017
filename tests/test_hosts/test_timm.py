"""timm's vision transformers with gates: whole models, maps with class and register tokens, masks, windows."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.gated import anatomy
from torch import nn

from mmgate._environment import available

if not available('timm'):  # an import may fail in other ways than by absence
    pytest.skip('needs timm: the extra "pretrain"', allow_module_level=True)
from helpers.timm_models import HEADS, MODELS, PATHS, PLUG, SDPA, C, build
from timm.layers.attention import Attention

from mmgate import (
    gate_parameters,
    gates_disabled,
    list_attention,
    restore_attention,
    swap_attention,
)
from mmgate.analysis.probes.recording import class_tokens, record


@pytest.mark.parametrize('name', MODELS)
def test_a_model_starts_as_it_was_and_learns(name: str) -> None:
    """All that is listed for the gate takes it, and the class tokens of its maps are known."""
    vanilla, images = build(name)
    model, expected = copy.deepcopy(vanilla), vanilla(images)
    rule = SDPA if name in ('deit', 'dinov3') else PLUG
    names = swap_attention(model, dict(rule, path=PATHS[name]))
    assert {one.path for one in list_attention(vanilla) if rule['type'] in one.gates} == set(names)
    assert {one.path for one in list_attention(model) if one.gate} == set(names)
    assert len(names) == (4 if name == 'swin' else 2)
    for path in names:  # timm's attentions are called in different ways
        taken = [inspect.signature(one.get_submodule(path).forward) for one in (model, vanilla)]
        assert taken[0] == taken[1]
    if name == 'dinov2':
        assert class_tokens(model, dict.fromkeys(names, 5 + 16)) == dict.fromkeys(names, 5)
    output = model(images)
    torch.testing.assert_close(output, expected, rtol=1e-4, atol=1e-4)
    output.square().sum().backward()
    found = gate_parameters(model).values()
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in found)
    with gates_disabled(model):
        assert torch.equal(model(images), expected)


def test_a_checkpoint_of_timms_own_gates_loads_into_ours() -> None:
    model, images = build('vit')
    gated, _ = build('vit')
    for block in model.blocks:
        block.attn = Attention(C, HEADS, qkv_bias=True, gated=True).eval()
    expected = model(images)
    with record(model) as recording:
        assert torch.equal(model(images), expected) and not recording
    swap_attention(gated, dict(type='SDPAGatedMultiheadAttention', path=PATHS['vit']))
    keys = gated.load_state_dict(model.state_dict(), strict=False)
    assert not keys.unexpected_keys and not keys.missing_keys
    torch.testing.assert_close(gated(images), model(images), rtol=1e-5, atol=1e-5)
    # gates after a norm find no place
    theirs = Attention(C, HEADS, qkv_bias=True, gated=True, scale_norm=True, norm_layer=nn.LayerNorm)
    ours = around(Attention(C, HEADS, qkv_bias=True, scale_norm=True, norm_layer=nn.LayerNorm))
    swap_attention(ours, dict(type='SDPAGatedMultiheadAttention', path='attn'))
    keys = ours['attn'].load_state_dict(theirs.state_dict(), strict=False)
    assert keys.unexpected_keys == ['gate.weight', 'gate.bias']


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
        if name == 'siglip':
            with pytest.raises(ValueError, match='Gate forms no pairs of tokens'):
                model.blocks[0].attn(torch.randn(1, 16, C), is_causal=True)
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


def around(attention: nn.Module) -> nn.Module:
    return nn.ModuleDict(dict(attn=attention))


SAGA = dict(type='SAGAAttention')
# By what does not fit, the model, the rule and the message.
REFUSED: dict[str, tuple[Callable[[], Any], dict[str, Any], str]] = {
    "timm's gates": (lambda: around(Attention(C, HEADS, gated=True)), PLUG, r"timm's: build .* without gated=True"),
    'no map': (lambda: around(Attention(C, HEADS)), SAGA, 'does not name the map, and no ViT around it keeps one'),
    # a quarter of 16 x 16 patches would pass for a map of 8 x 8
    'fewer tokens': (
        lambda: build('vit', img_size=256, patch_drop_rate=0.75)[0],
        dict(SAGA, map_size=(16, 16)),
        r'needs all tokens .* VisionTransformer drops some .*PatchDropout',
    ),
    'other images': (
        lambda: build('vit', img_size=256, dynamic_img_size=True)[0],
        dict(SAGA, map_size=(16, 16)),
        r'VisionTransformer takes images of any size. Build it for one, img_size=',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_a_gate_that_does_not_fit_says_why(case: str) -> None:
    """Gates of pairs fit."""
    make, rule, said = REFUSED[case]
    model = make()
    with pytest.raises(ValueError, match=said):
        swap_attention(model, dict(rule, path='**'))
    assert rule is PLUG or swap_attention(model, dict(PLUG, path='**'))


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

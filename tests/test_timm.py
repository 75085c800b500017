"""Gates of timm's own become ours, and ours timm's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate._environment import available

if not available('timm'):  # an import may fail in other ways than by absence
    pytest.skip('needs timm: the extra "pretrain"', allow_module_level=True)
from helpers.timm_models import HEADS, PATHS, PLUG, C, build
from timm.models.eva import EvaAttention

from mmgate import gate_parameters, gates_disabled, load_gates, restore_attention, save_gates, swap_attention
from mmgate.timm import gates_from_timm, gates_to_timm


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
    (dict(type='SDPAGatedMultiheadAttention', gate_channels=5), 'gate_channels=5'),
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

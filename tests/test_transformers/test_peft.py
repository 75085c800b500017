"""Gates beside PEFT's updates of low rank: trained together, each in its file, loaded and removed one by one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from safetensors.torch import load_file
from torch import Tensor, nn

pytest.importorskip('peft', reason='needs peft, in the environment of transformers')
pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers import hub_models, timm_models
from peft import LoraConfig, PeftModel, get_peft_model

import mmgate

PLUG = 'PLuGMultiheadAttention'
G5 = dict(type='SDPAGatedMultiheadAttention', position='G5', init='identity', act='silu')
DEFORMABLE_DETR = [
    dict(path='model.encoder.layers.*.self_attn', type='PLuGMultiScaleDeformableAttention'),
    dict(path='model.decoder.layers.*.encoder_attn', type='PLuGMultiScaleDeformableAttention'),
    dict(path='model.decoder.layers.*.self_attn', type=PLUG),
]


def of_transformers(name: str) -> tuple[nn.Module, Callable[[Any], list[Tensor]]]:
    fed = hub_models.feed(name)
    return hub_models.build(name), lambda model: hub_models.outputs(model, fed)


def of_torch() -> tuple[nn.Module, Callable[[Any], list[Tensor]]]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), lambda model: [model(x)]


def of_timm(name: str) -> tuple[nn.Module, Callable[[Any], list[Tensor]]]:
    model, images = timm_models.build(name)
    return model, lambda model: [model(images)]


# The model, the layers that get updates of low rank, and the rules.
CASES: dict[str, tuple[Callable[[], Any], list[str] | str, Any]] = {
    'deformable': (
        lambda: of_transformers('deformable_detr'),
        ['q_proj', 'v_proj', 'value_proj', 'sampling_offsets'],
        DEFORMABLE_DETR,
    ),
    'every-linear-layer': (lambda: of_transformers('deformable_detr'), 'all-linear', DEFORMABLE_DETR),
    'interface': (lambda: of_transformers('vit'), ['q_proj', 'o_proj'], dict(path='**', type=PLUG)),
    'after-the-projection': (lambda: of_transformers('vit'), ['q_proj', 'o_proj'], dict(G5, path='**')),
    'torch': (of_torch, ['self_attn', 'linear1'], dict(path='layers.*.self_attn', type=PLUG)),
    'timm': (lambda: of_timm('vit'), ['qkv', 'proj'], dict(path='blocks.*.attn', type=PLUG)),
}


REFUSED = ('torch', 'gates-first')


def without_ties(model: Any) -> Any:
    """Return a model whose ties PEFT does not look at, as it asks detectors of transformers for embeddings of words."""
    if hasattr(model, '_tied_weights_keys'):
        model._tied_weights_keys = None
    return model


def low_rank(model: nn.Module, targets: list[str] | str) -> Any:
    """Return a model of PEFT's whose updates change something, unlike those of its start."""
    return get_peft_model(without_ties(model), LoraConfig(r=2, target_modules=targets, init_lora_weights=False))


def moved(model: nn.Module) -> None:
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in mmgate.gate_parameters(model).items():
            if 'lora_' not in name:
                parameter.add_(0.3 * torch.randn_like(parameter))


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def assert_apart(found: list[Tensor], expected: list[Tensor]) -> None:
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) > 1e-3


@pytest.mark.parametrize('name, order', [
    (name, order) for name in CASES for order in ('gates-first', 'lora-first') if (name, order) != REFUSED
])  # fmt: skip
def test_each_is_saved_loaded_and_removed_without_the_other(name: str, order: str, tmp_path: Path) -> None:
    make, targets, rules = CASES[name]
    vanilla, run = make()
    plain = run(vanilla)
    model = copy.deepcopy(vanilla)
    if order == 'gates-first':
        names = mmgate.swap_attention(model, rules)
        model = low_rank(model, targets)
    else:
        model = low_rank(model, targets)
        names = mmgate.swap_attention(model, rules)
    moved(model)
    both = run(model)
    assert_apart(both, plain)

    model.save_pretrained(tmp_path / 'lora')
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    updates = load_file(tmp_path / 'lora/adapter_model.safetensors')
    assert updates and all('.lora_' in key for key in updates)
    gated = copy.deepcopy(vanilla)
    mmgate.swap_attention(gated, rules)
    gates = load_file(tmp_path / 'gates.safetensors')
    assert gates.keys() == mmgate.gate_parameters(gated).keys()

    # The gates alone, then with the updates.
    fresh = copy.deepcopy(vanilla)
    mmgate.load_gates(fresh, tmp_path / 'gates.safetensors')
    gates_alone = run(fresh)
    assert_apart(gates_alone, plain)
    assert_apart(gates_alone, both)
    if (name, 'gates-first') != REFUSED:
        fresh = PeftModel.from_pretrained(without_ties(fresh), tmp_path / 'lora').eval()
        assert_same(run(fresh), both)

    # The other way round; updates of the gates' layers need the gates.
    other = copy.deepcopy(vanilla)
    if targets != 'all-linear':
        other = PeftModel.from_pretrained(without_ties(other), tmp_path / 'lora').eval()
        updates_alone = run(other)
        mmgate.load_gates(other, tmp_path / 'gates.safetensors')
        assert_same(run(other), both)
        assert sorted(mmgate.restore_attention(other)) == sorted(names)
        assert_same(run(other), updates_alone)

    # What is left when one of them goes is what the other's file makes of the vanilla model.
    with mmgate.gates_disabled(model):
        assert_apart(run(model), both)
    assert_same(run(model), both)
    model = model.unload()
    assert_same(run(model), gates_alone)
    mmgate.save_gates(model, tmp_path / 'again.safetensors')
    again = load_file(tmp_path / 'again.safetensors')
    assert again.keys() == gates.keys() and all(torch.equal(again[key], one) for key, one in gates.items())
    assert sorted(mmgate.restore_attention(model)) == sorted(names)
    assert_same(run(model), plain)
    assert model.state_dict().keys() == vanilla.state_dict().keys()


def test_peft_goes_first_around_the_whole_of_torchs_attention() -> None:
    """Its layer there asks for equal widths by an attribute that keeps torch from passing over a gate."""
    model, _ = of_torch()
    mmgate.swap_attention(model, dict(path='layers.*.self_attn', type=PLUG))
    with pytest.raises(ValueError, match='Only same embed for query/key/value'):
        low_rank(model, ['self_attn'])

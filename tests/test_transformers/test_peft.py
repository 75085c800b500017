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
from peft import LoraConfig, PeftModel, get_peft_model, inject_adapter_in_model
from peft.tuners.tuners_utils import BaseTunerLayer

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


PAGE = (ROOT / 'docs/adapters.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', PAGE.partition('## Beside LoRA')[2], re.S)[:2]
FREED = re.findall(r'`(for gate in .*?)`', PAGE)


@pytest.mark.parametrize('order', ['gates-first', 'lora-first'])
def test_the_pages_lines_train_both(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    rules = dict(path='**', type=PLUG)
    vanilla, run = of_transformers('vit')
    space = dict(mmgate=mmgate, model=copy.deepcopy(vanilla), rules=rules, vanilla=copy.deepcopy(vanilla))
    imports, made, swapped, *saved = BLOCKS[0].strip().replace('\n\n', '\n').split('\n')
    steps = [made, swapped] if order == 'lora-first' else [swapped, made, *FREED]
    exec('\n'.join([imports, *steps]), space)
    model = space['model']
    trains = {name for name, one in model.named_parameters() if one.requires_grad}
    assert {name for name in trains if 'lora_' not in name} == {*mmgate.gate_parameters(model)}
    before = {name: one.clone() for name, one in model.named_parameters()}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):  # LoRA's second factor and the gates start at zero
        optimizer.zero_grad()
        sum(one.square().sum() for one in model(**hub_models.feed('vit')).to_tuple()).backward()
        optimizer.step()
    changed = {name for name, one in model.named_parameters() if not torch.equal(one, before[name])}
    assert changed <= trains and {'lora_A', 'lora_B', 'gate'} <= {part for name in changed for part in name.split('.')}
    expected = run(model.eval())
    exec('\n'.join(saved), space)
    loaded, restored, unloaded = BLOCKS[1].partition('mmgate.restore_attention')
    exec(loaded, space)
    assert_same(run(space['model'].eval()), expected)
    exec(restored + unloaded, space)
    assert_same(run(space['model']), run(vanilla))


def test_gates_alone_train_beside_frozen_updates() -> None:
    """Until they are removed; paths are those of the model without PEFT."""
    model = low_rank(of_transformers('vit')[0], ['q_proj'])
    names = mmgate.swap_attention(model, dict(path='layers.*.attention', type=PLUG))
    assert [one.path for one in mmgate.list_attention(model) if one.gate] == names
    assert set(mmgate.train_only_gates(model)) == {
        name.removeprefix('base_model.model.') for name in mmgate.gate_parameters(model)
    }
    assert not any(one.requires_grad for name, one in model.named_parameters() if 'lora_' in name)
    mmgate.restore_attention(model)
    assert all(one.requires_grad for name, one in model.named_parameters() if 'lora_' in name)


def test_layers_of_peft_without_a_model_of_peft(tmp_path: Path) -> None:
    vanilla, run = of_transformers('vit')
    config = LoraConfig(r=2, target_modules=['q_proj'], init_lora_weights=False)
    model = inject_adapter_in_model(config, copy.deepcopy(vanilla))
    mmgate.swap_attention(model, dict(path='**', type=PLUG))
    moved(model)
    both = run(model)
    for part in model.modules():
        if isinstance(part, BaseTunerLayer):
            part.enable_adapters(False)
    gates_alone = run(model)
    assert_apart(gates_alone, both)
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    mmgate.load_gates(vanilla, tmp_path / 'gates.safetensors')
    assert_same(run(vanilla), gates_alone)


def test_layers_that_peft_saves_whole_are_left_out_too(tmp_path: Path) -> None:
    vanilla, run = of_timm('vit')
    model = copy.deepcopy(vanilla)
    mmgate.swap_attention(model, dict(path='blocks.*.attn', type=PLUG))
    moved(model)
    expected = run(model)
    wrapped = get_peft_model(model, LoraConfig(r=2, target_modules=['qkv'], modules_to_save=['head']))
    mmgate.save_gates(wrapped, tmp_path / 'gates.safetensors')
    mmgate.load_gates(vanilla, tmp_path / 'gates.safetensors')
    assert_same(run(vanilla), expected)

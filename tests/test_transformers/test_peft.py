"""Gates beside PEFT's updates of low rank: trained together, each in its file, loaded and removed one by one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from functools import partial
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
Made = tuple[Any, Callable[[Any], list[Tensor]]]


def of_transformers(name: str) -> Made:
    # Sampling points that updates have moved far make much of a rounding.
    fed = {key: value.double() for key, value in hub_models.feed(name).items()}
    model: Any = hub_models.build(name).double()
    model._tied_weights_keys = None  # as the page has it for detectors
    return model, lambda model: hub_models.outputs(model, fed)


def of_torch() -> Made:
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval(), lambda model: [model(x)]


def of_timm() -> Made:
    model, images = timm_models.build('vit')
    return model, lambda model: [model(images)]


DETECTOR, VIT = partial(of_transformers, 'deformable_detr'), partial(of_transformers, 'vit')
SAMPLED = ['q_proj', 'v_proj', 'value_proj', 'sampling_offsets']
# The model, the layers that get updates of low rank, and the rules.
CASES: dict[str, tuple[Callable[[], Made], list[str] | str, Any]] = {
    'deformable': (DETECTOR, SAMPLED, DEFORMABLE_DETR),
    'every-linear-layer': (DETECTOR, 'all-linear', DEFORMABLE_DETR),
    'interface': (VIT, ['q_proj', 'o_proj'], dict(path='**', type=PLUG)),
    'after-the-projection': (VIT, ['q_proj', 'o_proj'], dict(G5, path='**')),
    'torch': (of_torch, ['self_attn', 'linear1'], dict(path='layers.*.self_attn', type=PLUG)),
    'timm': (of_timm, ['qkv', 'proj'], dict(path='blocks.*.attn', type=PLUG)),  # and another head
}
ORDERS = ('gates-first', 'lora-first')


def assert_same(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def assert_apart(found: list[Tensor], expected: list[Tensor]) -> None:
    assert max((a - b).abs().max() for a, b in zip(found, expected, strict=True)) > 1e-3


@pytest.mark.parametrize('name, order', [
    (name, order) for name in CASES for order in ORDERS if (name, order) != ('torch', 'gates-first')
])  # fmt: skip
def test_each_is_saved_loaded_and_removed_without_the_other(
    name: str, order: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The gates' file is of the vanilla model's values, those of a layer that PEFT saves whole included."""
    make, targets, rules = CASES[name]
    vanilla, run = make()
    plain = run(vanilla)
    model = copy.deepcopy(vanilla)
    whole = ['head'] if name == 'timm' else None
    config = LoraConfig(r=2, init_lora_weights=False, target_modules=targets, modules_to_save=whole)
    if order == 'gates-first':
        names = mmgate.swap_attention(model, rules)
        model = get_peft_model(model, config)
    else:
        model = get_peft_model(model, config)
        names = mmgate.swap_attention(model, rules)
    for parameter in mmgate.gate_parameters(model).values():
        parameter.data.add_(0.3 * torch.randn_like(parameter))
    both = run(model)
    assert_apart(both, plain)
    model.save_pretrained(tmp_path / 'lora')
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    updates = load_file(tmp_path / 'lora/adapter_model.safetensors')
    assert updates and all('.lora_' in key or '.head.' in key for key in updates)

    def with_updates(model: Any) -> Any:
        return PeftModel.from_pretrained(model, tmp_path / 'lora').eval()

    # The gates alone, then with the updates.
    fresh = copy.deepcopy(vanilla)
    mmgate.load_gates(fresh, tmp_path / 'gates.safetensors')
    assert load_file(tmp_path / 'gates.safetensors').keys() == mmgate.gate_parameters(fresh).keys()
    assert 'other values' not in caplog.text
    gates_alone = run(fresh)
    assert_apart(gates_alone, plain)
    assert_apart(gates_alone, both)
    if name != 'torch':
        assert_same(run(with_updates(fresh)), both)
    if whole:
        changed = copy.deepcopy(vanilla)
        changed.head.bias.data += 1.0
        mmgate.load_gates(changed, tmp_path / 'gates.safetensors')
        assert 'other values: 1 of' in caplog.text and 'head.bias' in caplog.text
    # The other way round; updates of the gates' layers need the gates.
    if name != 'every-linear-layer':
        other = with_updates(copy.deepcopy(vanilla))
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
    assert sorted(mmgate.restore_attention(model)) == sorted(names)
    assert_same(run(model), plain)
    assert model.state_dict().keys() == vanilla.state_dict().keys()


PAGE = (ROOT / 'docs/adapters.md').read_text()
BLOCKS = re.findall(r'```python\n(.*?)```', PAGE.partition('## Beside LoRA')[2], re.S)[:2]
FREED = re.findall(r'`(for gate in .*?)`', PAGE)


@pytest.mark.parametrize('order', ORDERS)
def test_the_pages_lines_train_both(order: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or gates alone, until they are removed; paths are those of the model without PEFT."""
    monkeypatch.chdir(tmp_path)
    vanilla, run = of_transformers('vit')
    rules = dict(path='layers.*.attention', type=PLUG)
    space = dict(mmgate=mmgate, model=copy.deepcopy(vanilla), rules=rules, vanilla=copy.deepcopy(vanilla))
    imports, made, swapped, *saved = BLOCKS[0].strip().replace('\n\n', '\n').split('\n')
    steps = [made, swapped] if order == 'lora-first' else [swapped, made, *FREED]
    exec('\n'.join([imports, *steps]), space)
    model = space['model']
    low_rank = {name for name, _ in model.named_parameters() if 'lora_' in name}
    trains = {name: one.clone() for name, one in model.named_parameters() if one.requires_grad}
    assert trains.keys() - low_rank == {*mmgate.gate_parameters(model)}
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.1)
    for _ in range(2):  # LoRA's second factor and the gates start at zero
        optimizer.zero_grad()
        sum(one.square().sum() for one in model(**hub_models.feed('vit')).to_tuple()).backward()
        optimizer.step()
    changed = {name for name, one in trains.items() if not torch.equal(one, model.get_parameter(name))}
    assert {'lora_A', 'lora_B', 'gate'} <= {part for name in changed for part in name.split('.')}
    expected = run(model.eval())
    exec('\n'.join(saved), space)
    gates = {name.removeprefix('base_model.model.') for name in mmgate.gate_parameters(model)}
    assert set(mmgate.train_only_gates(model)) == gates
    assert not any(model.get_parameter(name).requires_grad for name in low_rank)
    assert all(name.startswith('layers.') for name in mmgate.restore_attention(model))
    assert all(model.get_parameter(name).requires_grad for name in low_rank)
    loaded, restored, unloaded = BLOCKS[1].partition('mmgate.restore_attention')
    exec(loaded, space)
    assert_same(run(space['model'].eval()), expected)
    exec(restored + unloaded, space)
    assert_same(run(space['model']), run(vanilla))

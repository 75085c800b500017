"""Gates that are switched off, and gates that are taken off."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finetuned import PLUG, layers
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from torch import Tensor, nn
from torch.nn.utils import prune

import mmgate
from mmgate import removal
from mmgate.adapter import is_off
from mmgate.errors import ConfigError


@pytest.mark.parametrize('torch_is, part', [((2, 6), ''), ((2, 6), '1.attn'), ((2, 7), '1.attn')])
def test_gates_of_a_compiled_model_are_disabled_where_graphs_ask_for_them(
    torch_is: tuple[int, int], part: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert tuple(map(int, torch.__version__.split('.')[:2])) == removal.TORCH
    monkeypatch.setattr(removal, 'TORCH', torch_is)
    model = layers()
    model.get_submodule(part).compile(backend='eager')
    refused = pytest.raises(ConfigError, match=f'{part or "the model"} is compiled, and graphs of torch 2.6 run with')
    with refused if torch_is < (2, 7) else nullcontext(), mmgate.gates_disabled(model):
        assert is_off(model[0].attn) and is_off(model[1].attn)


def test_trained_tensors_are_forgotten_with_the_gates(tmp_path: Path) -> None:
    """No hook of an earlier file, nor one of gates that were taken off, has a say in what is loaded."""
    model, plain = layers(), layers(())
    trained, gates = tmp_path / 'trained.safetensors', tmp_path / 'gates.safetensors'
    mmgate.save_gates(model, gates)
    mmgate.train_only_gates(model, 'attention')
    for parameter in model.parameters():
        parameter.data += 1
    mmgate.save_gates(model, trained)
    for then in (lambda other: mmgate.load_gates(other, gates), mmgate.restore_attention):
        other = layers(())
        mmgate.load_gates(other, trained)
        then(other)
        other.load_state_dict(plain.state_dict(), strict=False)
        state = other.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in plain.state_dict().items())


@pytest.mark.parametrize('nested', [True, False])
def test_a_part_of_a_gated_model_takes_its_gates_off_and_is_gated_anew(nested: bool) -> None:
    """By names of its own; it computes by torch's nested tensors meanwhile, if it did, which gates switch off."""

    def encoder() -> nn.TransformerEncoder:
        layer = nn.TransformerEncoderLayer(16, 2, batch_first=True)
        return nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested)

    model = nn.ModuleDict(dict(part=encoder(), other=encoder()))
    part, names = model['part'], [f'layers.{number}.self_attn' for number in range(2)]
    attributes = vars(part).keys()
    for name in names:
        mmgate.swap_attention(model, dict(PLUG, path=f'**.{name}'))
        assert not part.use_nested_tensor
    assert mmgate.restore_attention(part) == names
    assert part.use_nested_tensor == nested and vars(part).keys() == attributes
    mmgate.swap_attention(part, dict(PLUG, path='**.self_attn'))
    assert sorted(mmgate.restore_attention(model)) == [f'{one}.{name}' for one in ('other', 'part') for name in names]


def test_a_shallow_copy_beside_its_original_is_off_with_it() -> None:
    """Also in another thread, in which no gate was off before."""
    attn = layers()[0].attn
    both, x = nn.ModuleList([attn, copy.copy(attn)]), torch.randn(1, 3, 16)

    def outputs() -> list[Tensor]:
        return [module(x, x, x)[0] for module in both]

    def off() -> list[Tensor]:
        with mmgate.gates_disabled(both):
            return outputs()

    with ThreadPoolExecutor(1) as other:
        for one, copied in (off(), other.submit(off).result()):
            assert torch.equal(one, copied) and not torch.equal(one, outputs()[0])
    assert torch.equal(*outputs())


@pytest.mark.parametrize('before', [[], ['attn.sr'], ['attn']], ids=['trained', 'in part', 'frozen'])
@pytest.mark.parametrize('after', [[], ['attn.attn.in_proj_weight'], ['attn']], ids=['none', 'one', 'all'])
def test_what_was_frozen_before_or_after_gating_stays_frozen(before: list[str], after: list[str]) -> None:
    """A detector freezes its teacher, and PEFT what it updates, after the gates are in."""
    model: Any = nn.ModuleDict(dict(attn=SpatialReductionAttention(16, 2, sr_ratio=2), head=nn.Linear(2, 2)))

    def freeze(names: list[str]) -> None:
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(parameter.requires_grad and not name.startswith(tuple(names)))

    freeze(before)
    mmgate.swap_attention(model, dict(type='AgentAttention', agent_num=4, map_size=(8, 8), path='attn'))
    freeze(after)
    prune.identity(model['attn'].norm, 'weight')  # a layer that the gate replaces, whose weight has another name now
    assert mmgate.restore_attention(model) == ['attn'] and not mmgate.gate_parameters(model)
    assert {parameter.requires_grad for parameter in model['attn'].sr.parameters()} == {before == after == []}
    assert all(parameter.requires_grad for parameter in model['head'].parameters())


def test_the_name_of_a_rule_comes_back_though_the_host_was_compiled_since() -> None:
    model: Any = nn.ModuleDict(dict(outer=MultiheadAttention(16, 4)))
    assert mmgate.swap_attention(model, dict(PLUG, path='outer')) == ['outer']
    model['outer'].attn = torch.compile(model['outer'].attn)
    assert mmgate.restore_attention(model) == ['outer']

"""Gates that are switched off, and gates that are taken off."""

from __future__ import annotations

import copy
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finetuned import layers
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from torch import nn
from torch.nn.utils import prune

import mmgate
from mmgate import removal
from mmgate.adapter import is_off
from mmgate.errors import ConfigError


def test_a_mode_that_is_set_while_gates_are_disabled_stays() -> None:
    model, x = layers(dropout=0.5).train(), torch.randn(1, 3, 16)
    with mmgate.gates_disabled(model):
        model.eval()
    assert torch.equal(model(x), model(x)) and not any(module.training for module in model.modules())


def test_gates_are_on_again_after_an_error() -> None:
    model, x = layers(), torch.randn(1, 3, 16)
    expected = model(x)
    with pytest.raises(KeyError), mmgate.gates_disabled(model):
        assert not torch.equal(model(x), expected)
        raise KeyError
    assert torch.equal(model(x), expected)


@pytest.mark.parametrize('torch_is', [(2, 6), (2, 7), (3, 0)])
@pytest.mark.parametrize('part', ['', '1.attn'])
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


def test_a_part_that_is_gated_anew_belongs_to_its_new_rule() -> None:
    """The rule of the model around it has gated it before."""
    model = nn.ModuleDict(dict(part=nn.TransformerEncoderLayer(16, 2), other=nn.TransformerEncoderLayer(16, 2)))
    names = list(model.state_dict())
    rule = dict(type='PLuGMultiheadAttention', path='**.self_attn')
    mmgate.swap_attention(model, rule)
    assert mmgate.restore_attention(model['part']) == ['self_attn']
    mmgate.swap_attention(model['part'], rule)
    assert sorted(mmgate.restore_attention(model)) == ['other.self_attn', 'part.self_attn']
    assert list(model.state_dict()) == names and 'init_weights' not in vars(model)


def test_a_part_of_a_gated_model_takes_its_gates_off() -> None:
    """And computes by torch's nested tensors again, which the gates had switched off."""
    part = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, batch_first=True), 1)
    nested = part.use_nested_tensor
    mmgate.swap_attention(nn.ModuleDict(dict(part=part)), dict(type='PLuGMultiheadAttention', path='**.self_attn'))
    assert nested and not part.use_nested_tensor
    assert mmgate.restore_attention(part) == ['layers.0.self_attn'] and part.use_nested_tensor


def test_methods_of_ones_own_on_a_model_stay() -> None:
    model = layers(())
    model.apply = apply = lambda fn: nn.Module.apply(model, fn)
    mmgate.swap_attention(model, dict(path='*.attn', type='PLuGMultiheadAttention'))
    mmgate.restore_attention(model)
    assert vars(model)['apply'] is apply and 'init_weights' not in vars(model)


def test_a_shallow_copy_beside_its_original_is_off_with_it() -> None:
    attn = layers()[0].attn
    both, x = nn.ModuleList([attn, copy.copy(attn)]), torch.randn(1, 3, 16)
    with mmgate.gates_disabled(both):
        off = [module(x, x, x)[0] for module in both]
    on = attn(x, x, x)[0]
    assert torch.equal(*off) and not torch.equal(off[0], on) and torch.equal(both[1](x, x, x)[0], on)


class Reduced(nn.Module):
    """Attention with a layer that its gate replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = SpatialReductionAttention(16, 2, sr_ratio=2)


@pytest.mark.parametrize('froze', [[], ['attn.attn.in_proj_weight'], None], ids=['none', 'one', 'all'])
def test_what_was_frozen_after_gating_stays_frozen(froze: list[str] | None) -> None:
    """A detector freezes its teacher, and PEFT what it updates, after the gates are in."""
    model = Reduced()
    mmgate.swap_attention(model, dict(type='AgentAttention', agent_num=4, map_size=(8, 8), path='attn'))
    for name, parameter in model.named_parameters():
        if froze is None or name in froze:
            parameter.requires_grad_(False)
    mmgate.restore_attention(model)
    reduction = {parameter.requires_grad for name, parameter in model.named_parameters() if '.sr.' in name}
    assert reduction == {froze == []}


def test_gates_come_off_beside_a_layer_that_others_have_changed() -> None:
    """Pruning gives the weight that the gate replaces another name."""
    model = Reduced()
    mmgate.swap_attention(model, dict(type='AgentAttention', agent_num=4, map_size=(8, 8), path='attn'))
    prune.identity(model.attn.sr, 'weight')
    assert mmgate.restore_attention(model) == ['attn'] and not mmgate.gate_parameters(model)


def test_the_name_of_a_rule_comes_back_though_the_host_was_compiled_since() -> None:
    model: Any = nn.ModuleDict(dict(outer=MultiheadAttention(16, 4)))
    rule = dict(type='PLuGMultiheadAttention', path='outer')
    assert mmgate.swap_attention(model, rule) == ['outer']
    model['outer'].attn = torch.compile(model['outer'].attn)
    assert mmgate.restore_attention(model) == ['outer']

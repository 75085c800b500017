"""Files of gates: what they hold, which models they fit, and what is refused."""

from __future__ import annotations

import copy
import json
from itertools import cycle, product
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finetuned import HOSTS, PLUG, config, describe_anew, gated, layers, outputs, snapshot, train, vanilla
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmengine.registry import MODELS
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import mmgate
from mmgate import removal
from mmgate.errors import ConfigError
from mmgate.gates import PLuGGate

ROUNDING = dict(rtol=1e-5, atol=1e-5)  # products round by where in memory their factors lie


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    said: list[str] = []
    monkeypatch.setattr('mmgate.checkpoints.gates_file.log', lambda text, level: said.append(text))
    return said


# each host once, what trains by turns; the largest is as the one before
FIRST = list(zip(HOSTS[:-1], cycle(['gates', 'attention']), strict=False))


@pytest.mark.parametrize(
    'host, trained',
    [pytest.param(*x, marks=[pytest.mark.slow] * (x not in FIRST)) for x in product(HOSTS, ['gates', 'attention'])],
)
def test_a_file_holds_what_was_trained(host: str, trained: str, tmp_path: Path, warned: list[str]) -> None:
    """The rest is equal bit for bit, weight decay and batch norms included; the file gates a vanilla model."""
    model = gated(host, train=trained)
    plain, before = vanilla(host), snapshot(model)
    gates = set(mmgate.gate_parameters(model))
    chosen = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert chosen == gates if trained == 'gates' else chosen > gates
    train(model, host)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved <= chosen and moved & gates
    expected, file = outputs(model, host), tmp_path / 'gates.safetensors'
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == chosen
    from_file = gated(host, attention=None, gates=str(file))
    with mmgate.gates_disabled(from_file):
        kept = from_file.state_dict()
    kept.update(from_file.state_dict())
    assert all(torch.equal(kept[name], tensor) for name, tensor in load_file(file).items())  # no initialisation drew it
    from_file.load_state_dict(plain.state_dict(), strict=False)  # a vanilla checkpoint, after the gates
    other = gated(host, seed=1)
    other.load_state_dict(plain.state_dict(), strict=False)
    mmgate.load_gates(other, file)
    for loaded in (from_file, other):
        torch.testing.assert_close(outputs(loaded, host), expected, rtol=0, atol=0)
    assert not warned
    with mmgate.gates_disabled(model):
        without = outputs(model, host)
    torch.testing.assert_close(outputs(model, host), expected, rtol=0, atol=0)
    removed = mmgate.restore_attention(model)
    assert removed and not mmgate.gate_parameters(model)
    torch.testing.assert_close(outputs(model, host), without, **ROUNDING)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    if trained == 'gates':
        torch.testing.assert_close(without, outputs(plain, host), **ROUNDING)
        assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


def test_a_model_for_other_classes_takes_the_gates(tmp_path: Path, warned: list[str]) -> None:
    """A head that trained with them stays out, with one warning; other sizes inside the attention are an error."""
    model, file = gated('segformer', train='gates'), tmp_path / 'g.safetensors'
    model.decode_head.conv_seg.requires_grad_(True)
    mmgate.save_gates(model, file)
    cfg = copy.deepcopy(config('segformer'))
    cfg.decode_head.num_classes = 7
    other = MODELS.build(cfg)
    assert set(mmgate.load_gates(other, file)) == mmgate.gate_parameters(model).keys()
    assert 'decode_head.conv_seg.weight is (7, 256, 1, 1) instead of (' in warned[0]
    assert len([said for said in warned if 'are left out' in said]) == 1
    other.init_weights()
    other.load_state_dict(vanilla('segformer').backbone.state_dict(prefix='backbone.'), strict=False)
    found = mmgate.gate_parameters(other)
    assert all(torch.equal(gate, found[name]) for name, gate in mmgate.gate_parameters(model).items())
    mmgate.train_only_gates(model, 'attention')
    mmgate.save_gates(model, file)
    cfg.backbone.embed_dims = 16
    other = MODELS.build(cfg)
    with pytest.raises(ConfigError, match=r'attention of other sizes .* is \(48, 16\) instead of .* and \d+ more'):
        mmgate.load_gates(other, file)
    assert not mmgate.gate_parameters(other)


def test_gates_that_a_model_has_are_those_of_the_file(tmp_path: Path) -> None:
    model, file = layers(), tmp_path / 'g.safetensors'
    mmgate.save_gates(model, file)
    for rule in (dict(PLUG, gml='product'), dict(PLUG, path='0.attn', type='mmgate.SDPAGatedMultiheadAttention')):
        other = layers(rule)
        kept = snapshot(other)
        with pytest.raises(ConfigError, match=r'0\.attn has .* instead of .*PLuG.*Leave `attention` away'):
            mmgate.load_gates(other, file)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in other.state_dict().items())
    mmgate.save_gates(layers(dict(PLUG, path='0.attn')), file)
    with pytest.raises(ConfigError, match=r'1\.attn has .* instead of None'):
        mmgate.load_gates(model, file)


def test_layers_that_were_cut(tmp_path: Path) -> None:
    """A file has the places that are left, by their names now, and fits a model that was cut alike."""
    model, file, x = layers(dict(PLUG, path='1.attn')), tmp_path / 'g.safetensors', torch.randn(1, 3, 16)
    del model[0]
    mmgate.save_gates(model, file)
    other = layers(())
    del other[0]
    mmgate.load_gates(other, file)
    assert torch.equal(other(x), model(x))
    assert mmgate.restore_attention(other) == ['0.attn']
    mmgate.save_gates(layers(), file)
    with pytest.raises(
        ConfigError, match=r'holds gates of 1\.attn, where this model has no attention.* layers were cut'
    ):
        mmgate.load_gates(other, file)


def test_gates_of_a_part_are_in_the_file_of_the_whole(tmp_path: Path) -> None:
    """A part that was built with gates is filled; gates that are not there yet are put in."""
    rules, file, x = dict(PLUG, path='0.attn'), tmp_path / 'g.safetensors', torch.randn(1, 3, 16)
    model, other = (nn.ModuleDict(dict(backbone=layers(rules), head=layers(()))) for _ in range(2))
    mmgate.swap_attention(model, dict(PLUG, path='head.1.attn', gml='product'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter)
    mmgate.save_gates(model, file)
    plain = nn.ModuleDict(dict(backbone=layers(()), head=layers(())))
    for loaded in (other, plain):
        assert set(mmgate.load_gates(loaded, file)) == mmgate.gate_parameters(model).keys()
        for part in model:
            torch.testing.assert_close(loaded[part](x), model[part](x), rtol=0, atol=0)
    assert mmgate.restore_attention(plain) == ['backbone.0.attn', 'head.1.attn']


def test_a_file_of_version_1(tmp_path: Path) -> None:
    """It has patterns instead of places, in which ``**`` was any text; here by the names that 0.2.0 gave its fields."""
    file, x = tmp_path / 'g.safetensors', torch.randn(1, 3, 16)
    sdpa = dict(type='mmgate.SDPAGatedMultiheadAttention')
    model = nn.Sequential(layers([dict(PLUG, path='0.attn'), dict(sdpa, path='1.attn')]))
    mmgate.save_gates(model, file)
    old = dict(version=1, host='Sequential', shapes={'0.1.attn.out_proj.bias': [16]}, places=None)
    rules = [
        dict(PLUG, path=['0**attn']),
        dict(type=PLUG['type'], gml='product', path=['8.*', '*.norm']),
        dict(sdpa, path=['**']),
    ]
    describe_anew(file, **old, rules={'0': [rules[0], rules[2]]})
    for _ in range(2):  # into a vanilla model, and into one that has the gates
        other = nn.Sequential(layers(()))
        for _ in range(2):
            mmgate.load_gates(other, file)
            torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)
        assert mmgate.restore_attention(other) == ['0.0.attn', '0.1.attn']
    with pytest.raises(ConfigError, match=r"0\.0\.attn has .*'product'.* instead of .*PLuG"):
        mmgate.load_gates(nn.Sequential(layers(dict(PLUG, gml='product'))), file)
    describe_anew(file, rules={'0': rules})
    with pytest.raises(ConfigError, match='a rule in it finds no attention in this model: .*product'):
        mmgate.load_gates(nn.Sequential(layers(())), file)


def test_a_file_of_version_1_with_a_rule_for_a_wrapper(tmp_path: Path) -> None:
    """Its gates' tensors have the names of the attention inside."""
    file = tmp_path / 'g.safetensors'
    model, other = (nn.Sequential(nn.ModuleDict(dict(attn=MultiheadAttention(16, 2)))) for _ in range(2))
    mmgate.swap_attention(model, dict(PLUG, path='0.attn'))
    mmgate.save_gates(model, file)
    describe_anew(file, version=1, host='Sequential', shapes={}, places=None, rules={'': [dict(PLUG, path=['*.attn'])]})
    for _ in range(2):
        assert set(mmgate.load_gates(other, file)) == mmgate.gate_parameters(model).keys()
    assert mmgate.restore_attention(other) == ['0.attn']


def test_a_file_may_name_the_map_that_the_model_tells(tmp_path: Path) -> None:
    """As those of 0.2.0 did, with the class token: it fits the model with its gates in, and a vanilla one."""
    file, x = tmp_path / 'g.safetensors', torch.randn(1, 3, 32, 32)
    small = dict(type='mmgate.PVT', num_layers=[1], embed_dims=16, num_heads=[2], pretrain_img_size=32)
    small.update(out_indices=[0], mlp_ratios=[1], patch_sizes=[4], strides=[4], paddings=[0])
    own = dict(type='mmgate.SAGAAttention')
    model = MODELS.build(dict(small, attention=own)).eval()
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter)
    mmgate.save_gates(model, file)
    rule = dict(own, map_size=[8, 8], class_token=False, path=['layers.0.1.*.attn'])
    describe_anew(file, version=1, host='PVT', shapes={}, places=None, rules={'': [rule]})
    for attention in (own, None):
        other = MODELS.build(dict(small, attention=attention)).eval()
        other.load_state_dict(model.state_dict(), strict=False)
        mmgate.load_gates(other, file)
        torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize('version', [1, 2])
def test_a_file_fits_a_model_that_tells_no_map(version: int, tmp_path: Path) -> None:
    """A new file has the map; one of 0.2.0 has none where images were taken as of 224 pixels."""
    file, x = tmp_path / 'g.safetensors', torch.randn(1, 3, 64, 64)
    swin = dict(type='mmdet.SwinTransformer', depths=(2, 2, 2, 2), embed_dims=24)
    rule = dict(path='stages.*.blocks.*.attn', type='mmgate.SAGAAttention')
    model = MODELS.build(swin)
    model.eval()
    mmgate.swap_attention(model, dict(rule, image_size=224 if version == 1 else (128, 256)))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    mmgate.save_gates(model, file)
    assert {tuple(one['map_size']) for one in places(file).values()} >= {(56, 56) if version == 1 else (32, 64)}
    if version == 1:
        rules = [dict(rule, path=[rule['path']])]
        describe_anew(file, version=1, host='SwinTransformer', shapes={}, places=None, rules={'': rules})
    other = MODELS.build(swin)
    other.eval()
    other.load_state_dict(model.state_dict(), strict=False)
    mmgate.load_gates(other, file)
    torch.testing.assert_close(other(x), model(x), rtol=0, atol=0)


def places(file: Path) -> dict[str, Any]:
    """Return what a file says of its gates, by their places."""
    with safe_open(file, framework='pt') as opened:
        return json.loads(opened.metadata()['mmgate.gates'])['places']


def test_gates_without_parameters_in_a_file_of_version_1(tmp_path: Path) -> None:
    """No tensor of theirs tells the module."""

    def made(*rules: dict[str, Any]) -> nn.ModuleDict:
        torch.manual_seed(0)
        model = nn.ModuleDict(dict(mapped=SpatialReductionAttention(16, 2, sr_ratio=2), layer=layers(())))
        for rule in rules:
            mmgate.swap_attention(model, rule)
        return model

    free, plug = dict(path='mapped', type='mmgate.SoftmaxAttention'), dict(PLUG, path='layer.*.attn')
    file = tmp_path / 'g.safetensors'
    mmgate.save_gates(made(free, plug), file)
    rules = [dict(rule, path=[rule['path']]) for rule in (free, plug)]
    describe_anew(file, version=1, host='ModuleDict', shapes={}, places=None, rules={'': rules})
    for other in (made(), made(free, plug)):
        mmgate.load_gates(other, file)
        assert mmgate.restore_attention(other) == ['mapped', 'layer.0.attn', 'layer.1.attn']


def test_equal_rules_are_told_as_equal(tmp_path: Path) -> None:
    """Tuples are lists in JSON, one path is a list of one, a gate's name may lack its scope, a backend says nothing."""
    model, file = layers(dict(PLUG, backend='chunked')), tmp_path / 'g.safetensors'
    mmgate.save_gates(model, file)
    other = layers(dict(path=('*.attn',), type='PLuGMultiheadAttention'))
    assert mmgate.load_gates(other, file)
    plain = layers(())
    mmgate.load_gates(plain, file)
    assert plain[0].attn.gate.backend == 'auto'
    backbone = dict(type='mmgate.AgentPVT', num_layers=(1, 1, 1, 1), embed_dims=8, num_heads=(1, 1, 1, 1))
    preset = MODELS.build(backbone)
    preset.init_weights()
    mmgate.save_gates(preset, file)
    again = MODELS.build(backbone)
    assert mmgate.load_gates(again, file)
    added = mmgate.gate_parameters(preset)
    assert all(torch.equal(p, added[name]) for name, p in mmgate.gate_parameters(again).items())


def test_a_file_of_trained_attention_leaves_what_a_checkpoint_has_filled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What gates replace does not train, and so is not in the file."""
    said: list[str] = []
    monkeypatch.setattr(removal, 'log', lambda text, level: said.append(text))
    model, file = gated('retinanet_pvtv2', train='attention'), tmp_path / 'g.safetensors'
    mmgate.save_gates(model, file)
    other = gated('retinanet_pvtv2')
    other.load_state_dict(vanilla('retinanet_pvtv2').state_dict(), strict=False)
    mmgate.load_gates(other, file)
    mmgate.restore_attention(other)
    assert not said


def test_a_place_is_the_name_that_the_rule_chose(tmp_path: Path) -> None:
    """Not that of the attention inside the wrapper, so that the model is gated by the file as by the rule."""
    file, rule = tmp_path / 'g.safetensors', dict(PLUG, path='attn')
    model, other = (nn.ModuleDict(dict(attn=MultiheadAttention(16, 2))) for _ in range(2))
    mmgate.swap_attention(model, rule)
    mmgate.save_gates(model, file)
    assert list(places(file)) == ['attn']
    mmgate.load_gates(other, file)
    assert mmgate.restore_attention(other) == ['attn']


class OfAProject(PLuGGate):
    """A gate of a downstream project."""


def test_a_gate_of_another_package_is_named_as_it_is_registered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the file, whether the rule has its class or its name; a class without a name is refused."""
    file = tmp_path / 'g.safetensors'
    with pytest.raises(ConfigError, match='OfAProject has no registered name; register it'):
        mmgate.save_gates(layers(dict(path='0.attn', type=OfAProject)), file)
    monkeypatch.setitem(MODELS._module_dict, 'OfAProject', OfAProject)
    for named in (OfAProject, 'OfAProject'):
        mmgate.save_gates(layers(dict(path='0.attn', type=named)), file)
        assert places(file) == {'0.attn': dict(type='OfAProject')}
        other = layers(())
        mmgate.load_gates(other, file)
        assert type(other[0].attn.gate) is OfAProject


def test_gates_of_several_calls_are_one_file(tmp_path: Path) -> None:
    rules = [dict(PLUG, path='0.attn'), dict(path='**', type='mmgate.SDPAGatedMultiheadAttention')]
    model, file, x = layers(rules), tmp_path / 'g.safetensors', torch.randn(1, 3, 16)
    for saved, other in ((model, layers(())), (nn.Sequential(model), nn.Sequential(layers(())))):
        mmgate.save_gates(saved, file)  # the second is a model that was swapped in a part
        mmgate.load_gates(other, file)
        torch.testing.assert_close(other(x), saved(x))


@pytest.mark.parametrize('wrap', [nn.DataParallel, lambda model: model], ids=['wrapped', 'part'])
def test_what_trains_is_saved_wherever_it_was_said(wrap: Any, tmp_path: Path) -> None:
    model, file = nn.Sequential(nn.Linear(2, 2), layers()), tmp_path / 'g.safetensors'
    mmgate.train_only_gates(wrap(model[1]), 'attention')
    model[0].requires_grad_(False)
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.mark.parametrize('norm', [nn.utils.weight_norm, nn.utils.parametrizations.orthogonal])
def test_gates_of_a_parametrized_model_go_into_a_file_and_come_off(norm: Any, tmp_path: Path) -> None:
    """The gates go into a file for models that are parametrized or not, and come off."""
    model, other, x, file = layers(), layers(()), torch.randn(1, 3, 16), tmp_path / 'g.safetensors'
    names = list(mmgate.gate_parameters(model))
    for one in (model, other):
        norm(one[0].attn.out_proj)
    assert list(mmgate.gate_parameters(model)) == names
    vanilla = other(x)
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == set(names)
    mmgate.load_gates(other, file)
    torch.testing.assert_close(other(x), model(x))
    assert set(mmgate.load_gates(layers(()), file)) == set(names)
    mmgate.train_only_gates(model, 'attention')
    mmgate.save_gates(model, file)
    with pytest.raises(ConfigError, match=r'0\.attn\.out_proj\..* is missing instead of'):
        mmgate.load_gates(layers(()), file)
    for one in (model, other):
        mmgate.restore_attention(one)
        torch.testing.assert_close(one(x), vanilla)


def test_a_gated_checkpoint_fills_all_after_a_file(tmp_path: Path) -> None:
    """After a vanilla one the tensors that were trained with the gates would stay."""
    model, file = layers(), tmp_path / 'g.safetensors'
    mmgate.train_only_gates(model, 'attention')
    mmgate.save_gates(model, file)
    later = layers()
    for parameter in later.parameters():
        parameter.data += 1
    state = later.state_dict()
    other = layers(())
    mmgate.load_gates(other, file)
    for loaded in (copy.deepcopy(other), other):
        loaded.load_state_dict(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_an_error_in_a_gates_code_is_not_taken_for_a_file_that_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mmgate.save_gates(layers(), tmp_path / 'gates.safetensors')
    model = layers(())

    def fail(gate: PLuGGate) -> None:
        raise TypeError('a bug')

    monkeypatch.setattr(PLuGGate, 'reset', fail)
    with pytest.raises(TypeError, match='^a bug$') as info:
        mmgate.load_gates(model, tmp_path / 'gates.safetensors')
    assert not isinstance(info.value, ConfigError) and not mmgate.gate_parameters(model)


class _Noted(nn.Module):
    """A module that keeps something else than tensors in its state dict, as quantised layers do."""

    def get_extra_state(self) -> dict[str, int]:
        return dict(calls=3)

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == dict(calls=3)


def test_what_is_no_tensor_stays_out_of_a_file(tmp_path: Path) -> None:
    def model() -> nn.Module:
        torch.manual_seed(0)
        return nn.ModuleDict(dict(noted=_Noted(), attn=nn.MultiheadAttention(16, 2)))

    net, file = model(), tmp_path / 'gates.safetensors'
    mmgate.swap_attention(net, dict(PLUG, path='attn'))
    mmgate.save_gates(net, file)
    assert mmgate.load_gates(model(), file) == sorted(mmgate.gate_parameters(net))


def test_gates_without_values_are_not_saved(tmp_path: Path) -> None:
    net = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
    mmgate.swap_attention(net, dict(PLUG, path='attn'))
    net['attn'].out_proj.to('meta')
    mmgate.save_gates(net, tmp_path / 'gates.safetensors')
    net.to('meta')
    with pytest.raises(ConfigError, match='gates of this ModuleDict have no values here .* accelerate has offloaded'):
        mmgate.save_gates(net, tmp_path / 'others.safetensors')
    assert [path.name for path in tmp_path.iterdir()] == ['gates.safetensors']

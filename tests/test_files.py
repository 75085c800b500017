"""Files of gates: what they hold, which models they fit, and what is refused."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.finetuned import HOSTS, PLUG, config, describe_anew, gated, layers, outputs, snapshot, train, vanilla
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmengine.model import ExponentialMovingAverage
from mmengine.registry import MODELS
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import mmgate
from mmgate.errors import ConfigError
from mmgate.gates import PLuGGate

ROUNDING = dict(rtol=1e-5, atol=1e-5)  # products round by where in memory their factors lie
SDPA = dict(type='mmgate.SDPAGatedMultiheadAttention')
SAGA = dict(type='mmgate.SAGAAttention')


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / 'gates.safetensors'


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was logged of files, and of gates that come off."""
    said: list[str] = []
    for module in ('checkpoints.gates_file', 'removal'):
        monkeypatch.setattr(f'mmgate.{module}.log', lambda text, level: said.append(text))
    return said


def places(file: Path) -> dict[str, Any]:
    """Return what a file says of its gates, by their places."""
    with safe_open(file, framework='pt') as opened:
        return json.loads(opened.metadata()['mmgate.gates'])['places']


@pytest.mark.parametrize(
    'host, trained',
    [
        pytest.param(host, trained, marks=[pytest.mark.slow] * (host == HOSTS[-1]))  # the largest is as the one before
        for host, trained in zip(HOSTS, cycle(['attention', 'gates']), strict=False)
    ],
)
def test_a_file_holds_what_was_trained(host: str, trained: str, file: Path, warned: list[str]) -> None:
    """The rest is equal bit for bit, weight decay and batch norms included; the file gates a vanilla model."""
    model = gated(host, train=trained)
    plain, before = vanilla(host), snapshot(model)
    gates = set(mmgate.gate_parameters(model))
    chosen = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert chosen == gates if trained == 'gates' else chosen > gates
    train(model, host)
    moved = {name for name, tensor in model.state_dict().items() if not torch.equal(tensor, before[name])}
    assert moved <= chosen and moved & gates
    expected = outputs(model, host)
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
    again = file.with_name('again.safetensors')
    for loaded in (from_file, other):
        torch.testing.assert_close(outputs(loaded, host), expected, rtol=0, atol=0)
        mmgate.save_gates(loaded, again)
        assert set(load_file(again)) == chosen  # what came with a file trains no more here
    with mmgate.gates_disabled(model):
        without = outputs(model, host)
    torch.testing.assert_close(outputs(model, host), expected, rtol=0, atol=0)
    removed = mmgate.restore_attention(model)
    assert removed and not mmgate.gate_parameters(model) and mmgate.restore_attention(other) == removed
    assert not warned
    torch.testing.assert_close(outputs(model, host), without, **ROUNDING)
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in plain.parameters()]
    if trained == 'gates':
        torch.testing.assert_close(without, outputs(plain, host), **ROUNDING)
        assert all(torch.equal(t, plain.state_dict()[name]) for name, t in model.state_dict().items())


def test_a_model_for_other_classes_takes_the_gates(file: Path, warned: list[str]) -> None:
    """A head that trained with them stays out, with one warning; other sizes inside the attention are an error."""
    model = gated('segformer', train='gates')
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


def test_gates_that_a_model_has_are_those_of_the_file(file: Path) -> None:
    model = layers()
    mmgate.save_gates(model, file)
    for rule in (dict(PLUG, gml='product'), dict(SDPA, path='0.attn')):
        other = layers(rule)
        kept = snapshot(other)
        with pytest.raises(ConfigError, match=r'0\.attn has .* instead of .*PLuG.*Leave `attention` away'):
            mmgate.load_gates(other, file)
        assert all(torch.equal(tensor, kept[name]) for name, tensor in other.state_dict().items())
    mmgate.save_gates(layers(dict(PLUG, path='0.attn')), file)
    with pytest.raises(ConfigError, match=r'1\.attn has .* instead of None'):
        mmgate.load_gates(model, file)


def test_layers_that_were_cut(file: Path) -> None:
    """A file has the places that are left, by their names now, and fits a model that was cut alike."""
    model, x = layers(dict(PLUG, path='1.attn')), torch.randn(1, 3, 16)
    del model[0]
    mmgate.save_gates(model, file)
    other = layers(())
    del other[0]
    mmgate.load_gates(other, file)
    assert torch.equal(other(x), model(x))
    assert mmgate.restore_attention(other) == ['0.attn']
    mmgate.save_gates(layers(), file)
    message = r'holds gates of 1\.attn, where this model has no attention.* layers were cut'
    with pytest.raises(ConfigError, match=message):
        mmgate.load_gates(other, file)
    both = layers()
    mmgate.train_only_gates(both, 'attention')
    mmgate.save_gates(both, file)
    model = layers(())
    mmgate.load_gates(model, file)
    del model[0]
    with pytest.raises(
        ConfigError, match=r"1\.attn\.\S+ .*came with a gates file.*train_only_gates\(model, 'attention'\)"
    ):
        mmgate.save_gates(model, file)
    mmgate.train_only_gates(model, 'attention')
    mmgate.save_gates(model, file)
    mmgate.load_gates(other, file)
    assert torch.equal(other(x), model(x))


def test_gates_of_a_part_are_in_the_file_of_the_whole(file: Path) -> None:
    """A part that was built with gates is filled; gates that are not there yet are put in."""
    rules, x = dict(PLUG, path='0.attn'), torch.randn(1, 3, 16)
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


SMALL_PVT = dict(type='mmgate.PVT', num_layers=[1], embed_dims=16, num_heads=[2], pretrain_img_size=32, out_indices=[0])
SMALL_PVT.update(mlp_ratios=[1], patch_sizes=[4], strides=[4], paddings=[0])
SWIN = dict(type='mmdet.SwinTransformer', depths=(2, 2, 2, 2), embed_dims=24)
OF_PVT, OF_SWIN = (dict(SAGA, path=path) for path in ('layers.0.1.*.attn', 'stages.*.blocks.*.attn'))
FREE, PLAIN = dict(path='mapped', type='mmgate.SoftmaxAttention'), dict(PLUG, path='layer.*.attn')
# The model, its rules, and those of a file of version 1 by the path of the part to which they were given.
MODELS_OF_FILES: dict[str, tuple[Callable[[], nn.Module], list[dict[str, Any]], dict[str, list[dict[str, Any]]]]] = {
    'two gates': (
        lambda: nn.Sequential(layers(())),
        [dict(PLUG, path='0.0.attn'), dict(SDPA, path='0.1.attn')],
        {'0': [dict(PLUG, path='0**attn'), dict(SDPA, path='**')]},
    ),
    # Its tensors have the names of the attention inside, its place that which the rule chose.
    'a wrapper': (
        lambda: nn.Sequential(nn.ModuleDict(dict(attn=MultiheadAttention(16, 2)))),
        [dict(PLUG, path='0.attn')],
        {'': [dict(PLUG, path='*.attn')]},
    ),
    'a map that the model tells': (
        lambda: MODELS.build(SMALL_PVT),
        [OF_PVT],
        {'': [dict(OF_PVT, map_size=[8, 8], class_token=False)]},
    ),
    # In 0.2.0 images were taken as of 224 pixels.
    'a map that it does not tell': (lambda: MODELS.build(SWIN), [dict(OF_SWIN, image_size=224)], {'': [OF_SWIN]}),
    # No tensor tells the module.
    'a gate without parameters': (
        lambda: nn.ModuleDict(dict(mapped=SpatialReductionAttention(16, 2, sr_ratio=2), layer=layers(()))),
        [FREE, PLAIN],
        {'': [FREE, PLAIN]},
    ),
}


@pytest.mark.parametrize('version', [1, 2])
@pytest.mark.parametrize('name', MODELS_OF_FILES)
def test_a_file_fits_its_model_with_and_without_gates(name: str, version: int, file: Path) -> None:
    """One of version 1, of 0.2.0, has patterns instead of places, in which ``**`` was any text."""
    make, rules, patterns = MODELS_OF_FILES[name]
    model, vanilla, same = make(), make(), make()
    chosen = mmgate.swap_attention(model, rules)
    mmgate.swap_attention(same, rules)
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter)
    mmgate.save_gates(model, file)
    assert list(places(file)) == chosen
    if version == 1:
        listed = {part: [{**rule, 'path': [rule['path']]} for rule in given] for part, given in patterns.items()}
        describe_anew(file, version=1, host='X', shapes={}, places=None, rules=listed)
    for other in (vanilla, same):
        for _ in range(2):
            assert set(mmgate.load_gates(other, file)) == mmgate.gate_parameters(model).keys()
        found = mmgate.gate_parameters(other)
        assert all(torch.equal(gate, found[key]) for key, gate in mmgate.gate_parameters(model).items())
        maps = [[getattr(m, 'map_size', None) for m in one.modules()] for one in (model, other)]
        assert maps[0] == maps[1] and mmgate.restore_attention(other) == chosen


def test_what_a_file_of_version_1_does_not_fit(file: Path) -> None:
    mmgate.save_gates(layers(), file)
    rule = dict(PLUG, path=['*.attn'])
    describe_anew(file, version=1, host='Sequential', shapes={}, places=None, rules={'': [rule]})
    with pytest.raises(ConfigError, match=r"0\.attn has .*'product'.* instead of .*PLuG"):
        mmgate.load_gates(layers(dict(PLUG, gml='product')), file)
    describe_anew(file, rules={'': [rule, dict(PLUG, gml='product', path=['8.*', '*.norm'])]})
    with pytest.raises(ConfigError, match='a rule in it finds no attention in this model: .*product'):
        mmgate.load_gates(layers(()), file)


def test_equal_rules_are_told_as_equal(file: Path) -> None:
    """Tuples are lists in JSON, one path is a list of one, a gate's name may lack its scope, a backend says nothing."""
    mmgate.save_gates(layers(dict(PLUG, backend='chunked')), file)
    assert mmgate.load_gates(layers(dict(path=('*.attn',), type='PLuGMultiheadAttention')), file)
    plain = layers(())
    mmgate.load_gates(plain, file)
    assert plain[0].attn.gate.backend == 'auto'


class OfAProject(PLuGGate):
    """A gate of a downstream project."""


def test_a_gate_of_another_package_is_named_as_it_is_registered(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the file, whether the rule has its class or its name; a class without a name is refused."""
    with pytest.raises(ConfigError, match='OfAProject has no registered name; register it'):
        mmgate.save_gates(layers(dict(path='0.attn', type=OfAProject)), file)
    monkeypatch.setitem(MODELS._module_dict, 'OfAProject', OfAProject)
    for named in (OfAProject, 'OfAProject'):
        mmgate.save_gates(layers(dict(path='0.attn', type=named)), file)
        assert places(file) == {'0.attn': dict(type='OfAProject')}
        other = layers(())
        mmgate.load_gates(other, file)
        assert type(other[0].attn.gate) is OfAProject


@pytest.mark.parametrize('wrap', [nn.DataParallel, lambda model: model], ids=['wrapped', 'part'])
def test_what_trains_is_saved_wherever_it_was_said(wrap: Any, file: Path) -> None:
    model = nn.Sequential(nn.Linear(2, 2), layers())
    mmgate.train_only_gates(wrap(model[1]), 'attention')
    model[0].requires_grad_(False)
    mmgate.save_gates(model, file)
    assert set(load_file(file)) == {name for name, p in model.named_parameters() if p.requires_grad}


def test_norms_that_train_beside_gates_are_saved_with_their_statistics(file: Path) -> None:
    """A backbone trains its gates alone, and the head all it has."""
    model = nn.Sequential(layers(), nn.BatchNorm1d(3))
    mmgate.train_only_gates(model[0])
    model.train()(torch.randn(4, 3, 16) + 1)
    mmgate.save_gates(model, file)
    other = nn.Sequential(layers(()), nn.BatchNorm1d(3))
    other[0].load_state_dict(model[0].state_dict(), strict=False)
    mmgate.load_gates(other, file)
    x = torch.randn(2, 3, 16)
    torch.testing.assert_close(other.eval()(x), model.eval()(x), rtol=0, atol=0)


def test_a_frozen_copy_saves_the_attention_that_was_trained(file: Path) -> None:
    """mmengine's average of a model, for example."""
    model = layers()
    trained = mmgate.train_only_gates(model, 'attention')
    mmgate.save_gates(ExponentialMovingAverage(model), file)
    assert set(load_file(file)) == set(trained)


@pytest.mark.parametrize('norm', [nn.utils.weight_norm, nn.utils.parametrizations.orthogonal])
def test_gates_of_a_parametrized_model_go_into_a_file_and_come_off(norm: Any, file: Path) -> None:
    """The gates go into a file for models that are parametrized or not, and come off."""
    model, other, x = layers(), layers(()), torch.randn(1, 3, 16)
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


def test_a_gated_checkpoint_fills_all_after_a_file(file: Path) -> None:
    """After a vanilla one the tensors that were trained with the gates would stay."""
    model = layers()
    mmgate.train_only_gates(model, 'attention')
    mmgate.save_gates(model, file)
    state = {name: tensor + 1 for name, tensor in layers().state_dict().items()}
    other = layers(())
    mmgate.load_gates(other, file)
    for loaded in (copy.deepcopy(other), other):
        loaded.load_state_dict(state)
        assert all(torch.equal(tensor, state[name]) for name, tensor in loaded.state_dict().items())


def test_an_error_in_a_gates_code_is_not_taken_for_a_file_that_does_not_fit(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mmgate.save_gates(layers(), file)
    model = layers(())

    def fail(gate: PLuGGate) -> None:
        raise TypeError('a bug')

    monkeypatch.setattr(PLuGGate, 'reset', fail)
    with pytest.raises(TypeError, match='^a bug$') as info:
        mmgate.load_gates(model, file)
    assert not isinstance(info.value, ConfigError) and not mmgate.gate_parameters(model)


class Noted(nn.Module):
    """A module that keeps something else than tensors in its state dict, as quantised layers do."""

    def get_extra_state(self) -> dict[str, int]:
        return dict(calls=3)

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == dict(calls=3)


def test_what_has_no_values_stays_out_of_a_file(file: Path) -> None:
    """What is no tensor, and what accelerate has offloaded; not so the gates."""
    net = nn.ModuleDict(dict(noted=Noted(), layer=layers()))
    net['layer'][0].attn.out_proj.to('meta')
    mmgate.save_gates(net, file)
    plain = nn.ModuleDict(dict(noted=Noted(), layer=layers(())))
    assert mmgate.load_gates(plain, file) == sorted(mmgate.gate_parameters(net))
    net.to('meta')
    with pytest.raises(ConfigError, match='gates of this ModuleDict have no values here .* accelerate has offloaded'):
        mmgate.save_gates(net, file.with_name('others'))
    assert not file.with_name('others').exists()


PLACE = dict(type=PLUG['type'])
MISSING = 'tensors or types of gates are missing'
EXTRACT = r'whole checkpoint.*gates\.py extract CONFIG .*gates\.safetensors gates\.saf'


@pytest.mark.parametrize(
    ('spoil', 'message'),
    [
        (Path.unlink, 'no such file'),
        (lambda path: path.write_bytes(path.read_bytes()[:-100]), 'cannot be read as a file of gates'),
        (lambda path: save_file({'a': torch.zeros(1)}, path), 'no file of gates'),
        (lambda path: torch.save({}, path), EXTRACT),
        (lambda path: torch.save({}, path, _use_new_zipfile_serialization=False), 'whole checkpoint, no file of gates'),
        (lambda path: describe_anew(path, version=7, more=1), 'of version 7; this mmgate reads 1 and 2'),
        (lambda path: describe_anew(path, places='x'), 'damaged'),
        (lambda path: describe_anew(path, places={'0.attn': dict(ratio=0.5)}), MISSING),
        (lambda path: describe_anew(path, gates=['x.gml.weight']), MISSING),
        (lambda path: describe_anew(path, places={'0.mlp': PLACE, '2.attn': PLACE}), r'of 0\.mlp, 2\.attn, where'),
        (lambda path: describe_anew(path, places={'0': PLACE}), 'do not fit'),
        (lambda path: describe_anew(path, places={'0.attn': dict(PLACE, ratio=0.5)}), 'do not fit'),
    ],
    ids=['missing', 'cut', 'foreign', 'checkpoint', 'old checkpoint', 'version', 'description', 'type', 'tensors']
    + ['path', 'no attention', 'option'],
)
def test_a_bad_file_is_one_message(file: Path, spoil: Any, message: str) -> None:
    """And the model is as it was."""
    model = layers(())
    mmgate.save_gates(layers(), file)
    spoil(file)
    before = snapshot(model)
    with pytest.raises(ConfigError, match=message):
        mmgate.load_gates(model, file)
    assert not mmgate.gate_parameters(model) and type(model[0].attn) is nn.MultiheadAttention
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_other_vanilla_values_are_warned_of(file: Path, warned: list[str]) -> None:
    """Of the model and of a checkpoint that comes later; not of another dtype, nor by files that hold no checksums.

    Of many tensors some are compared, the last ones first, as of a head: backbones often are the same.
    """
    plain, other = layers(()), layers(())
    nn.init.zeros_(other[1].attn.out_proj.weight)
    mmgate.save_gates(layers(), file)
    mmgate.load_gates(layers(()), file)
    mmgate.load_gates(copy.deepcopy(other).half(), file)
    assert not warned
    model = copy.deepcopy(other)
    mmgate.load_gates(model, file)
    assert '1 of 8 tensors that were compared differ (1.attn.out_proj.weight)' in warned.pop()
    model = copy.deepcopy(model)
    for state, warnings in ((plain, 0), (other, 1), (model, 0)):  # the last has the gates
        model.load_state_dict(state.state_dict(), strict=False)
        assert len(warned) == warnings
        warned.clear()
    every = copy.deepcopy(plain)
    for parameter in every.parameters():
        parameter.data += 1
    mmgate.load_gates(every, file)
    assert '8 of 8 tensors that were compared differ' in warned.pop()
    describe_anew(file, values=None)
    mmgate.load_gates(other, file)
    assert not warned
    model = nn.Sequential(*layers(()), *(nn.Linear(16, 16) for _ in range(9)))
    other = copy.deepcopy(model)
    mmgate.swap_attention(model, PLUG)
    mmgate.save_gates(model, file)
    other[-1].bias.data += 1
    mmgate.load_gates(other, file)
    assert re.search(r'1 of \d+ tensors that were compared differ \(10\.bias\)', warned[0])

"""Gates in frozen parts of a model: what trains, what a teacher gets, and the warning of gates that rest."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from mmdet.engine.hooks import MeanTeacherHook
from mmdet.models.detectors import SemiBaseDetector
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmengine.model import ExponentialMovingAverage
from mmseg.models.backbones import SwinTransformer
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mmgate
from mmgate import frozen
from mmgate.adapter import unused_names
from mmgate.errors import ConfigError
from mmgate.registry import MODELS
from mmgate.wrappers import unwrap_model

AGENT = dict(type='AgentAttention', agent_num=4, map_size=(8, 8))
PLUG = dict(type='PLuGMultiheadAttention')


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    found: list[str] = []
    monkeypatch.setattr(frozen, 'log', lambda text, level=logging.INFO: found.append(text))
    yield found


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
        self.head = nn.Linear(16, 3)


class Semi(nn.Module):
    """A model of two copies, as mmdet's semi-supervised detectors are, or as a momentum encoder with its average."""

    def __init__(self, wrap: Callable[[nn.Module], Any] = lambda student: Net()) -> None:
        super().__init__()
        self.student = Net()
        self.teacher: Any = wrap(self.student)
        SemiBaseDetector.freeze(self.teacher)


@pytest.mark.parametrize(
    'train, wrap',
    [('all', lambda student: Net()), ('gates', AveragedModel), ('attention', lambda student: torch.compile(Net()))],
    ids=['plain', 'averaged', 'compiled'],
)
def test_gates_of_a_frozen_teacher_are_frozen_whatever_trains(train: str, wrap: Callable[[nn.Module], Any]) -> None:
    """DDP waits for a gradient of each tensor that trains; a step averages all of them."""
    model = Semi(wrap)
    names = mmgate.swap_attention(model, dict(PLUG, path='**.backbone.attn'))
    assert [name.partition('.')[0] for name in names] == ['student', 'teacher']
    mmgate.train_only_gates(model, train)
    for _ in range(2):
        model.eval().train()
        gates = mmgate.gate_parameters(model)
        assert {name.partition('.')[0] for name, gate in gates.items() if gate.requires_grad} == {'student'}
        assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    if wrap is AveragedModel:
        model.teacher.update_parameters(model.student)
    else:
        MeanTeacherHook().momentum_update(model, 1)
    state = model.student.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in unwrap_model(model.teacher).state_dict().items())


@pytest.mark.parametrize(
    'rules',
    [
        [dict(PLUG, path='student.backbone.**')],
        [dict(PLUG, path='teacher.backbone.**')],
        [dict(PLUG, path='student.**'), dict(PLUG, path='teacher.**', gml='sum')],
    ],
    ids=['student', 'teacher', 'options'],
)
def test_copies_that_are_averaged_are_gated_alike(rules: list[dict[str, Any]]) -> None:
    model = Semi()
    with pytest.raises(ConfigError, match=r'teacher is a frozen copy of student.* detector=dict'):
        mmgate.swap_attention(model, rules)
    assert not mmgate.gate_parameters(model)
    mmgate.swap_attention(model, [dict(PLUG, path='student.**'), dict(PLUG, path='teacher.**')])


def test_an_average_of_mmengine_is_made_of_a_gated_model() -> None:
    """It lists its tensors when it is made, and leaves out those that come later."""
    model = Semi()
    model.teacher = ExponentialMovingAverage(model.student)
    with pytest.raises(ConfigError, match='teacher is an average .ExponentialMovingAverage.* backbone=dict'):
        mmgate.swap_attention(model, dict(PLUG, path='**.attn'))
    mmgate.swap_attention(model.student, dict(PLUG, path='backbone.attn'))
    model.teacher = ExponentialMovingAverage(model.student)
    for gate in mmgate.gate_parameters(model.student).values():
        gate.data.normal_()
    model.teacher.update_parameters(model.student)
    state = model.student.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.teacher.module.state_dict().items())


@pytest.mark.parametrize('train', ['all', 'gates'])
def test_a_gated_detector_has_a_teacher_like_itself(train: str, logged: list[str]) -> None:
    """By ``detector``, as the page says; the teacher is frozen after its gates and stays so in training mode."""
    rule = dict(PLUG, path='backbone.**')
    gated = dict(type='mmgate.Gated', host=Net, attention=rule, train=train)
    model = Semi()
    model.student, model.teacher = (MODELS.build(copy.deepcopy(gated)) for _ in range(2))
    SemiBaseDetector.freeze(model.teacher)
    model.train()
    assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    assert all(gate.requires_grad for gate in mmgate.gate_parameters(model.student).values())
    MeanTeacherHook().momentum_update(model, 0.5)
    assert not logged


def test_gates_follow_a_host_that_is_frozen_as_a_whole(logged: list[str]) -> None:
    """But not in a model that is frozen as a whole itself, which trains its gates, those of a later rule, too."""
    model = Net()
    model.backbone.requires_grad_(False)
    mmgate.swap_attention(model, dict(PLUG, path='backbone.**'))
    gates = mmgate.gate_parameters(model).values()
    assert not any(gate.requires_grad for gate in gates)
    assert len(logged) == 1 and 'backbone.attn' in logged[0]
    mmgate.train_only_gates(model)
    assert all(gate.requires_grad for gate in gates)
    model = nn.ModuleDict(dict(first=Net(), second=Net())).requires_grad_(False)
    for part in model:
        mmgate.swap_attention(model, dict(PLUG, path=f'{part}.backbone.**'))
    model.train()
    assert all(gate.requires_grad for gate in mmgate.gate_parameters(model).values()) and len(logged) == 1


def swin(inside: bool, mode: bool, *rules: dict[str, Any]) -> Any:
    backbone = SwinTransformer(embed_dims=16, depths=(1, 2, 1, 1), num_heads=(1, 2, 4, 8), frozen_stages=2)
    model: Any = nn.ModuleDict(dict(backbone=backbone, head=nn.Linear(4, 4))) if inside else backbone
    model.train(mode)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    for rule in rules:
        mmgate.swap_attention(model, dict(rule, path='backbone.**' if inside else '**'))
    return model


FROZEN = ['stages.0.blocks.0.attn', 'stages.1.blocks.0.attn', 'stages.1.blocks.1.attn']


@pytest.mark.parametrize('inside, mode, rule', [(True, True, AGENT), (False, False, PLUG), (True, False, PLUG)])
def test_gates_in_stages_that_a_backbone_freezes_are_named(
    inside: bool, mode: bool, rule: dict[str, Any], logged: list[str]
) -> None:
    """Before the first ``train()``, in which it freezes them; asking changes neither modes nor what trains."""
    plain, model = swin(inside, mode), swin(inside, mode, rule)
    (said,) = logged
    gates = mmgate.gate_parameters(model)
    resting = {name for name, gate in gates.items() if not gate.requires_grad}
    assert resting and all('stages.0' in name or 'stages.1' in name for name in resting)
    assert said.startswith("mmgate: with train='all', 3 gates stay as they start")
    assert all(f'{"backbone." if inside else ""}{name}' in said for name in FROZEN) and 'stages.2' not in said
    modes = {name: module.training for name, module in model.named_modules()}
    assert all(modes[name] == module.training for name, module in plain.named_modules())
    unused = unused_names(model)
    trains = {name for name, p in model.named_parameters() if p.requires_grad and name not in gates}
    assert trains == {name for name, p in plain.named_parameters() if p.requires_grad and name not in unused}
    model.train()
    assert {name for name, gate in gates.items() if not gate.requires_grad} == resting
    mmgate.restore_attention(model)
    assert 'train' not in vars(model)


class Derives(nn.Module):
    """A layer that keeps a weight for evaluation alone, as TinyViT's attention does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def train(self, mode: bool = True) -> Any:
        super().train(mode)
        if mode:
            vars(self).pop('derived', None)
        else:
            self.derived = 2 * self.weight.detach()
        return self


@pytest.mark.parametrize('mode', [True, False], ids=['training', 'evaluation'])
def test_modes_of_parts_and_what_they_derive_outlive_the_question(mode: bool, logged: list[str]) -> None:
    """A frozen backbone in a model that trains, for instance, or a batch norm that keeps its statistics."""
    model = nn.ModuleDict(dict(derives=Derives(), first=Net(), second=Net())).train(mode)
    model['derives'].eval()
    model['first'].train(not mode)
    modes = {name: module.training for name, module in model.named_modules()}
    mmgate.swap_attention(model, dict(PLUG, path='**.attn'))
    assert all(model.get_submodule(name).training == was for name, was in modes.items())
    assert torch.equal(model['derives'].derived, torch.full((3,), 2.0)) and not logged


def test_a_model_whose_train_raises_stays_as_it_is() -> None:
    class Refuses(nn.Module):
        def train(self, mode: bool = True) -> Any:
            if mode:
                raise RuntimeError('no training here')
            return super().train(mode)

    model = nn.ModuleDict(dict(first=nn.Dropout(), second=Net(), third=Refuses())).eval()
    with pytest.raises(RuntimeError, match='no training here'):
        mmgate.swap_attention(model, dict(PLUG, path='second.backbone.attn'))
    assert not any(part.training for part in model.modules()) and not mmgate.gate_parameters(model)


class Quantised(nn.Module):
    """A layer whose weight has 8 bits, beside a scale of another dtype than the model's; it never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)


@pytest.mark.parametrize('norm', [None, nn.LayerNorm(2), nn.BatchNorm1d(2, affine=False)], ids=type)
def test_quantised_layers_tell_neither_a_dtype_nor_that_they_are_frozen(norm: nn.Module | None) -> None:
    """Gates have the dtype of other tensors, buffers included, and rest where those that could train are frozen."""
    model: Any = nn.ModuleDict(dict(attn=BiMultiHeadAttention(16, 24, 32, 4), head=nn.Linear(2, 2))).bfloat16()
    for name, _ in [*model['attn'].named_children()]:
        setattr(model['attn'], name, Quantised())
    if isinstance(norm, nn.BatchNorm1d):
        del model['head']  # whose parameters come before buffers
    if norm is not None:
        model['attn'].norm = norm.requires_grad_(False).double()
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    gates = mmgate.gate_parameters(model).values()
    assert {gate.dtype for gate in gates} == {torch.bfloat16 if norm is None else torch.float64}
    assert {gate.requires_grad for gate in gates} == {not isinstance(norm, nn.LayerNorm)}

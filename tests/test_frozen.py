"""Gates in frozen parts of a model: what trains, what a teacher gets, and the warning of gates that rest."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from mmdet.engine.hooks import MeanTeacherHook
from mmdet.models.detectors import SemiBaseDetector
from mmengine.model import ExponentialMovingAverage
from mmseg.models.backbones import SwinTransformer
from torch import nn
from torch.optim.swa_utils import AveragedModel

import mmgate
from mmgate import frozen
from mmgate.adapter import unused_names
from mmgate.backbones.swin import SAGASwin
from mmgate.errors import ConfigError
from mmgate.registry import MODELS

AGENT = dict(type='AgentAttention', agent_num=4, map_size=(8, 8))
SDPA = dict(type='SDPAGatedMultiheadAttention', scale=2.0, init='identity')
PLUG = dict(type='PLuGMultiheadAttention')


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """What was logged as a warning."""
    found: list[str] = []
    monkeypatch.setattr(frozen, 'log', lambda text, level=logging.INFO: found.append(text))
    yield found


class Net(nn.Module):
    """A small model with attention and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2)))
        self.head = nn.Linear(16, 3)


class Semi(nn.Module):
    """A model of two copies, as mmdet's semi-supervised detectors are, or as a momentum encoder with its average."""

    def __init__(self, averaged: bool = False) -> None:
        super().__init__()
        self.student = Net()
        self.teacher: Any = AveragedModel(self.student) if averaged else Net()
        SemiBaseDetector.freeze(self.teacher)


BOTH = {False: '**.backbone.**', True: '**.backbone.attn'}


@pytest.mark.parametrize('averaged', [False, True])
@pytest.mark.parametrize('train', ['all', 'gates', 'attention'])
def test_gates_of_a_frozen_teacher_are_frozen_whatever_trains(averaged: bool, train: str) -> None:
    """DDP waits for a gradient of each tensor that trains; a step averages all of them."""
    model = Semi(averaged)
    names = mmgate.swap_attention(model, dict(PLUG, path=BOTH[averaged]))
    assert [name.partition('.')[0] for name in names] == ['student', 'teacher']
    mmgate.train_only_gates(model, train)
    for _ in range(2):
        model.eval().train()
        gates = mmgate.gate_parameters(model)
        assert {name.partition('.')[0] for name, gate in gates.items() if gate.requires_grad} == {'student'}
        assert not any(parameter.requires_grad for parameter in model.teacher.parameters())
    if averaged:
        model.teacher.update_parameters(model.student)
    else:
        MeanTeacherHook().momentum_update(model, 1)
    teacher = model.teacher.module if averaged else model.teacher
    state = model.student.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in teacher.state_dict().items())


@pytest.mark.parametrize(
    'rules',
    [
        [dict(PLUG, path='student.backbone.**')],
        [dict(PLUG, path='teacher.backbone.**')],
        [dict(PLUG, path='student.**'), dict(SDPA, path='teacher.**')],
        [dict(PLUG, path='student.**'), dict(PLUG, path='teacher.**', gml='sum')],
    ],
    ids=['student', 'teacher', 'types', 'options'],
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
    """But not in a model that is frozen as a whole itself, which trains its gates."""
    model = Net()
    model.backbone.requires_grad_(False)
    mmgate.swap_attention(model, dict(PLUG, path='backbone.**'))
    gates = mmgate.gate_parameters(model).values()
    assert not any(gate.requires_grad for gate in gates)
    assert len(logged) == 1 and 'backbone.attn' in logged[0]
    mmgate.train_only_gates(model)
    assert all(gate.requires_grad for gate in gates)
    model = Net().requires_grad_(False)
    mmgate.swap_attention(model, dict(PLUG, path='backbone.**'))
    model.train()
    assert all(gate.requires_grad for gate in mmgate.gate_parameters(model).values()) and len(logged) == 1


def swin(rule: dict[str, Any], inside: bool, mode: bool = True, gated: bool = True) -> Any:
    backbone = SwinTransformer(embed_dims=16, depths=(1, 2, 1, 1), num_heads=(1, 2, 4, 8), frozen_stages=2)
    model: Any = nn.ModuleDict(dict(backbone=backbone, head=nn.Linear(4, 4))) if inside else backbone
    model.train(mode)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    if gated:
        mmgate.swap_attention(model, dict(rule, path='backbone.**' if inside else '**'))
    return model


FROZEN = ['stages.0.blocks.0.attn', 'stages.1.blocks.0.attn', 'stages.1.blocks.1.attn']


@pytest.mark.parametrize('inside', [True, False], ids=['detector', 'backbone'])
@pytest.mark.parametrize('rule', [AGENT, PLUG], ids=['random', 'identity'])
@pytest.mark.parametrize('mode', [True, False], ids=['training', 'evaluation'])
def test_gates_in_stages_that_a_backbone_freezes_are_named(
    rule: dict[str, Any], inside: bool, mode: bool, logged: list[str]
) -> None:
    """Before the first ``train()``, in which it freezes them; asking changes neither modes nor what trains."""
    plain = swin(rule, inside, mode, gated=False)
    model = swin(rule, inside, mode)
    (said,) = logged
    gates = mmgate.gate_parameters(model)
    resting = {name for name, gate in gates.items() if not gate.requires_grad}
    assert resting and all('stages.0' in name or 'stages.1' in name for name in resting)
    assert said.startswith('mmgate: 3 gates stay as they start')
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


def test_no_warning_where_nothing_rests(logged: list[str]) -> None:
    sizes = dict(embed_dims=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8))
    SAGASwin(**sizes).train()
    assert not logged
    SAGASwin(**sizes, frozen_stages=2)
    assert len(logged) == 1 and 'stages.0.blocks.0.attn' in logged[0]


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


def test_what_a_layer_derives_for_evaluation_outlives_the_question(logged: list[str]) -> None:
    model = nn.ModuleDict(dict(first=Derives(), second=Net())).eval()
    mmgate.swap_attention(model, dict(PLUG, path='second.backbone.attn'))
    assert torch.equal(model['first'].derived, torch.full((3,), 2.0)) and not model.training and not logged


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


def test_what_a_part_in_eval_mode_derives_outlives_the_question_in_training(logged: list[str]) -> None:
    """A frozen backbone in a model that trains."""
    model = nn.ModuleDict(dict(first=Derives(), second=Net())).train()
    model['first'].eval()
    mmgate.swap_attention(model, dict(PLUG, path='second.backbone.attn'))
    assert torch.equal(model['first'].derived, torch.full((3,), 2.0)) and not model['first'].training
    assert model.training and model['second'].backbone.attn.training


class Quantised(nn.Module):
    """A layer of 8 bits, which never trains."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
        self.scale = nn.Parameter(torch.ones(2), requires_grad=False)


def test_quantised_layers_do_not_count_as_frozen() -> None:
    """Gates in attention of such layers alone train; in attention that has frozen layers, too, they rest."""
    frozen_norm = nn.LayerNorm(2).requires_grad_(False)
    attention = dict(quantised=nn.Sequential(Quantised()), frozen=nn.Sequential(Quantised(), frozen_norm))
    model = nn.ModuleDict(dict(attention, head=nn.Linear(2, 2)))
    assert frozen.frozen_in_training(model, attention) == ['frozen']


def test_modes_that_were_set_on_parts_stay() -> None:
    """A batch norm, for instance, that keeps its statistics in a model that trains."""
    for mode in (True, False):
        model = nn.ModuleDict(dict(first=Net(), second=Net())).train(mode)
        model['first'].train(not mode)
        modes = {name: module.training for name, module in model.named_modules()}
        mmgate.swap_attention(model, dict(PLUG, path='**.attn'))
        assert all(model.get_submodule(name).training == was for name, was in modes.items())


def test_rules_one_after_the_other_gate_a_frozen_model_as_all_at_once() -> None:
    """The first rule's gates train, and so do the second's."""
    model = nn.ModuleDict(dict(first=Net(), second=Net())).requires_grad_(False)
    for part in ('first', 'second'):
        mmgate.swap_attention(model, dict(PLUG, path=f'{part}.backbone.attn'))
    assert all(parameter.requires_grad for parameter in mmgate.gate_parameters(model).values())


def test_a_compiled_teacher_is_a_frozen_part() -> None:
    model = Semi()
    model.teacher = torch.compile(model.teacher)
    mmgate.swap_attention(model, dict(PLUG, path='**.backbone.attn'))
    trains = {name.partition('.')[0]: p.requires_grad for name, p in mmgate.gate_parameters(model).items()}
    assert trains == dict(student=True, teacher=False)

"""What trains while gates train alone, and what rests."""

from __future__ import annotations

import copy
import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from helpers.finetuned import PLUG, Layer, gated, layers, train
from mmengine.registry import MODELS
from torch import Tensor, nn

import mmgate
from mmgate.adapter import unused_names
from mmgate.errors import ConfigError


@pytest.mark.parametrize('host, head', [('retinanet_pvtv2', 'bbox_head'), ('swin', 'decode_head')])
def test_norms_and_dropout_outside_the_gates_rest(host: str, head: str) -> None:
    """Frozen batch norms and dropouts rest while the gates train; the model itself knows that it trains."""
    model = gated(host, train='gates')
    for one in (model, copy.deepcopy(model)):
        one.train()
        assert one.training and one.get_submodule(head).training
        working = [n for n, m in one.named_modules() if isinstance(m, (nn.BatchNorm2d, nn.Dropout)) and m.training]
        assert working and all('.attn.' in name for name in working)
    mmgate.train_only_gates(model, 'all')
    model.train()
    resting = {name for name, parameter in model.named_parameters() if not parameter.requires_grad}
    assert resting <= {*unused_names(model)} and all(module.training for module in model.modules())


def test_what_lies_before_the_gates_rests_and_what_was_frozen_stays_so() -> None:
    model = gated('deformable_detr')
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen  # the first stage of the ResNet
    mmgate.train_only_gates(model)
    levels: list[Tensor] = []
    model.neck.register_forward_hook(lambda module, args, out: levels.extend(out))
    train(model, 'deformable_detr', steps=1)
    assert levels and not any(level.requires_grad for level in levels)
    mmgate.restore_attention(model)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        """As mm backbones freeze their stages."""
        return super().train(mode).requires_grad_(False)


def test_gates_in_frozen_stages_train() -> None:
    model = nn.Sequential(Frozen(Layer(), Layer()))
    mmgate.swap_attention(model, dict(PLUG, path='0.*.attn'))
    names = mmgate.train_only_gates(model)
    assert names == list(mmgate.gate_parameters(model))
    model.eval().train()
    assert names == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    mmgate.train_only_gates(model, 'all')
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_gates_that_were_frozen_by_hand_train_only_as_long_as_they_are_asked_to() -> None:
    model = layers().requires_grad_(False)
    mmgate.train_only_gates(model)
    assert mmgate.train_only_gates(model, 'all') == []


@pytest.mark.parametrize('inside', [True, False], ids=['inside', 'beside'])
def test_norms_of_gated_attention_keep_their_statistics(inside: bool) -> None:
    from mmseg.models.backbones.mit import EfficientMultiheadAttention

    model = nn.Sequential(EfficientMultiheadAttention(16, 2, sr_ratio=2, norm_cfg=dict(type='BN')))
    if inside:
        model[0].attn.norm = nn.BatchNorm2d(16)
    mmgate.swap_attention(model, dict(path='0', type='mmgate.PLuGMultiheadAttention'))
    mmgate.train_only_gates(model)
    model.train()
    gated = model[0].attn
    assert gated.training and gated.gate.training and gated.gate.gml.training
    assert not model[0].norm.training and not (inside and gated.norm.training)
    mmgate.restore_attention(model)
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    'name, beside',
    [
        ('mmdet.models.backbones.pvt.SpatialReductionAttention', {'sr', 'norm'}),
        ('mmseg.models.backbones.twins.GlobalSubsampledAttention', {'sr', 'norm'}),
        ('mmcv.cnn.bricks.transformer.MultiheadAttention', set()),
    ],
)
def test_a_dense_gate_in_a_child_follows_the_name_that_the_rule_chose(name: str, beside: set[str]) -> None:
    """What trains with 'attention', what drops, what comes off and what a later rule meets is the whole attention."""
    module, _, kind = name.rpartition('.')
    options = dict(dropout_layer=dict(type='Dropout', drop_prob=0.5), **(dict(sr_ratio=2) if beside else {}))
    attention = getattr(import_module(module), kind)(16, 2, 0.5, 0.5, **options)
    model = nn.ModuleDict(dict(block=nn.ModuleDict(dict(attn=attention)), mlp=nn.Sequential(nn.Linear(2, 2))))
    rule = dict(path='block.attn', type='mmgate.PLuGMultiheadAttention')
    assert mmgate.swap_attention(model, rule) == ['block.attn']
    own = [f'block.attn.{part}' for part, _ in attention.named_parameters()]
    assert set(mmgate.train_only_gates(model, 'attention')) == set(own)
    assert {part.split('.')[2] for part in own} == {'attn', *beside}
    model.train()
    dropouts = [part for part in attention.modules() if isinstance(part, nn.Dropout)]
    assert len(dropouts) == 2 and all(part.training for part in dropouts)
    copied = copy.deepcopy(nn.ModuleDict(dict(outer=model)))  # a copy inside another model has longer names
    assert set(mmgate.train_only_gates(copied, 'attention')) == {f'outer.{part}' for part in own}
    assert mmgate.restore_attention(copied['outer']) == mmgate.restore_attention(model) == ['block.attn']
    assert mmgate.swap_attention(model, dict(rule, path='block.attn.attn')) == ['block.attn.attn']
    mmgate.train_only_gates(model)
    assert attention.attn.training and not any(part.training for part in dropouts)
    assert mmgate.restore_attention(model) == ['block.attn.attn']


def test_attention_of_a_type_with_a_gate_trains_as_a_whole() -> None:
    model = nn.Sequential(
        nn.Linear(16, 16), MODELS.build(dict(type='mmgate.PLuGMultiheadAttention', embed_dims=16, num_heads=2))
    )
    assert set(mmgate.train_only_gates(model, 'attention')) == {f'1.{name}' for name, _ in model[1].named_parameters()}


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.neck = nn.Sequential(nn.Conv2d(16, 16, 1), nn.BatchNorm2d(16))
        self.layer = Layer()
        self.head = nn.Linear(16, 1)


@pytest.mark.parametrize(
    'mode, filled',
    [
        ('gates', 'nothing'),
        ('gates', 'neck'),
        ('gates', 'backbone and neck'),
        ('attention', 'nothing'),
        ('attention', 'afterwards'),
        ('all', 'nothing'),
    ],
)
def test_gates_beside_random_weights_are_warned_of_once(
    mode: str, filled: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When training begins, not with more gates, by the norms, which no training leaves at 1; whatever loaded them."""
    said: list[str] = []
    monkeypatch.setattr('mmgate.training.log', lambda text, *level: said.append(text))
    model = Normed()
    trained = copy.deepcopy(model)
    for part in ('backbone', 'neck'):
        trained.get_submodule(part)[1].weight.data += 0.1
        if part in filled:
            model.get_submodule(part).load_state_dict(trained.get_submodule(part).state_dict())
    mmgate.swap_attention(model, dict(path='layer.attn', type='mmgate.PLuGMultiheadAttention'))
    mmgate.train_only_gates(model, mode)
    if filled == 'afterwards':
        model.load_state_dict(trained.state_dict(), strict=False)
    model.eval()
    said.clear()
    model.other = Layer()
    mmgate.swap_attention(model, dict(path='other.attn', type='mmgate.PLuGMultiheadAttention'))
    assert not said
    for _ in range(2):
        model.train()
    named = {'nothing': ['backbone, neck'], 'neck': ['backbone']}.get(filled, []) if mode != 'all' else []
    assert [re.findall('moved from its start in (.*?)\\.', text) for text in said] == [[parts] for parts in named]


@pytest.mark.parametrize('train', ['gates', 'attention'])
def test_gates_that_come_later_train_or_are_said_to_rest(train: str, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr('mmgate.frozen.log', lambda text, *level: said.append(text))
    parts = {name: nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 2))) for name in ('encoder', 'decoder')}
    model = nn.ModuleDict(parts)
    mmgate.swap_attention(model, dict(type='PLuGMultiheadAttention', path='decoder.attn'))
    mmgate.train_only_gates(model, train)
    assert not said
    mmgate.swap_attention(model, dict(type='PLuGMultiheadAttention', path='encoder.attn'))
    resting = {name for name, parameter in mmgate.gate_parameters(model).items() if not parameter.requires_grad}
    assert bool(resting) == bool(said) == (train == 'attention')
    assert all('1 gates stay as they start' in text and 'encoder.attn' in text for text in said)
    mmgate.train_only_gates(model, train)
    assert all(parameter.requires_grad for parameter in mmgate.gate_parameters(model).values())


@pytest.mark.parametrize(
    ('ask', 'words'),
    [
        (lambda folder: mmgate.train_only_gates(layers(())), 'has no gates'),
        (lambda folder: mmgate.save_gates(layers(()), folder / 'x'), 'has no gates'),
        (lambda folder: mmgate.save_gates(layers(), folder / 'no/such/folder/x'), 'cannot be written'),
        (lambda folder: mmgate.train_only_gates(layers(), 'gate'), "'gates', 'attention', 'all'"),
        (lambda folder: MODELS.build(dict(type='mmgate.Gated', host='mmdet.DETR')), 'attention .* or gates'),
    ],
    ids=['train', 'save', 'folder', 'mode', 'config'],
)
def test_what_cannot_be_done_is_refused(ask: Any, words: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=words):
        ask(tmp_path)
    assert not list(tmp_path.iterdir())

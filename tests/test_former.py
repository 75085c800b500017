"""What mmgate 0.2 had: declarations are refused, imports work with a warning, other starts and new places are told."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from importlib import import_module

import pytest
from conftest import needs_mmpretrain
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmdet.models.backbones.swin import WindowMSA
from torch import nn

import mmgate
from mmgate import DenseAdapter, DenseGate, MapGate, gates, moved, registry, swap_attention
from mmgate.errors import ConfigError
from mmgate.former import OF_ADAPTERS, OF_GATES


@pytest.mark.parametrize(
    'base, name',
    [*((DenseGate, name) for name in OF_GATES), (MapGate, 'reset_gate'), *((DenseAdapter, n) for n in OF_ADAPTERS)],
)
def test_a_class_that_declares_a_former_name_is_refused(base: type, name: str) -> None:
    """A gate may have the names that adapters had, and an adapter those of gates."""
    with pytest.raises(TypeError, match=f"Mine declares '{name}', which mmgate no longer reads. Write instead: "):
        type('Mine', (base,), {name: True})
    other = DenseGate if base is DenseAdapter else DenseAdapter
    assert name in vars(type('Mine', (other,), {name: True}))


def test_former_imports_are_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == 'mmgate.layers' or name.startswith('mmgate.layers.')]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning, match='mmgate.layers is mmgate.gates now'):
        former = import_module('mmgate.layers')
    assert former.MultiScaleDeformableAttention is gates.MultiScaleDeformableAttention
    assert import_module('mmgate.layers.base.dense').DenseGate is mmgate.DenseGate
    assert import_module('mmgate.layers.base.gated').GatedModule is mmgate.Adapter
    assert import_module('mmgate.layers.base.dense').DenseHost is mmgate.DenseAdapter
    with pytest.raises(ModuleNotFoundError, match='mmgate.layers.plug'):
        import_module('mmgate.layers.plug')


class EncoderBlock(nn.Module):
    """As torchvision has it, around torch's attention."""

    def __init__(self) -> None:
        super().__init__()
        self.self_attention = nn.MultiheadAttention(16, 4)


EncoderBlock.__module__ = 'torchvision.models.vision_transformer'


@pytest.mark.parametrize(
    'make, path, in_vit',
    [
        (lambda: MultiheadAttention(16, 4), 'part', False),
        (lambda: WindowMSA(16, 4, (4, 4)), 'part', True),
        (EncoderBlock, 'part.self_attention', True),
        (lambda: type('vit', (nn.Sequential,), {})(nn.MultiheadAttention(16, 4)), 'part.0', True),
    ],
    ids=['mmcv', 'swin', 'torchvision', 'class'],
)
def test_a_start_that_was_another_is_told_once_a_rule(
    make: Callable[[], nn.Module], path: str, in_vit: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """init='paper' went by the model around."""
    model = nn.ModuleDict({name: nn.ModuleDict(dict(part=make())) for name in 'abcd'})
    said: list[str] = []
    monkeypatch.setattr('mmgate.swap.log', lambda message, level=20: said.append(message) if level > 20 else None)
    both, usual, vit = (
        dict(path=[f'{name}.{path}' for name in names], type='PLuGMultiheadAttention', **init)
        for names, init in (('ab', dict(init='paper')), ('c', {}), ('d', dict(init='vit')))
    )
    swap_attention(model, [both, usual, vit])
    assert len(said) == in_vit
    assert all("Write init='vit' for their start of 0.2.0" in warning for warning in said)


@pytest.fixture
def moved_name(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setattr(moved, 'MOVED', {'projects.elsewhere': {'MODELS': ('MovedAttention',)}})
    moved.register_moved()
    yield 'MovedAttention'
    registry.MODELS.module_dict.pop('MovedAttention')


@pytest.mark.parametrize('scope', ['', 'mmgate.'])
def test_a_config_and_a_rule_that_name_it_say_what_to_import(moved_name: str, scope: str) -> None:
    told = r"MovedAttention is registered by projects.elsewhere, .*imports=\['mmgate', 'projects.elsewhere'\]"
    with pytest.raises(ConfigError, match=told):
        registry.MODELS.build(dict(type=f'mmgate.{moved_name}', depth=1))
    with pytest.raises(ConfigError, match=told):
        swap_attention(nn.Sequential(nn.Identity()), dict(path='0', type=scope + moved_name))
    with pytest.raises(ConfigError, match=told):
        registry.MODELS.build(dict(type='mmgate.AgentPVT', arch='tiny', attention=dict(type=scope + moved_name)))


@needs_mmpretrain
@pytest.mark.parametrize('project', moved.MOVED)
def test_a_project_registers_its_names(project: str) -> None:
    import_module(project)
    for attribute, names in moved.MOVED[project].items():
        for name in names:
            assert getattr(registry, attribute).get(f'mmgate.{name}').__module__.startswith(f'{project}.')


@pytest.mark.parametrize('module', ['gates', 'layers', 'backbones'])
def test_a_python_import_says_what_to_import(module: str) -> None:
    name = 'LVViT' if module == 'backbones' else 'HydraAttention'
    with pytest.raises(ImportError, match=f'{name} is registered by projects'):
        getattr(import_module(f'mmgate.{module}'), name)

"""A name that moved into a project says what to import."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module

import pytest
from conftest import needs_mmpretrain
from torch import nn

from mmgate import moved, registry, swap_attention
from mmgate.errors import ConfigError


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


def test_a_backbone_whose_attention_moved_says_what_to_import(moved_name: str) -> None:
    with pytest.raises(ConfigError, match='MovedAttention is registered by projects.elsewhere'):
        registry.MODELS.build(dict(type='mmgate.AgentPVT', arch='tiny', attention=dict(type=moved_name)))

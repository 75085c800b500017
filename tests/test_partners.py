"""Agent and SAGA configs against their vanilla partners."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from conftest import ROOT
from mmengine.config import Config

import mmgate  # noqa: F401  (mmgate:: and, with the forks, mmseg:: resolve from here on)

BACKBONES = sorted(
    str(path.relative_to(ROOT / 'configs'))
    for method in ('agent', 'saga')
    for path in (ROOT / 'configs' / method).rglob('*.py')
    # no partner: mmdet's Swin at the demo's size would be one more model, and mmpretrain's recipes are other ones
    if not {'swin-demo', 'pvt-demo-pretrained'} & set(path.stem.split('_')) and 'classification' not in path.parts
)
ATTENTION = {'type', 'arch', 'agent_nums'}
WEIGHTS = 'model.backbone.init_cfg.checkpoint'


def flat(node: Any, where: str = '') -> Iterator[tuple[str, Any]]:
    if isinstance(node, Mapping):
        for key, value in node.items():
            yield from flat(value, f'{where}.{key}' if where else key)
    else:
        yield where, node


@pytest.mark.parametrize('name', BACKBONES)
def test_differs_from_its_partner_in_the_attention_alone(name: str) -> None:
    path = ROOT / 'configs' / name
    base = re.search(r"_base_ = (?:\[\n.*,\n    )?'(.*)'", path.read_text())[1]
    partner = Config.fromstring(f'_base_ = {base!r}', '.py') if '::' in base else Config.fromfile(path.parent / base)
    ours, theirs = dict(flat(Config.fromfile(path).to_dict())), dict(flat(partner.to_dict()))
    changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    allowed = {f'model.backbone.{field}' for field in ATTENTION}
    allowed |= {'optim_wrapper.constructor', 'custom_imports.imports', 'custom_imports.allow_failed_imports'}
    if base.startswith('mmseg::'):  # which leaves it out
        allowed |= {'auto_scale_lr.enable', 'auto_scale_lr.base_batch_size'}
    assert changed <= allowed | ({WEIGHTS} if name.startswith('agent') else set())
    assert 'demo' in name or ours[WEIGHTS].startswith('https://')

"""Agent and SAGA configs against the papers' recipes and their vanilla partners."""

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
    if 'swin-demo' not in path.name  # it has no partner: mmdet's Swin at the demo's size would be one more model
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
    base = re.search(r"_base_ = '(.*)'", path.read_text())[1]
    partner = Config.fromstring(f'_base_ = {base!r}', '.py') if '::' in base else Config.fromfile(path.parent / base)
    ours, theirs = dict(flat(Config.fromfile(path).to_dict())), dict(flat(partner.to_dict()))
    changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    allowed = {f'model.backbone.{field}' for field in ATTENTION}
    allowed |= {'optim_wrapper.constructor', 'custom_imports.imports', 'custom_imports.allow_failed_imports'}
    assert changed <= allowed | ({WEIGHTS} if name.startswith('agent') else set())
    assert 'demo' in name or ours[WEIGHTS].startswith('https://')


@pytest.mark.parametrize(
    'pattern, rates',
    [
        ('agent/mask_rcnn/agent-mask-rcnn_pvt-{}_1x_coco', dict(t=0.1, s=0.2, m=0.1, l=0.2)),
        ('agent/retinanet/agent-retinanet_pvt-{}_1x_coco', dict(t=0.1, s=0.1, m=0.2, l=0.3)),
        ('agent/semantic_fpn/agent-semantic-fpn_pvt-{}_8xb2-40k_ade20k-512x512', dict(t=0.1, s=0.1, m=0.2, l=0.1)),
        ('agent/mask_rcnn/agent-mask-rcnn_swin-{}_ms-crop-3x_coco', dict(t=0.1, s=0.1)),
        ('agent/cascade_mask_rcnn/agent-cascade-mask-rcnn_swin-{}_ms-crop-3x_coco', dict(t=0.1, s=0.1, b=0.4)),
        ('agent/upernet/agent-upernet_swin-{}_8xb2-160k_ade20k-512x512', dict(t=0.3, s=0.3, b=0.5)),
        ('saga/mask_rcnn/saga-mask-rcnn_pvt-{}_1x_coco', dict(t=0.1)),
        ('saga/upernet/saga-upernet_swin-{}_8xb2-160k_ade20k-512x512', dict(t=0.3)),
    ],
    ids=lambda value: value if isinstance(value, str) else '',
)
def test_drop_path_of_the_papers(pattern: str, rates: dict[str, float]) -> None:
    depths = dict(t=2, s=3, m=3, l=3) if 'pvt' in pattern else dict(t=2, s=2, b=2)
    for size, rate in rates.items():
        backbone = Config.fromfile(ROOT / 'configs' / f'{pattern.format(size)}.py').model.backbone
        assert backbone.get('drop_path_rate', 0.1) == rate  # mmdet's default
        assert backbone.get('num_layers', backbone.get('depths'))[0] == depths[size]


@pytest.mark.parametrize(
    'name, optimizer',
    [
        ('agent/mask_rcnn/agent-mask-rcnn_pvt-t_1x_coco', ('AdamW', 2e-4, 1e-4)),
        ('agent/retinanet/agent-retinanet_pvt-l_1x_coco', ('AdamW', 1e-4, 1e-4)),
        ('agent/mask_rcnn/agent-mask-rcnn_swin-t_ms-crop-1x_coco', ('AdamW', 1e-4, 0.05)),
        ('agent/cascade_mask_rcnn/agent-cascade-mask-rcnn_swin-b_ms-crop-3x_coco', ('AdamW', 1e-4, 0.05)),
        ('agent/semantic_fpn/agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512', ('AdamW', 2e-4, 1e-4)),
        ('agent/upernet/agent-upernet_swin-b_8xb2-160k_ade20k-512x512', ('AdamW', 6e-5, 0.01)),
    ],
)
def test_optimizer_of_the_papers(name: str, optimizer: tuple[str, float, float]) -> None:
    wrapper = Config.fromfile(ROOT / 'configs' / f'{name}.py').optim_wrapper
    assert (wrapper.optimizer.type, wrapper.optimizer.lr, wrapper.optimizer.weight_decay) == optimizer
    assert wrapper.type == 'OptimWrapper'
    if 'swin' in name:
        undecayed = {key for key, value in wrapper.paramwise_cfg.custom_keys.items() if value.decay_mult == 0}
        assert undecayed == {'absolute_pos_embed', 'relative_position_bias_table', 'norm'}

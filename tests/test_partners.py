"""Agent and SAGA configs against their vanilla partners, and ablations of PLuG against those of their start."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, one_of_each, skip_unless_readable
from mmengine.config import Config

import mmgate  # noqa: F401  (mmgate:: and, with the forks, mmseg:: resolve from here on)
from mmgate.analysis.structure import build_structure

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


@pytest.mark.parametrize('name', one_of_each(BACKBONES))
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


PLUG = sorted(path for path in (ROOT / 'configs/plug').rglob('*.py') if 'ablations' in path.parts)


@pytest.mark.parametrize('path', one_of_each(PLUG), ids=lambda path: path.stem)
def test_an_ablation_of_plug_has_a_partner_of_its_start(path: Path) -> None:
    """It inherits it, and differs from it in one option of the gate."""
    skip_unless_readable(str(path.relative_to(ROOT / 'configs')))
    cfg = Config.fromfile(path)
    partner = Config.fromfile(path.parent / re.search(r"_base_ = '(.*)'", path.read_text())[1])
    ours, theirs = cfg.model.attention, partner.model.attention
    changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
    assert len(changed) == 1
    if changed == {'residual'} or ours.get('gml') == 'none':
        assert ours.init == theirs.init in ('paper', 'vit') and 'paper-init' in partner.filename


CLASSIFIERS = sorted(
    path.name
    for path in (ROOT / 'configs/vanilla/classification').glob('*.py')
    if path.name.startswith(('pvt-', 'swin-', 'cswin-', 'pvtv2-'))
)


@pytest.mark.parametrize('name', one_of_each(CLASSIFIERS))
def test_classifiers_differ_from_their_partners_in_the_attention_alone(name: str) -> None:
    """But CSwin has its own depths, SAGA positions of 224 pixels, and Agent attention another rule for what decays."""
    skip_unless_readable(f'vanilla/classification/{name}')
    theirs = dict(flat(Config.fromfile(ROOT / 'configs/vanilla/classification' / name).to_dict()))
    allowed = {
        *(f'model.backbone.{field}' for field in (*ATTENTION, 'depths', 'pretrain_img_size')),
        'optim_wrapper.constructor',
        'load_from',
    }
    partners = [ROOT / f'configs/{method}/classification/{method}-{name}' for method in ('agent', 'saga')]
    # Fig. 7 fine-tunes Swin-B beside Agent-Swin-S
    assert any(path.is_file() for path in partners) or re.match(r'swin-b_8xb32-30e_in1k-(256|288|320|352)px', name)
    for path in partners:
        if path.is_file():
            ours = dict(flat(Config.fromfile(path).to_dict()))
            changed = {key for key in ours.keys() | theirs.keys() if ours.get(key) != theirs.get(key)}
            known = {key for key in changed if key.startswith(('train_pipeline', 'test_pipeline'))}
            assert changed - known <= allowed, path.name


@pytest.mark.parametrize('name', ['agent-swin-b', 'agent-cswin-b', 'saga-swin-b', 'swin-b', 'cswin-b'])
def test_what_is_fine_tuned_has_the_tensors_of_its_checkpoint(name: str) -> None:
    method = name.split('-')[0] if name.count('-') == 2 else 'vanilla'
    folder = ROOT / f'configs/{method}/classification'
    tuned = folder / f'{name}_8xb32-30e_in1k-384px.py'
    skip_unless_readable(tuned)
    cfg = Config.fromfile(tuned)
    trained = folder / f'{cfg.load_from.split("/")[1]}.py'
    found, expected = (set(build_structure(c).state_dict()) for c in (cfg, Config.fromfile(trained)))
    assert found == expected

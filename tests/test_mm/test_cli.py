"""Configs that the flags of train.py and test.py make."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import needs_mmpretrain
from helpers.pure_python import write_in_pure_python
from helpers.small_demo import CONFIG, SEGMENTOR
from mmengine.config import Config
from mmengine.registry import MODELS, TRANSFORMS, init_default_scope
from torch import nn

import mmgate
from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.mm.config_file import read_config
from mmgate.mm.gate_options import put_rules

SMALL = """
default_scope = '{scope}'
model = dict(type='M', layers=[dict(width=1), dict(width=2)])
optim_wrapper = dict(type='{wrapper}', optimizer=dict(type='SGD', lr=0.1))
default_hooks = dict(visualization=dict(type='V'))
visualizer = dict(type='W')
auto_scale_lr = dict(enable=False, base_batch_size=16)
test_dataloader = dict(
    dataset=dict(type='RepeatDataset', dataset=dict(type='D', pipeline=[dict(type='Load'), dict(type='Pack')])))
test_cfg = dict()
test_evaluator = {evaluator}
"""
METRIC = "dict(type='IoUMetric')"


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.save({}, 'x.pth')


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a function that runs a command, and returns the config that it would build a runner from."""

    def run(command: str, *argv: str, **others: str) -> Config | None:
        values = dict(scope='mmseg', evaluator=METRIC, wrapper='OptimWrapper') | others
        Path('config.py').write_text(SMALL.format(**values))
        seen: list[Config] = []

        def stop(cfg: Config) -> None:
            seen.append(cfg)
            raise ConfigError('seen')

        monkeypatch.setattr(cli, 'build_runner', stop)
        assert cli.main(getattr(cli, command), ['config.py', *argv]) == 2
        return seen[0] if seen else None

    return run


def test_flags_of_a_training(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    cfg = run('train')
    assert not cfg.get('resume') and not cfg.get('load_from') and cfg.launcher == 'none' and 'mmgate' not in cfg.text
    assert cfg.work_dir == './work_dirs/config' and not cfg.auto_scale_lr.enable
    cfg = run('train', '--amp', '--auto-scale-lr', '--speedups')
    assert (cfg.optim_wrapper.type, cfg.optim_wrapper.loss_scale) == ('AmpOptimWrapper', 'dynamic')
    assert cfg.optim_wrapper.constructor == 'mmgate.GroupedOptimWrapperConstructor'
    assert cfg.auto_scale_lr == dict(base_batch_size=16, enable=True)
    with pytest.warns(UserWarning, match='already'):
        run('train', '--amp', wrapper='AmpOptimWrapper')
    assert run('train', '--amp', wrapper='ApexOptimWrapper') is None
    assert "optim_wrapper.type='ApexOptimWrapper' cannot be converted" in capsys.readouterr().err
    assert run('train', '--auto-scale-lr', '--cfg-options', 'auto_scale_lr.base_batch_size=None') is None
    assert 'needs auto_scale_lr.base_batch_size' in capsys.readouterr().err


def test_resume_takes_a_file_or_looks_for_one(run: Any) -> None:
    first = ('--resume', '--cfg-options', 'load_from=x.pth')
    Path('work_dirs/config').mkdir(parents=True)
    for argv, resumes in ((('--resume', 'x.pth'), True), (first, False)):  # nothing was saved yet
        cfg = run('train', *argv)
        assert cfg.resume is resumes and cfg.load_from == 'x.pth'
    torch.save({}, 'last.pth')
    Path('work_dirs/config/last_checkpoint').write_text('last.pth')
    cfg = run('train', *first)
    assert cfg.resume is True and cfg.load_from == 'last.pth'


# by scope: what the hook draws by, where it paints, the augmented model, the last step of the pipeline
PAINTING = {
    'mmdet': ('draw', 'test_out_dir', 'DetTTAModel', 'mmdet.PackDetInputs'),
    'mmseg': ('draw', None, 'mmseg.SegTTAModel', 'mmseg.PackSegInputs'),
    'mmpretrain': ('enable', 'out_dir', 'mmpretrain.AverageClsScoreTTA', 'Pack'),
}


@pytest.mark.parametrize('scope', [pytest.param(s, marks=[needs_mmpretrain] * (s == 'mmpretrain')) for s in PAINTING])
def test_flags_of_painting_and_augmentation(run: Any, scope: str) -> None:
    draws, where, model, packs = PAINTING[scope]
    cfg = run('test', 'x.pth', '--show-dir', 'painted', '--show', '--tta', scope=scope)
    hook = cfg.default_hooks.visualization
    assert hook[draws] is True and (hook.show, hook.wait_time) == (True, 2)
    assert (hook.get(where) if where else cfg.visualizer.save_dir) == 'painted'
    assert (cfg.model.type, cfg.model.module.type) == (model, 'M')
    load, augment = cfg.test_dataloader.dataset.dataset.pipeline
    flips, (pack,) = augment.transforms
    assert load.type == 'Load' and [flip.prob for flip in flips] == [0.0, 1.0] and pack.type == packs
    del cfg.default_hooks.visualization
    with pytest.raises(ConfigError, match=r'need default_hooks\.visualization'):
        cli.enable_visualization(cfg, show=True, show_dir=None, wait_time=0)


@pytest.mark.parametrize('config', [CONFIG, SEGMENTOR], ids=['detector', 'segmentor'])
def test_augmentation_of_a_config_in_pure_python(config: str, tmp_path: Path) -> None:
    """It has no scope in which names without one would be found."""
    Path('text.py').write_text(config.replace('EPOCHS', '1'))
    cfg = read_config(write_in_pure_python(read_config('text.py'), tmp_path / 'pure.py'))
    put_rules(cfg, [], train='gates')
    host = type(MODELS.build(deepcopy(cfg.model)))
    cli.enable_tta(cfg)
    init_default_scope('mmengine')
    assert type(MODELS.build(cfg.model).module) is host
    cv2.imwrite('image.png', np.zeros((64, 64, 3), np.uint8))
    load, *_, augment = (TRANSFORMS.build(step) for step in cfg.tta_pipeline)
    assert type(augment).__name__ == 'TestTimeAug'
    seen = augment(load(dict(img_path='image.png', img_id=0, seg_fields=[])))
    assert [sample.flip for sample in seen['data_samples']] == [False, True]


def test_gates_of_a_file_are_put_on_the_model_inside_of_augmentation(run: Any) -> None:
    model = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 4)))
    mmgate.swap_attention(model, dict(type='PLuGMultiheadAttention', path='attn'))
    mmgate.save_gates(model, 'gates.safetensors')
    gated = run('test', 'x.pth', '--gates', 'gates.safetensors', '--tta').model.module
    assert (gated.type, gated.host, gated.gates) == ('mmgate.Gated', 'M', 'gates.safetensors')


@pytest.mark.parametrize('evaluator', [METRIC, f'[{METRIC}, {METRIC}]'], ids=['one', 'list'])
def test_label_maps_of_every_evaluator(run: Any, evaluator: str) -> None:
    cfg = run('test', 'x.pth', evaluator=evaluator)
    assert cfg.load_from == 'x.pth' and 'output_dir' not in cfg.pretty_text
    cfg = run('test', 'x.pth', '--out', 'maps', evaluator=evaluator)
    found = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    assert found == [dict(type='IoUMetric', output_dir='maps', keep_results=True)] * evaluator.count('IoU')


def test_predictions_of_a_detector_need_a_pickle(run: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert run('test', 'x.pth', '--out', 'out.json', scope='mmdet') is None
    assert '--out out.json: predictions are dumped into a .pkl or .pickle file' in capsys.readouterr().err

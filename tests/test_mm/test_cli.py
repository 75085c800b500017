"""What the flags of the command lines make of a config."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

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
from mmgate.mm.gate_options import put_gates

SMALL = """
default_scope = '{scope}'
model = dict(type='M', layers=[dict(width=1), dict(width=2)])
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='SGD', lr=0.1))
param_scheduler = [dict(type='LinearLR', end=10), dict(type='MultiStepLR', milestones=[3])]
default_hooks = dict(visualization=dict(type='V'))
visualizer = dict(type='W')
test_dataloader = dict(
    dataset=dict(type='RepeatDataset', dataset=dict(type='D', pipeline=[dict(type='Load'), dict(type='Pack')])))
test_cfg = dict()
test_evaluator = {evaluator}
"""
METRIC = "dict(type='IoUMetric')"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    torch.save({}, 'x.pth')
    return tmp_path


def config_of(
    monkeypatch: pytest.MonkeyPatch, command: str, *argv: str, scope: str = 'mmseg', evaluator: str = METRIC
) -> Config:
    """Return the config that the command would build a runner from."""
    Path('config.py').write_text(SMALL.format(scope=scope, evaluator=evaluator))
    seen: list[Config] = []

    def stop(cfg: Config) -> None:
        seen.append(cfg)
        raise ConfigError('seen')

    monkeypatch.setattr(cli, 'build_runner', stop)
    assert cli.main(getattr(cli, command), ['config.py', *argv]) == 2
    return seen[0]


def test_without_flags_nothing_changes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config_of(monkeypatch, 'train')
    assert cfg.optim_wrapper.type == 'OptimWrapper' and cfg.param_scheduler[0].end == 10
    assert not cfg.get('resume') and not cfg.get('load_from') and cfg.launcher == 'none'
    assert cfg.work_dir == './work_dirs/config'
    cfg = config_of(monkeypatch, 'test', 'x.pth')
    assert cfg.load_from == 'x.pth' and cfg.test_evaluator == dict(type='IoUMetric')


def test_amp_switches_the_optimizer_wrapper(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config_of(monkeypatch, 'train', '--amp')
    wrapper = cfg.optim_wrapper
    assert (wrapper.type, wrapper.loss_scale) == ('AmpOptimWrapper', 'dynamic')
    assert wrapper.optimizer == dict(type='SGD', lr=0.1)
    with pytest.warns(UserWarning, match='already'):
        cli.enable_amp(cfg)
    wrapper.type = 'ApexOptimWrapper'
    with pytest.raises(ConfigError, match='ApexOptimWrapper'):
        cli.enable_amp(cfg)


def test_a_rate_to_scale_needs_the_batch_that_it_is_for() -> None:
    cfg = Config(dict(auto_scale_lr=dict(base_batch_size=16)))
    cli.enable_auto_scale_lr(cfg)
    assert cfg.auto_scale_lr == dict(base_batch_size=16, enable=True)
    with pytest.raises(ConfigError, match='needs auto_scale_lr.base_batch_size'):
        cli.enable_auto_scale_lr(Config(dict(auto_scale_lr=dict(enable=False))))


def test_speedups_change_the_config(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config_of(monkeypatch, 'train', '--speedups')
    assert cfg.optim_wrapper.constructor == 'mmgate.GroupedOptimWrapperConstructor'


def test_resume_takes_a_file_or_looks_for_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = config_of(monkeypatch, 'train', '--resume', 'x.pth')
    assert cfg.resume is True and cfg.load_from == 'x.pth'
    first = ('--resume', '--cfg-options', 'load_from=x.pth')
    cfg = config_of(monkeypatch, 'train', *first)  # nothing was saved yet: it starts as without the flag
    assert cfg.resume is False and cfg.load_from == 'x.pth'
    torch.save({}, 'last.pth')
    Path('work_dirs/config').mkdir(parents=True)
    Path('work_dirs/config/last_checkpoint').write_text('last.pth')
    cfg = config_of(monkeypatch, 'train', *first)
    assert cfg.resume is True and cfg.load_from == 'last.pth'


@pytest.mark.parametrize(
    'scope, draws, where, model, packs',
    [
        ('mmdet', 'draw', 'test_out_dir', 'DetTTAModel', 'mmdet.PackDetInputs'),
        ('mmseg', 'draw', None, 'mmseg.SegTTAModel', 'mmseg.PackSegInputs'),
        pytest.param(
            'mmpretrain', 'enable', 'out_dir', 'mmpretrain.AverageClsScoreTTA', 'Pack', marks=needs_mmpretrain
        ),
    ],
)
def test_flags_of_painting_and_augmentation_change_the_config(
    folder: Path, monkeypatch: pytest.MonkeyPatch, scope: str, draws: str, where: str | None, model: str, packs: str
) -> None:
    cfg = config_of(monkeypatch, 'test', 'x.pth', '--show-dir', 'painted', '--show', '--tta', scope=scope)
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
    text = tmp_path / 'text.py'
    text.write_text(config.replace('EPOCHS', '1'))
    cfg = read_config(write_in_pure_python(read_config(str(text)), tmp_path / 'pure.py'))
    put_gates(cfg, [], train='gates')
    host = type(MODELS.build(deepcopy(cfg.model)))
    cli.enable_tta(cfg)
    init_default_scope('mmengine')
    assert type(MODELS.build(cfg.model).module) is host
    cv2.imwrite(str(tmp_path / 'image.png'), np.zeros((64, 64, 3), np.uint8))
    load, *_, augment = (TRANSFORMS.build(step) for step in cfg.tta_pipeline)
    assert type(augment).__name__ == 'TestTimeAug'
    seen = augment(load(dict(img_path=str(tmp_path / 'image.png'), img_id=0, seg_fields=[])))
    assert [sample.flip for sample in seen['data_samples']] == [False, True]


@pytest.mark.parametrize('tta', [[], ['--tta']], ids=['plain', 'augmented'])
def test_gates_are_put_on_the_model_as_it_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch, tta: list) -> None:
    model = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 4)))
    mmgate.swap_attention(model, dict(type='PLuGMultiheadAttention', path='attn'))
    mmgate.save_gates(model, 'gates.safetensors')
    cfg = config_of(monkeypatch, 'test', 'x.pth', '--gates', 'gates.safetensors', *tta)
    gated = cfg.model.module if tta else cfg.model
    assert (gated.type, gated.host, gated.gates) == ('mmgate.Gated', 'M', 'gates.safetensors')
    cfg = Config(dict(model=dict(type=nn.Identity)))
    assert put_gates(cfg, [], gates='gates.safetensors') == ''
    assert cfg.model.host == 'torch.nn.modules.linear.Identity'


@pytest.mark.parametrize(
    ('model', 'said'),
    [
        (dict(gates='a.safetensors'), 'model.gates=a.safetensors'),
        (dict(attention=dict(type='mmgate.G', path='x.*')), 'G at x.* by model.attention'),
        (dict(attention=[dict(type='G', path=['x', 'y'])]), "G at ['x', 'y'] by model.attention"),
    ],
    ids=['file', 'rule', 'rules'],
)
def test_gates_that_replace_those_of_the_config(tmp_path: Path, model: dict, said: str) -> None:
    gated, file = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 4))), str(tmp_path / 'b.safetensors')
    mmgate.swap_attention(gated, dict(type='PLuGMultiheadAttention', path='attn'))
    mmgate.save_gates(gated, file)
    cfg = Config(dict(model=dict(type='mmgate.Gated', host='M', **model)))
    assert put_gates(cfg, [], gates=file).startswith(f"--gates {file} replaces the config's own gates, {said}.")
    assert cfg.model.gates == file


@pytest.mark.parametrize('evaluator', [METRIC, f'[{METRIC}, {METRIC}]'], ids=['one', 'list'])
def test_label_maps_of_every_evaluator(folder: Path, monkeypatch: pytest.MonkeyPatch, evaluator: str) -> None:
    cfg = config_of(monkeypatch, 'test', 'x.pth', '--out', 'maps', evaluator=evaluator)
    found = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    assert found == [dict(type='IoUMetric', output_dir='maps', keep_results=True)] * evaluator.count('IoU')


def test_predictions_of_a_detector_need_a_pickle(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path('config.py').write_text(SMALL.format(scope='mmdet', evaluator=METRIC))
    assert cli.main(cli.test, ['config.py', 'x.pth', '--out', 'out.json']) == 2
    assert '--out out.json: predictions are dumped into a .pkl or .pickle file' in capsys.readouterr().err

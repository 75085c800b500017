"""The benchmark of training steps and predictions."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers.pure_python import write_in_pure_python
from helpers.small_demo import CONFIG
from mmengine.hub import get_config

from mmgate.benchmarks import training
from mmgate.benchmarks.training import benchmark_training, prediction, random_batch
from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config

DETR = str(ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py')
MASK2FORMER = str(ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py')
MASK_RCNN = str(ROOT / 'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py')


@pytest.mark.parametrize(
    'config, options',
    [
        (DETR, dict(backends=('torch', 'grid_sample'))),
        (MASK2FORMER, dict(op='plug_attention', backends=('torch',))),
        (MASK_RCNN, {}),
        (DETR, dict(inference=True)),
        (MASK2FORMER, dict(inference=True)),
    ],
    ids=['boxes', 'classes', 'masks', 'predicted boxes', 'predicted classes'],
)
def test_steps_and_predictions_of_a_config_are_timed(
    config: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps run from a config's own losses and optimiser, and the environment is left as it was."""
    monkeypatch.setenv('MMGATE_MS_DEFORM_ATTN', 'torch')
    rows = list(benchmark_training(config, config, size=(64, 96), batch=1, repetitions=1, device='cpu', **options))
    kind = ('inference', 'prediction') if 'inference' in options else ('training', 'step')
    assert {(row.op, row.mode, row.x) for row in rows} == {(*kind, '64x96_b1')}
    assert {row.provider.partition(', ')[2] for row in rows} == {'', *options.get('backends', ['auto'])}
    assert {row.metric for row in rows} == {'time', 'throughput', 'peak memory', 'operators'}
    times = {row.provider: row.y_50 for row in rows if row.metric == 'time'}
    images = {row.provider: row.y_50 for row in rows if row.metric == 'throughput'}
    assert images == pytest.approx({name: 1e3 / ms for name, ms in times.items()}, rel=1e-3, abs=1e-3)
    assert os.environ['MMGATE_MS_DEFORM_ATTN'] == 'torch' and 'MMGATE_PLUG_ATTENTION' not in os.environ


def test_an_untrained_model_finds_objects_at_the_images_size() -> None:
    """Otherwise its mask head would not be in the time. Nothing is kept for a backward pass."""
    cfg = read_config(MASK_RCNN)
    before = cfg.pretty_text
    samples = prediction(cfg, (64, 96), 2, 'cpu')(torch.zeros(()))
    assert cfg.pretty_text == before and cfg.model.test_cfg.rcnn.score_thr > 0
    for sample in samples:
        found = sample.pred_instances
        assert found.masks.shape == (cfg.model.test_cfg.rcnn.max_per_img, 64, 96)
        assert not found.scores.requires_grad


def test_a_prediction_has_the_hooks_of_its_config() -> None:
    """So that a model is timed as ``tools/test.py`` runs it: channels last, say."""
    cfg = read_config(MASK_RCNN)
    cfg.custom_hooks = [dict(type='mmgate.ChannelsLastHook', paths='absent')]
    with pytest.raises(ConfigError, match="ChannelsLastHook: no module of MaskRCNN matches 'absent'"):
        prediction(cfg, (64, 96), 1, 'cpu')


def test_mask2formers_classes_have_another_name() -> None:
    cfg = get_config('mmdet::mask2former/mask2former_r50_8xb2-lsj-50e_coco.py')
    (sample,) = random_batch(cfg, (64, 96), 1)['data_samples']
    assert 3 < sample.gt_instances.labels.max() < 80


def test_speedups_are_measured_alone_and_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a config in pure Python, too; they are for training."""
    (tmp_path / 'text.py').write_text(CONFIG.replace('EPOCHS', '1'))
    peer = write_in_pure_python(read_config(str(tmp_path / 'text.py')), tmp_path / 'pure.py')
    compiled = []
    monkeypatch.setattr('mmgate.speed.hooks.CompileHook.before_train', lambda self, run: compiled.append(run))
    options = dict(size=(64, 96), batch=1, repetitions=1, device='cpu', processor_time=True)
    speedups = ('groups', 'matcher', 'all')
    rows = [r for r in benchmark_training(peer, peer, speedups=speedups, **options) if r.metric == 'time']
    assert [row.provider for row in rows] == ['pure', *(f'pure, {name}' for name in ('auto', *speedups))]
    assert len(compiled) == 1 and all(row.y_50 > 0 for row in rows)
    with pytest.raises(ConfigError, match='speedups and train change the training step'):
        next(benchmark_training(DETR, DETR, speedups=('groups',), inference=True))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_kernels_and_waits_of_a_profile() -> None:
    x = torch.randn(64, 64, device='cuda')
    found = training.profiled(lambda start: (x @ start).relu().sum().item(), x)
    assert 3 <= found['launches', '1'] < 10 and found['waits', '1'] == 1 and found['kernels', 'ms'] > 0

"""Sampling points land where they are, worked out by hand."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import over_shapes
from mmengine.config import Config
from shapes import write_shapes

import mmgate  # noqa: F401
from mmgate.analysis.probes.recording import best_queries
from mmgate.analysis.probes.sampling import SamplingPoints, density, layers_of, mean_density, query_at
from mmgate.registry import HOOKS
from mmgate.train import cli
from mmgate.train.cli import build_runner

DEMO = 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
SHAPES = torch.tensor([[4, 6], [2, 3]])


def kept(**readings: torch.Tensor) -> dict[str, dict[str, Any]]:
    """Return a recording of one layer."""
    return dict(layer={name: SimpleNamespace(last=x) for name, x in readings.items()})


@pytest.mark.parametrize(
    ('pixel', 'level', 'query'), [((100, 13), 0, 6 + 1), ((199, 49), 1, 24 + 3 + 1), (None, 0, 2 * 6 + 1)], ids=str
)
def test_a_query_is_that_of_the_pixel_on_its_level(pixel: Any, level: int, query: int) -> None:
    """An image of 200 x 50, scaled by (0.5, 2), fills the left half of its batch."""
    given = dict(img_shape=(100, 100), scale_factor=(0.5, 2.0), batch_input_shape=(100, 200))
    sample = SimpleNamespace(get=given.get, img_shape=(100, 100), ori_shape=(50, 200))
    layers = kept(spatial_shapes=SHAPES)
    assert query_at(layers, 'layer', sample, pixel, level) == query


def test_an_encoder_has_as_many_queries_as_its_levels_have_pixels() -> None:
    for queries, part in ((30, 'encoder'), (29, 'decoder')):
        layers = kept(spatial_shapes=SHAPES, locations=torch.zeros(1, queries, 1, 2, 1, 2))
        assert [name for name in ('encoder', 'decoder') if layers_of(layers, name)] == [part]


def test_best_queries_are_those_of_the_best_class() -> None:
    recording = kept(scores=torch.tensor([[[0.1, 0.2], [0.9, 0.0], [0.3, 0.4]]]), places=torch.zeros(1, 3, 4))
    assert best_queries(dict(bbox_head=recording['layer']), 0, 2).tolist() == [1, 2]
    assert best_queries({}, 0, 2).tolist() == [0, 1]


def test_density_is_that_of_the_finest_level() -> None:
    """Over two images of other sizes; the coarse level's points elsewhere weigh more, which counts for nothing."""
    rng = np.random.default_rng(0)
    points, samples = [], []
    for height, width in ((50, 100), (400, 200)):
        size = np.array([width, height])
        xy = np.stack([rng.normal((0.25, 0.75), 0.03, (6, 2, 4, 2)), rng.normal((0.75, 0.25), 0.03, (6, 2, 4, 2))], 2)
        weights = np.broadcast_to(np.array([0.01, 1.0])[:, None], (6, 2, 2, 4))
        points.append(SamplingPoints('layer', xy * size, weights, xy[:, 0, 0, 0], np.arange(6), range(2), False))
        samples.append(SimpleNamespace(ori_shape=(height, width)))
    found = mean_density(points, samples)
    row, column = np.unravel_index(found.argmax(), found.shape)
    assert abs(row / 95 - 0.75) < 0.05 and abs(column / 95 - 0.25) < 0.05 and found[24, 71] < 1e-3
    of_all = density(np.concatenate([p.xy / s.ori_shape[::-1] for p, s in zip(points, samples, strict=True)]),
                     np.concatenate([p.weights for p in points]), (1, 1))  # fmt: skip
    assert of_all is not None and of_all[24, 71] > of_all[71, 24]  # the heavier points
    assert density(np.ones((4, 2)), np.ones(4), (50, 100)) is None


def one_step(tmp_path: Path) -> Config:
    """Return the config of one step of training on one image, with what instances of mmengine's need to be told apart."""
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=1, size=64)
    (tmp_path / 'small.py').write_text(over_shapes(DEMO, tmp_path / 'shapes'))
    cfg = Config.fromfile(str(tmp_path / 'small.py'))
    cfg.work_dir, cfg.train_cfg.max_epochs = str(tmp_path), 1
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.train_dataloader.dataset.filter_cfg = None
    cfg.launcher = 'none'
    # Instances are global.
    cfg.experiment_name = cfg.visualizer.name = tmp_path.name
    return cfg


def test_backends_of_the_visualizer_get_scalars_and_a_picture(tmp_path: Path) -> None:
    """TensorBoard's files are read by its reader; our tools add the hook to a gated model by themselves."""
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    cfg = one_step(tmp_path)
    cfg.visualizer.vis_backends = [dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]
    runner = build_runner(cfg)
    cli.add_gate_statistics(runner)
    runner.train()
    runner.visualizer.close()
    (events,) = tmp_path.glob('*/vis_data/events.out.tfevents.*')
    board = EventAccumulator(str(events))
    board.Reload()
    tags = board.Tags()
    of_gates = {tag for tag in tags['scalars'] if tag.startswith('gate')}
    keys = ('mean', 'std', 'sparsity', 'moved', 'moved_most', 'grad_norm')
    assert of_gates == {f'gate/PLuGDeformableGate/{key}' for key in keys}
    (moved,) = board.Scalars('gate/PLuGDeformableGate/moved')
    assert (moved.step, moved.value) == (1, 0)
    (picture,) = board.Images('gates')
    assert picture.step == 1 and picture.width > picture.height > 100
    assert next(tmp_path.glob('*/vis_data/vis_image/gates_1.png')).stat().st_size > 5_000
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('gates: PLuGDeformableGate in 4 layers: mean 0, moved 0, at most 0, gradient ') == 1


@pytest.mark.parametrize('reason', ['vanilla', 'its own', 'left out'])
def test_the_hook_is_added_to_gated_models_alone_and_once(reason: str, tmp_path: Path) -> None:
    cfg = one_step(tmp_path)
    if reason == 'vanilla':
        cfg.model = {key: value for key, value in cfg.model.items() if key not in ('host', 'attention')}
        cfg.model.type = 'DeformableDETR'
    elif reason == 'its own':
        cfg.custom_hooks = [dict(type='mmgate.GateStatisticsHook', interval=7)]
    else:
        cfg.gate_statistics = False
    runner = build_runner(cfg)
    cli.add_gate_statistics(runner)
    found = [hook.interval for hook in runner.hooks if type(hook).__name__ == 'GateStatisticsHook']
    assert found == ([7] if reason == 'its own' else [])


def test_a_hook_writes_to_the_visualizer(tmp_path: Path) -> None:
    """One step of training, beside hooks that are gone; gates start at 0, with a gradient."""
    assert HOOKS.get('mmgate.GateStatisticsHook') is not None
    cfg = one_step(tmp_path)
    gone = [dict(type='mmgate.SamplingPointsHook', images=1, top_k=2), dict(type='mmgate.BackendChoicesHook')]
    cfg.custom_hooks = [dict(type='mmgate.GateStatisticsHook', interval=1), *gone]
    runner = build_runner(cfg)
    runner.train()
    scalars: dict[str, float] = {}
    for line in next(tmp_path.glob('*/vis_data/scalars.json')).read_text().splitlines():
        scalars.update(json.loads(line))
    prefix = 'gate/encoder.layers.0.self_attn'
    assert scalars[f'{prefix}/mean'] == 0 and scalars[f'{prefix}/sparsity'] == 1
    assert {f'{prefix}/std', f'{prefix}/grad_norm', 'gate/decoder.layers.1.cross_attn/mean'} <= set(scalars)
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert 'SamplingPointsHook do nothing any more; take them out' in log
    assert log.count('no gate of 4 layers has moved beyond 0.01') == 1
    assert not any(module._forward_hooks for module in runner.model.modules())

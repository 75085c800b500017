"""The hook that logs gates while a model trains."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
from conftest import over_shapes
from helpers.gated_layers import PLUG, SDPA, gated
from mmengine.config import Config
from shapes import write_shapes
from torch import nn

from mmgate.analysis.hooks import GateStatisticsHook
from mmgate.registry import HOOKS
from mmgate.train.cli import build_runner

DEMO = 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'


class Runner(SimpleNamespace):
    """What the hook asks a runner for; notes what is logged and warned of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model=model, rank=0, iter=0, optim_wrapper=None, scalars={}, warnings=[])
        self.logger = SimpleNamespace(warning=self.warnings.append)
        self.visualizer = SimpleNamespace(add_scalars=lambda scalars, step: self.scalars.update(scalars))


AT_REST = {
    'plug': (PLUG, 0.0, True),
    'plug_barely_moved': (PLUG, 0.009, True),
    'plug_moved': (PLUG, 0.02, False),
    'sdpa_around_1': (dict(SDPA, init='identity', scale=2.0), 0.0, True),
    'sdpa_moved': (dict(SDPA, init='identity', scale=2.0), 0.1, False),
    'sdpa_from_a_half': (SDPA, 0.0, False),
    'dgsa_which_has_no_rest': (dict(type='DifferentialGatedMultiheadAttention'), 0.0, False),
}


@pytest.mark.parametrize('name', AT_REST)
def test_a_hook_warns_of_gates_that_do_not_move(name: str) -> None:
    """After an epoch, and at a validation in a loop of iterations; one layer that moved is enough."""
    options, moved, warns = AT_REST[name]
    model, batches = gated(options)
    bias = next((p for n, p in model.named_parameters() if n in ('1.gate.gml.bias', '1.gate.gate_bias')), None)
    assert (bias is None) == ('dgsa' in name)
    if bias is not None:
        bias.data[: len(bias) // 2] += moved
    hook, runner = GateStatisticsHook(interval=1), Runner(model)
    for look in (hook.after_train_epoch, hook.before_val_epoch):
        hook.before_train_iter(runner, 0)
        model.test_step(batches[0])
        hook.after_train_iter(runner, 0)
        look(runner)
        look(runner)  # nothing was seen since
    assert len(runner.warnings) == 2 * warns
    assert all("custom_keys={'mmgate.gates': dict(lr_mult=20.0)}" in warning for warning in runner.warnings)
    if 'dgsa' in name:
        assert not any('moved' in tag for tag in runner.scalars)
    elif 'plug' in name:
        for path, expected in ('0', 0.0), ('1', moved):
            for key in ('moved', 'moved_most'):
                assert runner.scalars[f'gate/{path}/{key}'] == pytest.approx(expected, abs=1e-5)  # G is a tanh


def test_a_hook_writes_to_the_visualizer(tmp_path: Path) -> None:
    """One step of training; gates start at 0, with a gradient."""
    assert HOOKS.get('mmgate.GateStatisticsHook') is not None
    write_shapes(tmp_path / 'shapes', num_train=1, num_val=1, size=64)
    (tmp_path / 'small.py').write_text(over_shapes(DEMO, tmp_path / 'shapes'))
    cfg = Config.fromfile(str(tmp_path / 'small.py'))
    cfg.work_dir, cfg.train_cfg.max_epochs = str(tmp_path), 1
    cfg.train_dataloader.update(num_workers=0, persistent_workers=False)
    cfg.val_cfg = cfg.val_dataloader = cfg.val_evaluator = None
    cfg.train_dataloader.dataset.filter_cfg = None
    cfg.custom_hooks = [dict(type='mmgate.GateStatisticsHook', interval=1)]
    cfg.launcher, cfg.experiment_name, cfg.visualizer.name = 'none', 'hooks', 'hooks'  # instances are global
    runner = build_runner(cfg)
    runner.train()
    scalars: dict[str, float] = {}
    for line in next(tmp_path.glob('*/vis_data/scalars.json')).read_text().splitlines():
        scalars.update(json.loads(line))
    prefix = 'gate/encoder.layers.0.self_attn'
    assert scalars[f'{prefix}/mean'] == 0 and scalars[f'{prefix}/sparsity'] == 1
    assert {f'{prefix}/std', f'{prefix}/grad_norm', 'gate/decoder.layers.1.cross_attn/mean'} <= set(scalars)
    log = next(tmp_path.glob('*/*.log')).read_text()
    assert log.count('no gate of 4 layers has moved beyond 0.01') == 1
    assert not any(module._forward_hooks for module in runner.model.modules())

"""The hook that logs gates while a model trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import over_shapes
from helpers.gated_layers import HEADS, PLUG, SDPA, TOKENS, Model, gated
from mmengine.config import Config
from shapes import write_shapes
from torch import Tensor, nn

import mmgate
from mmgate import note
from mmgate.analysis.hooks import GateStatisticsHook
from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseGate
from mmgate.mm import cli
from mmgate.mm.cli import build_runner

DEMO = 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'


class Runner(SimpleNamespace):
    """What the hook asks a runner for; notes what is logged and warned of."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model=model, rank=0, iter=0, max_iters=1000, optim_wrapper=None)
        self.scalars: dict[str, float] = {}
        self.warnings: list[str] = []
        self.lines: list[str] = []
        self.images: dict[str, np.ndarray] = {}
        self.logger = SimpleNamespace(warning=self.warnings.append, info=self.lines.append)
        self.visualizer = SimpleNamespace(
            add_scalars=lambda scalars, step: self.scalars.update(scalars),
            add_image=lambda name, image, step: self.images.update({name: image}),
        )


AT_REST = {
    'plug': (PLUG, 0.0, True),
    'plug_moved': (PLUG, 0.02, False),
    'sdpa_around_1': (dict(SDPA, init='identity', scale=2.0), 0.0, True),
    'sdpa_moved': (dict(SDPA, init='identity', scale=2.0), 0.1, False),
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


def step(hook: GateStatisticsHook, runner: Runner, batch: Tensor) -> None:
    """Run the model's step between the hook's calls, with a backward pass."""
    hook.before_train_iter(runner, 0)
    (output,) = runner.model.test_step(batch)
    output.square().sum().backward()
    hook.after_train_iter(runner, 0)


def test_one_record_for_each_type() -> None:
    """Means over layers, the largest distance, the norm over all, a line each; the sizes of layers do not count."""
    model = Model(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(4))
    options = dict(init='identity', scale=2.0)
    mmgate.swap_attention(model, [dict(PLUG, path=['0', '1', '3']), dict(SDPA, path='2', **options)])
    model[1].gate.gml.bias.data[:1] += 0.2
    by_layer, by_type = Runner(model.eval()), Runner(model)
    for runner, per in ((by_layer, 'layer'), (by_type, 'type')):
        model.zero_grad()
        step(GateStatisticsHook(interval=1, per=per), runner, torch.ones(1, TOKENS, 8))
    layers, types = by_layer.scalars, by_type.scalars
    plugs = [f'gate/{layer}' for layer in '013']
    assert {tag.split('/')[1] for tag in types} == {'PLuGGate', 'SDPAGate'} and not by_layer.lines
    for key in ('mean', 'std', 'sparsity', 'moved'):
        assert types[f'gate/PLuGGate/{key}'] == pytest.approx(np.mean([layers[f'{tag}/{key}'] for tag in plugs]))
    assert types['gate/PLuGGate/moved_most'] == max(layers[f'{tag}/moved_most'] for tag in plugs) > 0.1
    norm = np.linalg.norm([layers[f'{tag}/grad_norm'] for tag in plugs])
    assert types['gate/PLuGGate/grad_norm'] == pytest.approx(norm, rel=1e-5) and norm > 0
    assert types['gate/SDPAGate/mean'] == pytest.approx(1, abs=1e-5)
    assert [line.partition(': mean')[0] for line in by_type.lines] == [
        'gates: PLuGGate in 3 layers', 'gates: SDPAGate in 1 layer'
    ]  # fmt: skip
    picture = by_type.images['gates']
    assert picture.dtype == np.uint8 and picture.ndim == 3 and picture.shape[2] == 3 and picture.std() > 10
    with pytest.raises(ConfigError, match="per='head': it is one of 'layer', 'type'"):
        GateStatisticsHook(per='head')


class Tempered(DenseGate):
    """A gate of a user, whose only note has a name of the user's choice."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.temperature = nn.Parameter(torch.ones(1, self.num_heads, 1, 1))

    def reset(self) -> None:
        nn.init.ones_(self.temperature)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, bias: Tensor | None) -> Tensor:
        note(self, 'temperature', self.temperature, 'heads', unchanged=1)
        return super().attend(query / self.temperature, key, value, inputs, bias)


def test_a_note_of_any_name_is_logged() -> None:
    model, (batch, *_) = gated(dict(type=Tempered))
    runner = Runner(model)
    step(GateStatisticsHook(interval=1, per='type'), runner, batch)
    assert {'temperature/Tempered/mean', 'gate/Tempered/grad_norm'} <= set(runner.scalars) and not runner.warnings
    assert runner.lines[0].startswith('gates: Tempered (temperature) in 2 layers: mean ')


def test_the_last_iteration_is_recorded_and_nothing_to_see_is_said_once() -> None:
    model, (batch, *_) = gated(PLUG)
    runner = Runner(model)
    hook = GateStatisticsHook(interval=500)
    step(hook, runner, batch)
    assert not runner.scalars
    runner.iter = 999
    step(hook, runner, batch)
    assert runner.scalars
    vanilla = Runner(Model([nn.MultiheadAttention(8, HEADS, batch_first=True)]))
    hook = GateStatisticsHook(interval=1)
    for _ in range(2):
        step(hook, vanilla, batch.clone().requires_grad_())
    assert len(vanilla.lines) == 1 and not vanilla.images


def one_step(tmp_path: Path) -> Config:
    """Return the config of one step of training on one image, told apart from others of the process."""
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

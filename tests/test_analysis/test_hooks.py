"""The hook that logs gates while a model trains."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.gated_layers import HEADS, PLUG, SDPA, TOKENS, Model, gated
from helpers.small_demo import logged, run, write_demo
from mmengine.visualization import Visualizer
from torch import Tensor, nn

import mmgate
from mmgate import note
from mmgate.analysis.hooks import GateStatisticsHook
from mmgate.analysis.probes.gates import gate_statistics, mean_maps
from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseGate
from mmgate.mm import cli


def fake_runner(model: nn.Module) -> Any:
    """Return what the hook asks a runner for, which notes what is logged and warned of."""
    runner = SimpleNamespace(model=model, rank=0, iter=0, max_iters=1000, optim_wrapper=None)
    runner.scalars, runner.images, runner.warnings, runner.lines = {}, {}, [], []
    runner.logger = SimpleNamespace(warning=runner.warnings.append, info=runner.lines.append)
    runner.visualizer = SimpleNamespace(
        add_scalars=lambda scalars, step: runner.scalars.update(scalars),
        add_image=lambda name, image, step: runner.images.update({name: image}),
    )
    return runner


@pytest.mark.parametrize(
    ('options', 'moved', 'warns'),
    [
        (PLUG, 0.0, True),
        (PLUG, 0.02, False),
        (dict(SDPA, init='identity', scale=2.0), 0.0, True),
        (dict(type='DifferentialGatedMultiheadAttention'), None, False),
    ],
    ids=['plug', 'plug, of which a layer moved', 'sdpa, around 1', 'dgsa, which has no rest'],
)
def test_a_hook_warns_of_gates_that_do_not_move(options: dict[str, Any], moved: float | None, warns: bool) -> None:
    """After an epoch, and at a validation in a loop of iterations."""
    model, batches = gated(options)
    if moved:
        model[1].gate.gml.bias.data[0] += moved
    hook, runner = GateStatisticsHook(interval=1), fake_runner(model)
    for look in (hook.after_train_epoch, hook.before_val_epoch):
        hook.before_train_iter(runner, 0)
        model.test_step(batches[0])
        hook.after_train_iter(runner, 0)
        look(runner)
        look(runner)  # nothing was seen since
    assert len(runner.warnings) == 2 * warns
    assert all("custom_keys={'mmgate.gates': dict(lr_mult=20.0)}" in warning for warning in runner.warnings)
    distances = {tag: value for tag, value in runner.scalars.items() if 'moved' in tag}
    of_layers = {} if moved is None else {'0': 0.0, '1': moved}
    expected = {f'gate/{path}/{key}': value for path, value in of_layers.items() for key in ('moved', 'moved_most')}
    assert distances == pytest.approx(expected, abs=1e-5)  # G is a tanh


def step(hook: GateStatisticsHook, runner: Any, batch: Tensor) -> None:
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
    by_layer, by_type = fake_runner(model.eval()), fake_runner(model)
    by_type.optim_wrapper = SimpleNamespace(loss_scaler=SimpleNamespace(get_scale=lambda: 4.0))
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
    assert types['gate/PLuGGate/grad_norm'] == pytest.approx(norm / 4, rel=1e-5) and norm > 0  # without the scale
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

    def attend(self, query: Tensor, *rest: Any) -> Tensor:
        note(self, 'temperature', self.temperature, 'heads', unchanged=0.5)
        return super().attend(query / self.temperature, *rest)


def test_a_note_of_any_name_is_logged_and_drawn() -> None:
    model, batches = gated(dict(type=Tempered))
    runner = fake_runner(model)
    step(GateStatisticsHook(interval=1, per='type'), runner, batches[0])
    assert {'temperature/Tempered/mean', 'gate/Tempered/grad_norm'} <= set(runner.scalars) and not runner.warnings
    assert runner.lines[0].startswith('gates: Tempered (temperature) in 2 layers: mean ')
    gates = gate_statistics(model, batches)
    found = [(gate.path, gate.name, gate.axes, gate.row()['moved']) for gate in gates]
    assert found == [(path, 'temperature', 'heads', 0.5) for path in '01'] and mean_maps(gates)


def test_the_last_iteration_is_recorded_and_nothing_to_see_is_said_once() -> None:
    model, (batch, *_) = gated(PLUG)
    runner = fake_runner(model)
    hook = GateStatisticsHook(interval=500)
    for runner.iter, runner.rank in ((998, 0), (999, 1), (999, 0)):
        assert not runner.scalars
        step(hook, runner, batch)
    assert runner.scalars
    vanilla = fake_runner(Model([nn.MultiheadAttention(8, HEADS, batch_first=True)]))
    hook = GateStatisticsHook(interval=1)
    for _ in range(2):
        step(hook, vanilla, batch)
    assert len(vanilla.lines) == 1 and not vanilla.images


def test_backends_of_the_visualizer_get_scalars_and_a_picture(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorBoard's files are read by its reader; our tools add the hook to a gated model by themselves."""
    pytest.importorskip('tensorboard')
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    backends = "[dict(type='LocalVisBackend'), dict(type='TensorboardVisBackend')]"
    monkeypatch.chdir(write_demo(tmp_path, images=2))
    Path('board.py').write_text(f"_base_ = './gated.py'\nvisualizer = dict(vis_backends={backends})\n")
    run(cli.train, 'board.py', '--work-dir', 'work')
    Visualizer.get_current_instance().close()
    (events,) = Path('work').glob('*/vis_data/events.out.tfevents.*')
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
    assert next(Path('work').glob('*/vis_data/vis_image/gates_1.png')).stat().st_size > 5_000
    assert logged('work').count('gates: PLuGDeformableGate in 2 layers: mean 0, moved 0, at most 0, gradient ') == 1


@pytest.mark.parametrize('reason', ['none', 'vanilla', 'its own', 'left out'])
def test_the_hook_is_added_to_gated_models_alone_and_once(reason: str) -> None:
    model = nn.MultiheadAttention(8, HEADS) if reason == 'vanilla' else gated(PLUG)[0]
    hooks = [GateStatisticsHook(interval=7)] if reason == 'its own' else []
    cfg = dict(gate_statistics=False) if reason == 'left out' else {}
    added: list[dict[str, Any]] = []
    cli.add_gate_statistics(SimpleNamespace(model=model, hooks=hooks, cfg=cfg, register_hook=added.append))
    assert len(added) == (reason == 'none')

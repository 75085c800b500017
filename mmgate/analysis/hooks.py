"""A hook that shows what gates do during a run."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from mmengine.hooks import Hook
from torch import Tensor, nn

from mmgate.analysis.probes.attention import GATES, gate_at
from mmgate.analysis.probes.gates import unchanged_value
from mmgate.analysis.probes.recording import Recording, readable, record
from mmgate.analysis.probes.statistics import RunningStatistics
from mmgate.layers.base.gate import gate_parameters
from mmgate.paths import own_model
from mmgate.registry import HOOKS

AT_REST = 0.01  # a gate this near, in the mean, to the value at which it changes nothing has not moved


@HOOKS.register_module()
class GateStatisticsHook(Hook):
    """Log mean, spread, sparsity, distance and gradient norm of every layer's gate to the run's visualizer.

    Tags are ``gate/<path>/<mean | std | sparsity | moved | moved_most | grad_norm>``, for SAGA ``gate_k/...`` and so
    on, in all the visualizer's backends (local JSON, TensorBoard, wandb). ``moved`` and ``moved_most`` are the mean and
    the largest distance from the value at which attention is as without the gate, where there is one. Of one iteration
    in ``interval``, on the first process; the others cost nothing. The gradient is that of this iteration's loss and
    process, before clipping and before an average over processes, with a loss scale divided out.

    After an epoch, or a validation in a loop of iterations, it warns if no layer's gate was seen farther than 0.01 from
    that value, in the mean: such a model still computes about what it would without gates.

    Args:
        interval: Iterations from one record to the next.
    """

    priority = 'BELOW_NORMAL'

    def __init__(self, interval: int = 50) -> None:
        self.interval = interval
        self._open = ExitStack()
        self._recording: Recording | None = None
        self._squares: dict[str, Tensor] = {}
        self._moved: dict[str, float] = {}  # the mean distance by layer, since the last look

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Begin to record, one iteration in ``interval``."""
        self._open.close()  # of an iteration that failed
        self._recording, self._squares = None, {}
        if not self.every_n_train_iters(runner, self.interval) or runner.rank:
            return
        model = own_model(runner.model)
        has = readable(model)
        for path in dict.fromkeys(path for name in GATES for path in has.get(name, ())):
            for _, parameter in gate_parameters(model.get_submodule(path)):
                if parameter.requires_grad:  # the optimizer wrapper clears gradients before a hook sees them
                    self._open.callback(parameter.register_hook(partial(self._add_square, path)).remove)
        recorded = record(model, GATES, accumulate=partial(_statistics, model))
        self._recording = self._open.enter_context(recorded)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log what was recorded."""
        self._open.close()
        if self._recording is None:
            return
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        scale = scaler.get_scale() if scaler is not None else 1.0
        scalars: dict[str, float] = {}
        for path, readings in self._recording.items():
            for name, found in readings.items():
                numbers = dict(mean=found.mean, std=found.deviation, sparsity=found.sparsity)
                if found.centre is not None:
                    numbers.update(moved=found.distance, moved_most=found.farthest)
                    self._moved[path] = max(self._moved.get(path, 0.0), found.distance)
                scalars.update({f'{name}/{path}/{key}': number for key, number in numbers.items()})
            if path in self._squares:  # of all gates of the layer
                scalars[f'gate/{path}/grad_norm'] = float(self._squares[path].sqrt()) / scale
        if scalars:
            runner.visualizer.add_scalars(scalars, step=runner.iter + 1)
        else:  # none in the model, or a compiled one
            runner.logger.warning('GateStatisticsHook: no gate was seen in the forward pass, so nothing is logged.')

    def after_train_epoch(self, runner: Any) -> None:
        """Warn if no gate moved."""
        self._warn_of_rest(runner)

    def before_val_epoch(self, runner: Any) -> None:
        """Warn if no gate moved, in a loop of iterations, which has one epoch in all."""
        self._warn_of_rest(runner)

    def _warn_of_rest(self, runner: Any) -> None:
        farthest = max(self._moved.values(), default=float('inf'))
        if farthest <= AT_REST:
            runner.logger.warning(
                f'GateStatisticsHook: no gate of {len(self._moved)} layers has moved beyond {AT_REST} in the mean '
                f'(the farthest: {farthest:.2g}), so the model still computes about what it would without them. '
                'Gates that start as the identity need a higher rate than a trained model: optim_wrapper=dict('
                "constructor='mmgate.GateOptimWrapperConstructor', paramwise_cfg=dict(custom_keys={'mmgate.gates': "
                'dict(lr_mult=20.0)})), see docs/adapters.md.'
            )
        self._moved.clear()

    def _add_square(self, path: str, gradient: Tensor) -> None:
        self._squares[path] = self._squares.get(path, 0) + gradient.detach().float().square().sum()


def _statistics(model: nn.Module, path: str, name: str) -> RunningStatistics:
    return RunningStatistics(unchanged_value(gate_at(model.get_submodule(path)), name))


@HOOKS.register_module(name=['BackendChoicesHook', 'SamplingPointsHook'])
class FormerHook(Hook):
    """Deprecated: does nothing but say so, under names that configs may hold; their ``options`` are dropped."""

    def __init__(self, **options: Any) -> None:
        pass

    def before_run(self, runner: Any) -> None:
        """Say what to do instead."""
        runner.logger.warning(
            'BackendChoicesHook and SamplingPointsHook do nothing any more; take them out of custom_hooks. '
            'tools/analysis_tools/plot_sampling_points.py CONFIG CHECKPOINT draws sampling points.'
        )

"""A hook that logs statistics of the gates during a run."""

from __future__ import annotations

from contextlib import ExitStack
from functools import partial
from typing import Any

from mmengine.hooks import Hook
from torch import Tensor, nn

from mmgate.analysis.probes.attention import GATES, gate_at
from mmgate.analysis.probes.recording import Recording, readable, record
from mmgate.analysis.probes.statistics import RunningStatistics
from mmgate.layers.base.gate import gate_parameters
from mmgate.paths import own_model
from mmgate.registry import HOOKS

# A gate whose mean distance from the value at which it changes nothing is at most this has not moved.
AT_REST = 0.01


@HOOKS.register_module()
class GateStatisticsHook(Hook):
    """Log mean, spread, sparsity, distance and gradient norm of every layer's gate to the run's visualizer.

    Tags are ``gate/<path>/<mean | std | sparsity | moved | moved_most | grad_norm>``, for SAGA ``gate_k/...`` and so
    on, in all the visualizer's backends (local JSON, TensorBoard, wandb). ``moved`` and ``moved_most`` are the mean and
    the largest distance from the value at which attention is as without the gate, where there is one. One iteration in
    ``interval`` is logged, by the first process; the others cost nothing. The gradient is that of this iteration's loss
    in this process, before clipping and averaging over processes, with a loss scale divided out.

    After an epoch, or a validation in a loop of iterations, it warns if the mean distance of every layer's gate from
    that value stayed within 0.01: such a model still computes about what it would without gates.

    Args:
        interval: Iterations from one record to the next.
    """

    priority = 'BELOW_NORMAL'

    def __init__(self, interval: int = 50) -> None:
        self.interval = interval
        self._open = ExitStack()
        self._recording: Recording | None = None
        self._squares: dict[str, Tensor] = {}
        # Largest mean distance of each layer since the last warning or check.
        self._moved: dict[str, float] = {}

    def before_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None) -> None:
        """Begin to record in one iteration of ``interval``."""
        # An iteration that failed may have left hooks.
        self._open.close()
        self._recording = None
        self._squares = {}
        if not self.every_n_train_iters(runner, self.interval) or runner.rank:
            return
        model = own_model(runner.model)
        has = readable(model)
        for path in dict.fromkeys(path for name in GATES for path in has.get(name, ())):
            for _, parameter in gate_parameters(model.get_submodule(path)):
                # The optimizer wrapper clears gradients before ``after_train_iter``, so that a hook has to take them.
                if parameter.requires_grad:
                    self._open.callback(parameter.register_hook(partial(self._add_square, path)).remove)
        recorded = record(model, GATES, accumulate=partial(_statistics, model))
        self._recording = self._open.enter_context(recorded)

    def after_train_iter(self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
        """Log the statistics of this iteration, if they were recorded."""
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
            # The norm is over all gates of the layer.
            if path in self._squares:
                scalars[f'gate/{path}/grad_norm'] = float(self._squares[path].sqrt()) / scale
        if scalars:
            runner.visualizer.add_scalars(scalars, step=runner.iter + 1)
        else:  # the model has no gates, or it is compiled
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
    return RunningStatistics(gate_at(model.get_submodule(path)).unchanged_value(name))


@HOOKS.register_module(name=['BackendChoicesHook', 'SamplingPointsHook'])
class FormerHook(Hook):
    """Deprecated hook that only logs a warning, under names that configs may hold; ``options`` are ignored."""

    def __init__(self, **options: Any) -> None:
        pass

    def before_run(self, runner: Any) -> None:
        """Warn, and name the tool to use instead."""
        runner.logger.warning(
            'BackendChoicesHook and SamplingPointsHook do nothing any more; take them out of custom_hooks. '
            'tools/analysis_tools/plot_sampling_points.py CONFIG CHECKPOINT draws sampling points.'
        )

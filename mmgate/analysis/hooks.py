"""A hook of mmengine's Runner that logs statistics of the gates while a gated model trains."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from statistics import mean

from mmengine.hooks import Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.runner import Runner
from torch import Tensor

from mmgate.analysis.figures.gates import histogram_image
from mmgate.analysis.probes.gates import LayerGate
from mmgate.errors import ConfigError
from mmgate.gate import Gate
from mmgate.notes import GATES, Recording
from mmgate.recording import note_path, record
from mmgate.registry import HOOKS
from mmgate.wrappers import unwrap_model

# A gate whose mean distance from the value at which it changes nothing is at most this has not moved.
AT_REST = 0.01
PER = ('layer', 'type')


@HOOKS.register_module()
class GateStatisticsHook(Hook):
    """Hook that logs statistics of the gates during training: mean, spread, movement, gradient norm, histogram.

    All backends of the run's visualizer get them (local JSON and PNG, TensorBoard, W&B, MLflow). Tags of scalars are
    ``gate/<path>/<mean | std | sparsity | moved | moved_most | grad_norm>``; values of another name, such as SAGA's
    ``gate_k``, have that name in front. Per type the path is the gate's class, and the values are means over its layers
    (the largest for ``moved_most``, the norm over all for ``grad_norm``); the log gets a line for each. ``moved`` and
    ``moved_most`` are the mean and the largest distance from the value at which attention is as without the gate, where
    there is one. The tag of the histograms' picture is ``gates``. One iteration in ``interval`` is logged, and the
    last, by the first process; the others cost nothing. The gradient is that of this iteration's loss in this process,
    before clipping and averaging over processes, with a loss scale divided out. With ``accumulative_counts`` it is of
    the loss divided by it, as the optimizer sees it.

    After an epoch, or a validation in a loop of iterations, it warns if the mean distance of every layer's gate from
    that value stayed within 0.01: such a model still computes about what it would without gates.

    Args:
        interval: Iterations from one record to the next.
        per: ``'layer'`` or ``'type'``: a record for each layer, or one for all layers with gates of one class.

    Raises:
        ConfigError: ``per`` is unknown.
    """

    priority = 'BELOW_NORMAL'

    def __init__(self, interval: int = 50, per: str = 'layer') -> None:
        if per not in PER:
            raise ConfigError(f'GateStatisticsHook: per={per!r}: it is one of {", ".join(map(repr, PER))}.')
        self.interval = interval
        self.per = per
        self._open = ExitStack()
        self._recording: Recording | None = None
        self._squares: dict[str, Tensor] = {}
        self._scale = 1.0
        # Largest mean distance of each layer since the last warning or check.
        self._moved: dict[str, float] = {}
        self._said = False

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None) -> None:
        """Begin to record the gates if this is one of every ``interval`` iterations, or the last one."""
        # An iteration that failed may have left hooks.
        self._open.close()
        self._recording = None
        self._squares = {}
        is_due = self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner)
        if not is_due or runner.rank:
            return
        scaler = getattr(runner.optim_wrapper, 'loss_scaler', None)
        self._scale = scaler.get_scale() if scaler is not None else 1.0  # the step may change it
        model = unwrap_model(runner.model)
        for name, gate in model.named_modules():
            place = note_path(name, gate) if self.per == 'layer' else type(gate).__name__
            for parameter in gate.parameters() if isinstance(gate, Gate) else ():
                # The optimizer wrapper clears gradients before ``after_train_iter``, so that a hook has to take them.
                if parameter.requires_grad:
                    self._open.callback(parameter.register_hook(partial(self._add_square, place)).remove)
        self._recording = self._open.enter_context(record(model, [GATES], accumulate=LayerGate))

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: dict[str, Tensor] | None = None
    ) -> None:
        """Log the gates' statistics of this iteration, if they were recorded in it."""
        self._open.close()
        if self._recording is None:
            return
        gates: list[LayerGate] = [gate for notes in self._recording.values() for gate in notes.values()]
        if not gates:  # the model has none, or none that notes its values, or it is compiled
            if not self._said:
                runner.logger.info('GateStatisticsHook: no gate was seen in the forward pass, so nothing is logged.')
            self._said = True
            return
        for gate in gates:
            if gate.unchanged is not None:
                self._moved[gate.path] = max(self._moved.get(gate.path, 0.0), gate.statistics.distance)
        # A layer's norm is over all of its gates, which are not told apart.
        norms = {place: float(square.sqrt()) / self._scale for place, square in self._squares.items()}
        scalars = {f'gate/{place}/grad_norm': norm for place, norm in norms.items()}
        grouped: dict[tuple[str, str], list[LayerGate]] = {}
        by_kind: dict[str, list[LayerGate]] = {}
        for gate in gates:
            grouped.setdefault((gate.name, gate.path if self.per == 'layer' else gate.kind), []).append(gate)
            by_kind.setdefault(gate.kind, []).append(gate)
        for (name, place), listed in grouped.items():
            numbers = _numbers(listed)
            scalars.update({f'{name}/{place}/{key}': number for key, number in numbers.items()})
            if self.per == 'type':
                runner.logger.info(_line(place, name, len(listed), numbers, norms.get(place)))
        runner.visualizer.add_scalars(scalars, step=runner.iter + 1)
        runner.visualizer.add_image('gates', histogram_image(by_kind), step=runner.iter + 1)

    def after_train_epoch(self, runner: Runner) -> None:
        """Warn, after an epoch or before a validation, if all gates are close to the value that changes nothing."""
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

    def before_val_epoch(self, runner: Runner) -> None:
        """Warn as after an epoch, in a run that is counted in iterations."""
        self.after_train_epoch(runner)

    def _add_square(self, place: str, gradient: Tensor) -> None:
        self._squares[place] = self._squares.get(place, 0) + gradient.detach().float().square().sum()


def _numbers(gates: Sequence[LayerGate]) -> dict[str, float]:
    """Return the statistics of some gates by name, each averaged over the layers."""
    found = [gate.statistics for gate in gates]
    keys = dict(mean='mean', std='deviation', sparsity='sparsity', moved='distance')
    numbers = {key: mean(getattr(one, name) for one in found) for key, name in keys.items()}
    numbers['moved_most'] = max(one.farthest for one in found)
    known = all(gate.unchanged is not None for gate in gates)
    return {key: number for key, number in numbers.items() if known or 'moved' not in key}


def _line(kind: str, name: str, layers: int, numbers: Mapping[str, float], norm: float | None) -> str:
    """Return the line of the log that sums up the gates of one class."""
    of_name = '' if name == 'gate' else f' ({name})'
    parts = [f'mean {numbers["mean"]:.3g}']
    if 'moved' in numbers:
        parts.append(f'moved {numbers["moved"]:.2g}, at most {numbers["moved_most"]:.2g}')
    if norm is not None:
        parts.append(f'gradient {norm:.2g}')
    return f'gates: {kind}{of_name} in {layers} layer{"s" if layers > 1 else ""}: {", ".join(parts)}'

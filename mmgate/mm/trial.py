"""Change any config to a short training, in which a vanilla model and gated ones can be compared."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from fractions import Fraction
from typing import Any

from mmengine.config import Config, ConfigDict

from mmgate.errors import ConfigError

from .config_file import mappings, type_name
from .gate_options import group_parameters, import_mmgate
from .parameter_groups import GATES, GateOptimWrapperConstructor

# By the class of a metric: the figures that its test logs, by what is measured.
FIRST_FIGURES = {
    'CocoMetric': {'bbox': 'coco/bbox_mAP', 'segm': 'coco/segm_mAP'},
    'IoUMetric': {'mIoU': 'mIoU'},
    'Accuracy': {'': 'accuracy/top1'},
    'VOCMetric': {'mAP': 'pascal_voc/mAP'},
}
# Settings of a scheduler that count steps.
_COUNTS = ('begin', 'end', 'milestones', 'T_max', 'step_size', 'total_steps', 'periods')
_WARM_UPS = ('LinearLR', 'ConstantLR')
SHORTEST_WARM_UP = 20  # a warm-up takes at least one part of so many


def make_trial(
    cfg: Config,
    *,
    steps_in_epoch: int,
    iters: int | None = None,
    epochs: int | None = None,
    checkpoint: str | None = None,
    gate_rate: float | Mapping[str, float] = 1.0,
    validations: int = 4,
) -> None:
    """Change a config to a short training; once stopped, it resumes from its last checkpoint.

    The schedule of the learning rate is squeezed into the new length; warm-ups take at least a twentieth of it.

    Args:
        cfg: The config; it is changed.
        steps_in_epoch: Batches of the training data.
        iters: Length in iterations.
        epochs: Length in epochs, instead.
        checkpoint: Vanilla checkpoint to go on from; without one the training begins as the config says.
        gate_rate: Learning rate of gates, as a multiple of the model's; or one for each class of gates, by its name.
        validations: Number of validations, evenly spaced.

    Raises:
        ConfigError: The config trains nothing, or counts iterations and is given epochs.
    """
    if not cfg.get('train_dataloader') or not cfg.get('train_cfg') or not cfg.get('optim_wrapper'):
        needed = 'train_dataloader, train_cfg and optim_wrapper'
        raise ConfigError(f'config {cfg.filename} trains nothing: it lacks one of {needed}.')
    # A training is counted in epochs or in iterations.
    by_epoch = 'max_iters' not in cfg.train_cfg and cfg.train_cfg.get('by_epoch') is not False
    whole = int(cfg.train_cfg.get('max_epochs') or 1) * steps_in_epoch if by_epoch else int(cfg.train_cfg.max_iters)
    if epochs is not None and not by_epoch:
        raise ConfigError(f'config {cfg.filename} counts iterations: give --iters, such as --iters {min(500, whole)}.')
    length = epochs * steps_in_epoch if epochs is not None else iters
    if not length or length < 1:
        raise ConfigError('a trial takes 1 iteration or more.')
    _squeeze(cfg, Fraction(length, whole), length, steps_in_epoch)
    _set_loop(cfg, epochs if epochs is not None else length, epochs is not None, validations)
    sampler = cfg.train_dataloader.get('sampler')
    # The finite sampler would wait two seconds at the end of each epoch of a loop of iterations.
    if epochs is None and sampler and type_name(sampler) == 'DefaultSampler':
        cfg.train_dataloader.sampler = ConfigDict(type='InfiniteSampler', shuffle=sampler.get('shuffle', True))
    cfg.load_from = checkpoint or cfg.get('load_from')
    cfg.resume = False
    import_mmgate(cfg)
    group_parameters(cfg, GateOptimWrapperConstructor)
    rates = gate_rate if isinstance(gate_rate, Mapping) else {'': gate_rate}
    keys = {f'{GATES}.{gate}' if gate else GATES: dict(lr_mult=own) for gate, own in rates.items() if own != 1}
    if keys:
        options = dict(cfg.optim_wrapper.get('paramwise_cfg') or {})
        # Set as a key: merged as an option, a name with dots would become a path.
        options['custom_keys'] = {**(options.get('custom_keys') or {}), **keys}
        cfg.optim_wrapper.paramwise_cfg = options


def first_figure(cfg: Config) -> str:
    """Return the name of a config's main metric as the log of a test has it, such as ``coco/bbox_mAP``.

    Raises:
        ConfigError: The metric is none whose figures are known.
    """
    given = cfg.get('test_evaluator') or cfg.get('val_evaluator') or ()
    metrics = given if isinstance(given, Sequence) else [given]
    for metric in metrics:
        figures = FIRST_FIGURES.get(type_name(metric), {})
        asked = metric.get('metric') or metric.get('iou_metrics') or metric.get('topk') or list(figures)
        listed = list(asked) if isinstance(asked, (list, tuple)) else [asked]
        for name, figure in figures.items():
            if name in listed or len(figures) == 1:
                prefix = metric.get('prefix')
                return f'{prefix}/{figure.rpartition("/")[2]}' if prefix else figure
    known = ', '.join(FIRST_FIGURES)
    named = ', '.join(map(type_name, metrics)) or 'no evaluator'
    raise ConfigError(f'{cfg.filename} has {named}, and first figures are known of {known}: give --metric NAME.')


def _squeeze(cfg: Config, factor: Fraction, length: int, steps_in_epoch: int) -> None:
    """Shorten the learning-rate schedulers of a config by a factor; they count iterations afterwards."""
    for _, scheduler in mappings(cfg.get('param_scheduler')):
        if 'type' not in scheduler:
            continue
        by_epoch = scheduler.get('by_epoch', True)
        of_one = factor * (steps_in_epoch if by_epoch else 1)
        for key in _COUNTS:
            if scheduler.get(key) is not None:
                scheduler[key] = _times(scheduler[key], of_one)
        if type_name(scheduler).endswith('ExponentialLR') and 'gamma' in scheduler:
            scheduler.gamma **= float(1 / of_one)
        scheduler.by_epoch = False
        scheduler.pop('convert_to_iter_based', None)
    # A warm-up of a step or two would have no effect.
    least = math.ceil(length / SHORTEST_WARM_UP)
    for _, scheduler in mappings(cfg.get('param_scheduler')):
        warms = type_name(scheduler).endswith(_WARM_UPS) and not scheduler.get('begin')
        if warms and scheduler.get('end') and scheduler.end < least:
            before = scheduler.end
            scheduler.end = least
            for _, other in mappings(cfg.param_scheduler):
                if other.get('begin') == before:
                    other.begin = least


def _times(value: Any, factor: Fraction) -> Any:
    if isinstance(value, (list, tuple)):
        return [_times(one, factor) for one in value]
    return max(1, round(value * factor)) if isinstance(value, int) and value > 0 else value


def _set_loop(cfg: Config, length: int, by_epoch: bool, validations: int) -> None:
    counted = 'max_epochs' if by_epoch else 'max_iters'
    interval = max(1, math.ceil(length / validations))
    loop_type = 'EpochBasedTrainLoop' if by_epoch else 'IterBasedTrainLoop'
    # ``merge`` would keep what the other loop does not take.
    cfg.train_cfg = ConfigDict({'type': loop_type, counted: length, 'val_interval': interval})
    hooks = cfg.setdefault('default_hooks', ConfigDict())
    hooks['checkpoint'] = dict(type='CheckpointHook', by_epoch=by_epoch, interval=interval, max_keep_ckpts=2)
    every = 10 if by_epoch else max(1, min(50, length // 20))
    hooks['logger'] = dict(type='LoggerHook', interval=every, log_metric_by_epoch=by_epoch)
    log = cfg.get('log_processor')
    cfg.log_processor = dict(log if isinstance(log, dict) else dict(type='LogProcessor'), by_epoch=by_epoch)

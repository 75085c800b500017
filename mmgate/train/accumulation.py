"""The batch of an optimizer step: images a process x processes x accumulation, and what follows from it."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from fractions import Fraction
from typing import Any

from mmengine.config import Config
from mmengine.runner import FlexibleRunner, Runner

from mmgate.errors import ConfigError

from .config_file import type_name

# Scheduler and hook settings that count iterations where by_epoch=False.
_SCHEDULER_COUNTS = ('begin', 'end', 'milestones', 'T_max', 'step_size', 'total_steps', 'periods')
_HOOK_COUNTS = ('interval', 'save_begin')
_LOOP_COUNTS = ('max_iters', 'val_interval', 'val_begin', 'dynamic_intervals')


def processes(launcher: str) -> int:
    """Return how many processes ``launcher`` started, by the environment: none of them may be connected yet."""
    variable = {'pytorch': 'WORLD_SIZE', 'slurm': 'SLURM_NTASKS', 'mpi': 'OMPI_COMM_WORLD_SIZE'}.get(launcher, '')
    return int(os.environ.get(variable, 1))


def accumulation(cfg: Config) -> int:
    """Return over how many iterations the config accumulates gradients."""
    return int((cfg.get('optim_wrapper') or {}).get('accumulative_counts', 1))


def enable_auto_accumulate(cfg: Config) -> str:
    """Set the accumulation that brings a step to ``auto_scale_lr.base_batch_size`` images.

    mmengine counts iterations, not optimizer steps. Whatever the config counts in iterations (``max_iters``, warm-ups,
    schedules, intervals of validation and checkpoints with ``by_epoch=False``) is stretched by the same factor, so that
    the run sees as many optimizer steps and images as the recipe, however few the GPUs. What a config counts in epochs
    stays, and so do hooks that count iterations without ``by_epoch`` (logging, moving averages).

    Returns:
        What was set, for the log.

    Raises:
        ConfigError: No whole accumulation gives that batch; the message has the numbers.
    """
    base, batch, world = _base_batch_size(cfg, '--auto-accumulate'), _images(cfg), processes(cfg.launcher)
    at_once = f'{world} processes x {batch} images = {world * batch} at a time'
    if base % (world * batch):
        raise ConfigError(f'--auto-accumulate: {at_once}, and {base} a step is no multiple. {_remedy(base, world)}')
    counts = base // (world * batch)
    if (cfg.get('strategy') or {}).get('type') == 'DeepSpeedStrategy':
        raise ConfigError(
            '--auto-accumulate: DeepSpeed accumulates by itself; give --cfg-options '
            f'strategy.gradient_accumulation_steps={counts} for {base} images a step.'
        )
    if 'optimizer' not in (cfg.get('optim_wrapper') or {}):
        raise ConfigError(
            f'--auto-accumulate sets optim_wrapper.accumulative_counts={counts} beside optim_wrapper.optimizer, which '
            'this config lacks (several optimizers?); set the counts in the config.'
        )
    factor = Fraction(counts, accumulation(cfg))
    cfg.optim_wrapper.accumulative_counts = counts
    stretched = _stretch(cfg, factor)
    note = f'; iterations x {factor}: {", ".join(stretched)}' if stretched else ''
    return f'--auto-accumulate: {at_once}, accumulated over {counts} = {base} a step{note}'


def enable_auto_scale_lr(cfg: Config) -> None:
    """Scale the learning rate by real over base batch size.

    Raises:
        ConfigError: The config names no base batch size.
    """
    _base_batch_size(cfg, '--auto-scale-lr')
    cfg.auto_scale_lr.enable = True


def count_accumulation(runner: Runner | FlexibleRunner, cfg: Config) -> str | None:
    """Make a runner that scales its learning rate count accumulated images too, which mmengine leaves out.

    The config keeps its base batch size, so that a run of the dumped one is scaled alike.

    Returns:
        What it comes to, for the log, or None if nothing is scaled.
    """
    scaling = cfg.get('auto_scale_lr') or {}
    if not scaling.get('enable') or 'base_batch_size' not in scaling:
        return None
    base, counts = scaling['base_batch_size'], accumulation(cfg)
    adjusted = dict(scaling, base_batch_size=base / counts)
    if isinstance(runner, FlexibleRunner):
        runner.strategy._auto_scale_lr = adjusted
    else:
        runner.auto_scale_lr = adjusted
    world, batch = runner.world_size, _images(cfg)
    size = world * batch * counts
    return (
        f'--auto-scale-lr: {world} processes x {batch} images x {counts} accumulated = {size} a step, '
        f'the learning rate is for {base}: x {size / base:g} (mmengine states both numbers without the accumulation)'
    )


def _base_batch_size(cfg: Config, flag: str) -> int:
    base = (cfg.get('auto_scale_lr') or {}).get('base_batch_size')
    if base is None:
        raise ConfigError(f'{flag} needs auto_scale_lr.base_batch_size in the config, the batch its lr is for.')
    return int(base)


def _images(cfg: Config) -> int:
    loader = cfg.get('train_dataloader') or {}
    batch = loader.get('batch_size') or (loader.get('batch_sampler') or {}).get('batch_size')
    if not batch:
        raise ConfigError('the images of an iteration are not known: the config has no train_dataloader.batch_size.')
    return int(batch)


def _remedy(base: int, world: int) -> str:
    if base % world:
        return f'{world} processes cannot share {base} images evenly; start a number that divides it.'
    share = base // world
    fitting = ', '.join(str(size) for size in range(1, share + 1) if share % size == 0)
    return (
        f'With {world} processes train_dataloader.batch_size must be one of {fitting}; for another batch give '
        '--auto-scale-lr instead.'
    )


def _stretch(cfg: Config, factor: Fraction) -> list[str]:
    """Multiply what counts iterations by ``factor`` and return the changes as text."""
    if factor == 1:
        return []
    changes: list[str] = []
    for where, owner, keys in _iteration_counts(cfg):
        for key in keys:
            if owner.get(key) is not None:
                before = owner[key]
                owner[key] = _times(before, factor)
                changes.append(f'{where}.{key} {before} -> {owner[key]}')
        if type_name(owner).endswith('ExponentialLR') and 'gamma' in owner:
            owner['gamma'] **= float(1 / factor)
            changes.append(f'{where}.gamma -> {owner["gamma"]:g}')
    return changes


def _iteration_counts(cfg: Config) -> Iterator[tuple[str, MutableMapping[str, Any], tuple[str, ...]]]:
    loop = cfg.get('train_cfg') or {}
    if type_name(loop).endswith('IterBasedTrainLoop') or loop.get('by_epoch') is False:
        yield 'train_cfg', loop, _LOOP_COUNTS
    schedulers = cfg.get('param_scheduler') or []
    for number, scheduler in enumerate(schedulers if isinstance(schedulers, list) else [schedulers]):
        if scheduler.get('by_epoch', True) is False:
            yield f'param_scheduler.{number}', scheduler, _SCHEDULER_COUNTS
    hooks = {f'default_hooks.{name}': hook for name, hook in (cfg.get('default_hooks') or {}).items()}
    hooks.update({f'custom_hooks.{number}': hook for number, hook in enumerate(cfg.get('custom_hooks') or [])})
    for where, hook in hooks.items():
        if hook and hook.get('by_epoch', True) is False:
            yield where, hook, _HOOK_COUNTS


def _times(value: Any, factor: Fraction) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_times(one, factor) for one in value)
    # a count of 0 is a start, a negative one switches something off
    return max(1, round(value * factor)) if isinstance(value, int) and value > 0 else value

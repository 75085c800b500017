"""Gradient accumulation for a given number of images per optimizer step, with all settings that depend on it."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

from mmengine.config import Config

from mmgate.errors import ConfigError

from .config_file import mappings, type_name

# Settings that count iterations, in IterBasedTrainLoop, and in schedulers and hooks with by_epoch=False.
_LOOP_COUNTS = ('max_iters', 'val_interval', 'val_begin', 'dynamic_intervals')
_COUNTS = ('begin', 'end', 'milestones', 'T_max', 'step_size', 'total_steps', 'periods', 'interval', 'save_begin')
_PROCESSES = {'pytorch': 'WORLD_SIZE', 'slurm': 'SLURM_NTASKS', 'mpi': 'OMPI_COMM_WORLD_SIZE'}


def accumulation(cfg: Config) -> int:
    """Return over how many iterations the config accumulates gradients."""
    return int((cfg.get('optim_wrapper') or {}).get('accumulative_counts', 1))


def enable_auto_accumulate(cfg: Config) -> str:
    """Let a config accumulate gradients until a step has ``auto_scale_lr.base_batch_size`` images.

    mmengine counts iterations, not optimizer steps. Settings in iterations (``max_iters``, warm-ups, schedules,
    intervals of validation and checkpoints with ``by_epoch=False``) are stretched by the same factor, so that the run
    has as many optimizer steps and images as the recipe on any number of GPUs. Settings in epochs stay, and so do hooks
    that count iterations without ``by_epoch`` (logging, moving averages).

    Returns:
        A line for the log.

    Raises:
        ConfigError: No whole accumulation gives that batch; the message has the numbers.
    """
    base = int(_base_batch_size(cfg, '--auto-accumulate'))
    loader = cfg.get('train_dataloader') or {}
    batch = loader.get('batch_size') or (loader.get('batch_sampler') or {}).get('batch_size')
    if not batch:
        raise ConfigError('the images of an iteration are not known: the config has no train_dataloader.batch_size.')
    # The processes may not be connected yet, so their number is the launcher's.
    world = int(os.environ.get(_PROCESSES.get(cfg.launcher, ''), 1))
    at_once = f'{world} processes x {batch} images = {world * batch} at a time'
    if base % (world * batch):
        raise ConfigError(
            f'--auto-accumulate: {at_once}, and {base} a step is no multiple. Change train_dataloader.batch_size or '
            'the number of processes, or give --auto-scale-lr instead.'
        )
    counts = base // (world * batch)
    wrapper = cfg.get('optim_wrapper') or {}
    strategy = cfg.get('strategy') or {}
    if strategy.get('type') == 'DeepSpeedStrategy' or 'optimizer' not in wrapper:
        raise ConfigError(
            f'--auto-accumulate sets optim_wrapper.accumulative_counts={counts} beside one optimizer. Set it for each '
            f'of several, and strategy.gradient_accumulation_steps={counts} for DeepSpeed.'
        )
    factor = Fraction(counts, accumulation(cfg))
    cfg.optim_wrapper.accumulative_counts = counts
    stretched = _stretch(cfg, factor) if factor != 1 else []
    note = f'; iterations x {factor}: {", ".join(stretched)}' if stretched else ''
    return f'--auto-accumulate: {at_once}, accumulated over {counts} = {base} a step{note}'


def enable_auto_scale_lr(cfg: Config) -> str:
    """Scale a config's learning rate by the number of images in an optimizer step over the base batch size.

    Accumulated images count.

    mmengine leaves accumulation out, so the base batch size is divided by it. A config that scales already, such as the
    one that a run has dumped, is left as it is.

    Returns:
        A line for the log.

    Raises:
        ConfigError: The config names no base batch size.
    """
    base = _base_batch_size(cfg, '--auto-scale-lr')
    counts = accumulation(cfg)
    if not cfg.auto_scale_lr.get('enable'):
        cfg.auto_scale_lr.update(enable=True, base_batch_size=base / counts)
    note = f'; a step accumulates {counts} iterations' if counts > 1 else ''
    return f'--auto-scale-lr: the learning rate is for {cfg.auto_scale_lr.base_batch_size:g} images an iteration{note}'


def _base_batch_size(cfg: Config, flag: str) -> float:
    base = (cfg.get('auto_scale_lr') or {}).get('base_batch_size')
    if base is None:
        raise ConfigError(f'{flag} needs auto_scale_lr.base_batch_size in the config, the batch its lr is for.')
    return base


def _stretch(cfg: Config, factor: Fraction) -> list[str]:
    """Multiply every count of iterations in a config by a factor, in place; return the changes for the log."""
    loop = cfg.get('train_cfg') or {}
    iterates = type_name(loop).endswith('IterBasedTrainLoop') or loop.get('by_epoch') is False
    counting: list[tuple[str, dict[str, Any], tuple[str, ...]]] = (
        [('train_cfg', loop, _LOOP_COUNTS)] if iterates else []
    )
    for part in ('param_scheduler', 'default_hooks', 'custom_hooks'):
        counting += [(at, one, _COUNTS) for at, one in mappings(cfg.get(part), part) if one.get('by_epoch') is False]
    changes = []
    for where, owner, keys in counting:
        for key in keys:
            if owner.get(key) is not None:
                before = owner[key]
                owner[key] = _times(before, factor)
                changes.append(f'{where}.{key} {before} -> {owner[key]}')
        if type_name(owner).endswith('ExponentialLR') and 'gamma' in owner:
            owner['gamma'] **= float(1 / factor)
            changes.append(f'{where}.gamma -> {owner["gamma"]:g}')
    return changes


def _times(value: Any, factor: Fraction) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)(_times(one, factor) for one in value)
    # A count of 0 is a start, and a negative one switches something off.
    return max(1, round(value * factor)) if isinstance(value, int) and value > 0 else value

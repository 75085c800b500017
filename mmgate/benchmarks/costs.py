"""Measure before a training what gates add to a config's model: parameters, MACs, time and memory of a step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.optim import build_optim_wrapper
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten
from torch.utils.benchmark import Timer

from mmgate.analysis.complexity import count_config
from mmgate.errors import ConfigError, first_line
from mmgate.mm.load_report import load_weights

from .measure import interleaved

NAN = float('nan')
SAME = 1e-4  # of the largest output: what rounding explains
START = 20.0  # seconds in which a run begins and ends
BESIDE = 1.1  # time of a step in a run, with its data and logs, over the time measured here


def first_batch(cfg: Config, split: str) -> tuple[Any, int, int]:
    """Load a config's data of one split; return its first batch, its number of batches and its number of images.

    Args:
        cfg: The config.
        split: ``'train'``, ``'val'`` or ``'test'``.

    Raises:
        ConfigError: There is no such data, or it cannot be read.
    """
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    given = cfg.get(f'{split}_dataloader')
    if not given:
        raise ConfigError(f'config {cfg.filename} has no {split}_dataloader.')
    loader = deepcopy(given)
    loader.update(num_workers=0, persistent_workers=False)
    try:
        built = Runner.build_dataloader(loader, seed=0)
        dataset: Any = built.dataset
        size = built.batch_size or (given.get('batch_sampler') or {}).get('batch_size') or given.get('batch_size') or 1
        return next(iter(built)), max(1, -(-len(dataset) // size)), len(dataset)
    except (OSError, ValueError, StopIteration) as error:
        raise ConfigError(f'the data of {split}_dataloader in {cfg.filename} cannot be read: {error}') from error


def measure_costs(
    configs: Mapping[str, Config],
    batch: Any,
    tested: Any,
    *,
    checkpoint: str | None = None,
    repetitions: int = 5,
    device: str = 'cpu',
) -> list[dict[str, Any]]:
    """Measure time and memory of several models' training steps on one batch, by turns in one process.

    Args:
        configs: Configs by name, the vanilla one first.
        batch: A batch of the training data, as the loader gives it.
        tested: A batch of the test data.
        checkpoint: Vanilla checkpoint that fills the models; without one they are initialised from one seed.
        repetitions: Steps of each model; one more comes first, to warm up.
        device: Device of the models.

    Returns:
        A row for each config: ``name``; ``parameters``, all of them, and ``trained``; ``macs``, multiply-accumulates
        of an image; ``step_ms`` and ``memory_mib`` of a training step, and ``time`` and ``memory``, their ratios to
        the first model's; ``image_ms`` of a prediction; ``output``, the largest difference from the first model's
        output, over the largest absolute value of that output. An unknown figure is NaN.

    Raises:
        ConfigError: A model cannot be built or cannot make a step.
    """
    models: dict[str, Any] = {}
    outputs: dict[str, list[Tensor]] = {}
    rows: list[dict[str, Any]] = []
    for name, cfg in configs.items():
        model = _build(cfg, checkpoint, device)
        models[name] = model
        outputs[name] = _outputs(model, tested)
        first = next(iter(outputs.values()))
        size = _size(model, tested)
        row: dict[str, Any] = dict(name=name, parameters=sum(p.numel() for p in model.parameters()))
        row['trained'] = sum(p.numel() for p in model.parameters() if p.requires_grad)
        row['macs'] = _macs(cfg, size)
        row['image_ms'] = _milliseconds(partial(_predict, model, tested)) / max(1, len(tested['inputs']))
        row['output'] = _difference(outputs[name], first)
        rows.append(row)
    steps = {name: _step(cfg, models[name], batch) for name, cfg in configs.items()}
    start = [torch.zeros((), device=device)]
    try:
        measured = list(interleaved('trial', steps, 'batch', start, 'step', repetitions))
    except RuntimeError as error:
        raise ConfigError(f'no model makes a step on its first batch: {error}') from error
    by_name = {(row.provider, row.metric): row for row in measured}
    for found in rows:
        times = by_name.get((found['name'], 'time'))
        peaks = by_name.get((found['name'], 'peak memory'))
        if times is None or peaks is None:
            raise ConfigError(f'{found["name"]} makes no step on its first batch; the warning above has the reason.')
        found.update(step_ms=times.y_50, memory_mib=peaks.y_50)
        found.update(time=1 / max(times.ratio_to_peer, 1e-9), memory=1 / max(peaks.ratio_to_peer, 1e-9))
    return rows


def run_seconds(rows: list[dict[str, Any]], *, iters: int, images: int, validations: int) -> float:
    """Estimate from the measured steps how many seconds a run of so many iterations takes, in the mean over models."""
    per_run = [
        START + iters * BESIDE * row['step_ms'] / 1e3 + (validations + 1) * images * row['image_ms'] / 1e3
        for row in rows
    ]
    return sum(per_run) / len(per_run)


def costs_table(rows: list[dict[str, Any]]) -> str:
    """Return the measured costs as a Markdown table: the first model's, and what the gates of the others add to it."""
    first = rows[0]
    head = ['', 'parameters', 'trained', 'multiply-accumulates', 'step', 'time', 'memory', 'starts as vanilla']
    lines = [f'| {" | ".join(head)} |'.replace('|  |', '| |'), '|---' * len(head) + '|']
    for row in rows:
        added = row is not first
        parameters = _count(row['parameters'] - first['parameters'] if added else row['parameters'], added)
        macs = _count(row['macs'] - first['macs'] if added else row['macs'], added)
        step = f'{row["step_ms"]:.0f} ms, {row["memory_mib"]:.0f} MiB'
        same = '-'
        if added:
            same = 'yes' if row['output'] <= SAME else f'no, {row["output"]:.2g}'
            same = 'unknown' if row['output'] != row['output'] else same
        cells = [row['name'], parameters, _count(row['trained'], False), macs, step]
        cells += [f'{row["time"]:.2f}', f'{row["memory"]:.2f}', same]
        lines.append(f'| {" | ".join(cells)} |')
    return '\n'.join(lines)


def _count(number: float, added: bool) -> str:
    if number != number:
        return '-'
    sign = '+' if added else ''
    for unit, of_one in (('G', 1e9), ('M', 1e6), ('k', 1e3)):
        if abs(number) >= of_one:
            return f'{number / of_one:{sign}.2f} {unit}'
    return f'{number:{sign}.0f}'


def _build(cfg: Config, checkpoint: str | None, device: str) -> Any:
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    torch.manual_seed(0)
    # Hosts write into the config that they are built from.
    model: Any = MODELS.build(deepcopy(cfg.model))
    model.init_weights()
    if checkpoint:
        load_weights(model, checkpoint)
    return model.to(device)


def _step(cfg: Config, model: Any, batch: Any) -> Callable[[Tensor], Tensor]:
    """Return a function that makes one training step of a config's model on the given batch."""
    model.train()
    wrapper = build_optim_wrapper(model, deepcopy(cfg.optim_wrapper))

    def step(_: Tensor) -> Tensor:
        return model.train_step(deepcopy(batch), wrapper)['loss']

    return step


def _outputs(model: Any, batch: Any) -> list[Tensor]:
    """Run a model in eval mode on a batch and return its output tensors, or an empty list if it returns none."""
    model.eval()
    with torch.no_grad():
        data = model.data_preprocessor(deepcopy(batch), False)
        try:
            leaves, _ = tree_flatten(model(**data, mode='tensor'))
            return [x.float().cpu() for x in leaves if isinstance(x, Tensor) and x.is_floating_point()]
        except (AttributeError, NotImplementedError, RuntimeError, TypeError, ValueError) as error:
            reason = first_line(error)
            words = f'{type(model).__name__} shows no output to compare with the vanilla one ({reason}).'
            print_log(words, logger='current', level=logging.WARNING)
            return []


def _difference(found: list[Tensor], first: list[Tensor]) -> float:
    """Return the largest difference of two outputs, relative to the largest value; NaN if their shapes differ."""
    if not first or [x.shape for x in found] != [x.shape for x in first]:
        return NAN
    # Padded tokens and masked logits are infinite in both.
    pairs = [(x.nan_to_num(0, 0, 0), y.nan_to_num(0, 0, 0)) for x, y in zip(found, first, strict=True)]
    largest = max(float(y.abs().max()) for _, y in pairs)
    return max(float((x - y).abs().max()) for x, y in pairs) / max(largest, 1e-12)


def _predict(model: nn.Module, batch: Any) -> None:
    model.eval()
    tested: Any = model
    with torch.no_grad():
        tested.test_step(deepcopy(batch))


def _milliseconds(call: Callable[[], None]) -> float:
    """Return how many milliseconds a call takes, measured after calls to warm up."""
    return 1e3 * Timer('call()', globals=dict(call=call), num_threads=torch.get_num_threads()).timeit(1).mean


def _size(model: Any, batch: Any) -> tuple[int, int]:
    """Return height and width of a batch's images with their padding."""
    inputs = model.data_preprocessor(deepcopy(batch), False)['inputs']
    image = inputs[0] if isinstance(inputs, (list, tuple)) else inputs
    return int(image.shape[-2]), int(image.shape[-1])


def _macs(cfg: Config, size: tuple[int, int]) -> float:
    """Return the multiply-accumulates of a model on one image, or NaN, with a warning, if they cannot be counted."""
    try:
        return float(count_config(cfg, *size).macs)
    except Exception as error:  # whatever a model may raise without its data
        words = f'the multiply-accumulates cannot be counted ({type(error).__name__}: {error}).'
        print_log(words, logger='current', level=logging.WARNING)
        return NAN

"""Time and memory of whole training steps: a peer's config and ours, with each backend, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from torch import Tensor

import mmgate
from mmgate.analysis.report.flops import empty_sample
from mmgate.train.config_file import mappings, read_config

from .ops import Row, environment, interleaved, sampler_compiled, throughput

OBJECTS = 10  # annotated objects an image
Step = Callable[[Tensor], Tensor]


def _group(cfg: Config) -> None:
    paramwise = cfg.optim_wrapper.setdefault('paramwise_cfg', {})
    paramwise['grouped'] = cfg.optim_wrapper.get('constructor') or 'DefaultOptimWrapperConstructor'
    cfg.optim_wrapper.constructor = 'mmgate.GroupedOptimWrapperConstructor'


def _match(cfg: Config) -> None:
    kind = cfg.model.bbox_head.type
    cfg.model.bbox_head.update(type='mmgate.MatchedOnce', host=kind if '.' in kind else f'mmdet.{kind}')


def _hook(name: str) -> Callable[[Config], None]:
    return lambda cfg: cfg.update(custom_hooks=[*cfg.get('custom_hooks', []), dict(type=f'mmgate.{name}')])


# What makes a step faster, as a change to a config; 'sampler' compiles the CPU's sampler.
SPEEDUPS: dict[str, Callable[[Config], None]] = {
    'groups': _group,
    'matcher': _match,
    'channels-last': _hook('ChannelsLastHook'),
    'compile': _hook('CompileHook'),
    'sampler': lambda cfg: None,
}


def benchmark_training(
    peer: str,
    ours: str,
    *,
    op: str = 'ms_deform_attn',
    backends: Sequence[str] = ('auto',),
    speedups: Sequence[str] = (),
    size: tuple[int, int] = (800, 1333),
    batch: int = 2,
    repetitions: int = 20,
    device: str = 'cuda',
    amp: bool = False,
    processor_time: bool = False,
    train: str = 'all',
) -> Iterator[Row]:
    """Measure training steps (losses, gradients, clipping, optimiser) on random images with random objects.

    Args:
        peer: Config that ours is compared with, a file or ``package::path``.
        ours: Config measured once with each backend.
        op: Operator of ours whose backend varies.
        backends: Their names.
        speedups: Of :data:`SPEEDUPS`, each measured alone, or ``'all'`` for all of them together.
        size: Height and width of the images.
        batch: Images a step.
        repetitions: Steps a row is the median of, after one that warms up.
        device: Where to train.
        amp: Mixed precision in bfloat16.
        processor_time: Count the seconds of all threads on the processor in the place of those on the clock, for a CPU
            that does other things beside.
        train: What of ours trains, see :func:`mmgate.train_only_gates`.

    Yields:
        Rows of time, peak memory (over weights and optimiser state) and images a second.
    """
    names = [Path(path.partition('::')[2] or path).stem for path in (peer, ours)]
    runs: dict[str, Step] = {names[0]: _step(peer, size, batch, device, amp)}
    step = _step(ours, size, batch, device, amp, train=train)
    for backend in backends:
        runs[f'{names[1]}, {backend}'] = _with_backend(step, f'MMGATE_{op.upper()}', backend)
    compiled: set[str] = set()
    for speedup in speedups:
        name = f'{names[1]}, {speedup}'
        changes = list(SPEEDUPS) if speedup == 'all' else [speedup]
        runs[name] = _step(ours, size, batch, device, amp, changes, train)
        compiled |= {name} if 'sampler' in changes else set()
    x = f'{size[0]}x{size[1]}_b{batch}'
    clock = time.process_time if processor_time else time.perf_counter
    start = [torch.zeros((), device=device)]
    within = {name: sampler_compiled(name in compiled) for name in runs}
    for row in interleaved('training', runs, x, start, 'step', repetitions, within, clock):
        yield row
        if row.metric == 'time':
            yield throughput(row, batch)


def profile_training(
    path: str,
    *,
    speedups: Sequence[str] = (),
    size: tuple[int, int] = (800, 1333),
    batch: int = 2,
    device: str = 'cuda',
    amp: bool = False,
    lines: int = 25,
) -> str:
    """Return torch's table of the operators of a config's training step, the longest first.

    Args:
        path: The config, a file or ``package::path``.
        speedups: Of :data:`SPEEDUPS`, applied together.
        size: Height and width of the images.
        batch: Images a step.
        device: Where to train.
        amp: Mixed precision in bfloat16.
        lines: Operators listed.
    """
    step, x = _step(path, size, batch, device, amp, speedups), torch.zeros((), device=device)
    with sampler_compiled('sampler' in speedups)():
        step(x)
        with torch.profiler.profile() as profiler:
            step(x)
    key = 'self_cpu_time_total' if device == 'cpu' else 'self_cuda_time_total'
    return profiler.key_averages().table(sort_by=key, row_limit=lines, max_name_column_width=50)


def _step(
    path: str,
    size: tuple[int, int],
    batch: int,
    device: str,
    amp: bool,
    speedups: Sequence[str] = (),
    train: str = 'all',
) -> Step:
    cfg = read_config(path)
    for speedup in speedups:
        SPEEDUPS[speedup](cfg)
    init_default_scope(cfg.get('default_scope', 'mmdet'))
    torch.manual_seed(0)
    _drop_pretrained(cfg.model)
    model = MODELS.build(deepcopy(cfg.model)).to(device)
    model.init_weights()
    model.train()
    if train != 'all':
        mmgate.train_only_gates(model, train)
    wrapper = dict(cfg.optim_wrapper)
    if amp:
        wrapper |= dict(type='AmpOptimWrapper', dtype='bfloat16')
    optimizer = build_optim_wrapper(model, wrapper)
    data = random_batch(cfg, size, batch)
    run = SimpleNamespace(model=model, logger=MMLogger.get_current_instance(), optim_wrapper=optimizer)
    for hook in cfg.get('custom_hooks', []):
        if hook['type'].rpartition('.')[2] in ('ChannelsLastHook', 'CompileHook', 'Float32Hook'):
            built = HOOKS.build(hook)
            built.before_run(run)
            built.before_train(run)

    def step(_: Tensor) -> Tensor:
        losses = model.train_step(deepcopy(data), optimizer)
        return losses['loss']

    return step


def _with_backend(step: Step, variable: str, backend: str) -> Step:
    def run(x: Tensor) -> Tensor:
        with environment(variable, backend):
            return step(x)

    return run


def _drop_pretrained(model: Any) -> None:
    """Drop pretrained weights, which no time depends on, so that nothing is downloaded."""
    for _, entry in mappings(model):
        for key in {'init_cfg', 'pretrained'} & set(entry):
            value = entry[key]
            if isinstance(value, str) or 'Pretrained' in str(value) or 'checkpoint' in str(value):
                entry[key] = None


def random_batch(cfg: Config, size: tuple[int, int], batch: int) -> dict[str, Any]:
    """Return images of noise and annotations as the config's model takes them from a data loader.

    A segmentor gets a map of classes in blocks of 32 pixels, a detector boxes with their masks.
    """
    height, width = size
    keys = ('num_classes', 'num_things_classes')  # Mask2Former of mmdet has the latter
    classes = min(entry[key] for _, entry in mappings(cfg.model) for key in keys if entry.get(key) is not None)
    generator = np.random.default_rng(0)
    inputs = [torch.from_numpy(generator.integers(0, 256, (3, height, width), np.uint8)) for _ in range(batch)]
    segments = cfg.get('default_scope') == 'mmseg'
    samples = [empty_sample(segments, size) for _ in range(batch)]
    for sample in samples:
        if segments:
            blocks = generator.integers(0, classes, (1, -(-height // 32), -(-width // 32)))
            labels = torch.from_numpy(blocks.repeat(32, 1).repeat(32, 2)[:, :height, :width])
            sample.gt_sem_seg = PixelData(data=labels)
        else:
            sample.gt_instances = _random_objects(generator, size, classes)
            sample.ignored_instances = InstanceData(bboxes=torch.zeros(0, 4), labels=torch.zeros(0, dtype=torch.long))
    return dict(inputs=inputs, data_samples=samples)


def _random_objects(generator: np.random.Generator, size: tuple[int, int], classes: int) -> InstanceData:
    from mmdet.structures.mask import BitmapMasks

    height, width = size
    corners = np.sort(generator.random((OBJECTS, 2, 2)), 1) * (width, height)
    boxes = np.concatenate([corners[:, 0], corners[:, 1] + 2], 1).clip(0, (width, height, width, height))
    masks = np.zeros((OBJECTS, height, width), np.uint8)
    for mask, (left, top, right, bottom) in zip(masks, boxes.astype(int), strict=True):
        mask[top:bottom, left:right] = 1
    return InstanceData(
        bboxes=torch.from_numpy(boxes).float(),
        labels=torch.from_numpy(generator.integers(0, classes, OBJECTS)),
        masks=BitmapMasks(masks, height, width),
    )

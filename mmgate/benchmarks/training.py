"""Measure training steps or predictions of a peer's config, and of ours with each backend, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from copy import deepcopy
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.logging import MMLogger
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, TRANSFORMS, init_default_scope
from mmengine.structures import PixelData
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

import mmgate
from mmgate.analysis.complexity import empty_sample
from mmgate.errors import ConfigError
from mmgate.mm.config_file import mappings, package_of, read_config, type_name
from mmgate.mm.speedups import DEFAULTS, SPEEDUPS

from .measure import Row, environment, interleaved, row_of, throughput

OBJECTS = 10  # annotated objects in an image
# Operators of which no kernel is started.
NO_KERNELS = ('empty', 'empty_like', 'empty_strided', 'new_empty', 'detach', '_local_scalar_dense', 'is_same_size')
# Hooks that change what a step or a prediction computes.
COMPUTING_HOOKS = ('ChannelsLastHook', 'CompileHook', 'Float32Hook', 'MatchOnceHook', 'SamplingHook')
Step = Callable[[Tensor], Any]
# By dtype of mixed precision. At a scale of 1 no gradient overflows, so that every step is a whole one.
LOSS_SCALES: dict[str, Any] = {'float16': 1.0, 'bfloat16': dict(enabled=False)}


def benchmark_training(
    peer: str | Config,
    ours: str | Config,
    *,
    op: str = 'ms_deform_attn',
    backends: Sequence[str] = ('auto',),
    speedups: Sequence[str] = (),
    size: tuple[int, int] = (800, 1333),
    batch: int = 2,
    repetitions: int = 20,
    device: str = 'cuda',
    amp: str | None = None,
    processor_time: bool = False,
    train: str = 'all',
    tf32: bool = False,
    inference: bool = False,
) -> Iterator[Row]:
    """Measure whole training steps (losses, gradients, clipping, optimizer) on random images with random objects.

    With ``inference`` predictions are measured instead, from images in memory to results at the images' size, see
    :func:`prediction`.

    Args:
        peer: Config of the peer: a file, ``package::path``, or read.
        ours: Config that is compared with it; one of the peer's name and another model is ``NAME, gated`` in the rows.
        op: Operator whose backends are measured.
        backends: Backends of ``op``; ``ours`` is measured with each.
        speedups: Keys of :data:`~mmgate.mm.speedups.SPEEDUPS`, or ``'all'`` for all but ``'graphs'`` together;
            ``ours`` is measured with each.
        size: Height and width of the images.
        batch: Images in a step.
        repetitions: Steps that are measured; one more comes first, to warm up.
        device: Device of the models.
        amp: Dtype of mixed precision, a key of :data:`LOSS_SCALES`; None trains in float32. mmcv's operators have no
            bfloat16.
        processor_time: True counts the processor seconds of all threads, for a CPU that does other work, too.
        train: Parameters of ``ours`` that train, see :func:`mmgate.train_only_gates`.
        tf32: True lets a GPU compute all float32 products in TF32, the peer's, too; this process stays so.
        inference: True measures predictions; ``speedups`` and ``train`` are for training.

    Yields:
        Rows of time, throughput and peak memory. Then a profile of one step: on a GPU the time in kernels, the number
        of kernels and copies, and how often the CPU waits for the GPU; on a CPU the number of operators, which is close
        to the number of kernels on a GPU.

    Raises:
        ConfigError: ``speedups`` or ``train`` are given with ``inference``.
    """
    if inference and (speedups or train != 'all'):
        raise ConfigError('speedups and train change the training step; leave them out to measure inference.')
    if tf32:
        torch.set_float32_matmul_precision('high')
    configs = [read_config(given) if isinstance(given, str) else given for given in (peer, ours)]
    names = [Path(cfg.filename).stem for cfg in configs]
    # Two readings of a config in pure Python differ, their texts do not.
    if names[0] == names[1] and configs[0].model.to_dict() != configs[1].model.to_dict():
        names[1] += ', gated'
    if inference:
        op_of_rows, mode = 'inference', 'prediction'
        peers_step, step = (prediction(cfg, size, batch, device, amp) for cfg in configs)
    else:
        op_of_rows, mode = 'training', 'step'
        peers_step = _step(configs[0], size, batch, device, amp)
        step = _step(configs[1], size, batch, device, amp, train=train)
    runs: dict[str, Step] = {names[0]: peers_step}
    variables: dict[str, dict[str, str]] = {}
    for backend in backends:
        name = f'{names[1]}, {backend}'
        runs[name] = step
        variables[name] = {f'MMGATE_{op.upper()}': backend}
    for speedup in speedups:
        name = f'{names[1]}, {speedup}'
        changes = [*DEFAULTS, 'compile'] if speedup == 'all' else [speedup]
        runs[name] = _step(configs[1], size, batch, device, amp, changes, train)
    within = {name: partial(environment, **values) for name, values in variables.items()}
    x = f'{size[0]}x{size[1]}_b{batch}' + (f' {amp}' if amp else '') + (' tf32' if tf32 else '')
    start = [torch.zeros((), device=device)]
    clock = time.process_time if processor_time else time.perf_counter
    ran = []
    for row in interleaved(op_of_rows, runs, x, start, mode, repetitions, within, clock):
        yield row
        if row.metric == 'time':
            ran.append(row.provider)
            yield throughput(row, batch)
    counts: dict[str, dict[tuple[str, str], float]] = {}
    for name in ran:
        with within.get(name, nullcontext)():
            counts[name] = profiled(runs[name], start[0])
    for name, found in counts.items():
        for (metric, unit), value in found.items():
            key = (op_of_rows, name, mode, metric, unit, x)
            yield row_of(key, [value], [counts[ran[0]][metric, unit]], start[0].device)


def profiled(step: Step, start: Tensor) -> dict[tuple[str, str], float]:
    """Return the profile of one training step or prediction, by metric and unit."""
    if not start.is_cuda:
        with Operators() as counted:
            step(start)
        return {('operators', '1'): counted.count}
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        step(start)
        torch.cuda.synchronize()  # cudaDeviceSynchronize, which is not counted
    events = profiler.key_averages()
    # The profiler also lists ranges of time, such as the optimizer's step, which are not kernels.
    kernels = [
        event
        for event in events
        if event.device_type == DeviceType.CUDA
        and not getattr(event, 'is_user_annotation', False)
        and not event.key.startswith('Optimizer.')
    ]
    microseconds = 'self_device_time_total' if hasattr(events[0], 'self_device_time_total') else 'self_cuda_time_total'
    return {
        ('kernels', 'ms'): sum(getattr(event, microseconds) for event in kernels) / 1e3,
        ('launches', '1'): sum(event.count for event in kernels),
        ('waits', '1'): sum(event.count for event in events if event.key == 'cudaStreamSynchronize'),
    }


class Operators(TorchDispatchMode):
    """Count the operators of which a GPU would run a kernel: not views, empty tensors and reads of a number."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call an operator and count it."""
        view = any(one.alias_info is not None and not one.alias_info.is_write for one in func._schema.returns)
        self.count += not view and func._schema.name.removeprefix('aten::') not in NO_KERNELS
        return func(*args, **(kwargs or {}))


def _step(
    given: Config,
    size: tuple[int, int],
    batch: int,
    device: str,
    amp: str | None,
    speedups: Sequence[str] = (),
    train: str = 'all',
) -> Step:
    cfg = deepcopy(given)
    for speedup in speedups:
        SPEEDUPS[speedup](cfg)
    model = _untrained(cfg, device).train()
    if train != 'all':
        mmgate.train_only_gates(model, train)
    wrapper = dict(cfg.optim_wrapper)
    if amp:
        wrapper |= dict(type='AmpOptimWrapper', dtype=amp, loss_scale=LOSS_SCALES[amp])
    optimizer = build_optim_wrapper(model, wrapper)
    data = random_batch(cfg, size, batch)
    run = _runner(cfg, model, optimizer)
    for hook in run.hooks:
        hook.before_train(run)

    def step(_: Tensor) -> Any:
        for hook in run.hooks:
            hook.before_train_iter(run, 0)
        return model.train_step(deepcopy(data), optimizer)['loss']

    return step


def prediction(given: Config, size: tuple[int, int], batch: int, device: str, amp: str | None = None) -> Step:
    """Return a function that predicts on noise images as ``tools/test.py`` does, by an untrained model.

    It copies and normalises the images, runs the model, and returns data samples with boxes and masks at the images'
    size. An untrained model finds nothing above its config's score threshold, and would skip its mask head; so the
    threshold is lowered until it finds as many objects as it may, 100 in most configs.

    Arguments as in :func:`benchmark_training`.
    """
    cfg = deepcopy(given)
    model = _untrained(cfg, device).eval()
    _runner(cfg, model)
    images = _noise(size, batch)
    dtype = getattr(torch, amp or 'bfloat16')

    def predict(_: Tensor) -> Any:
        # Models write into the samples.
        data = dict(inputs=images, data_samples=[empty_sample(size) for _ in images])
        with torch.no_grad(), torch.autocast(torch.device(device).type, dtype, enabled=amp is not None):
            return model.test_step(data)

    configs = [m.test_cfg for m in model.modules() if 'score_thr' in (getattr(m, 'test_cfg', None) or {})]
    for config in configs:
        config['score_thr'] = 0.0
    samples = predict(torch.zeros(())) if configs else []
    found = [sample.pred_instances for sample in samples if 'pred_instances' in sample]
    lowest = min((score for instances in found for score in instances.scores.tolist()), default=0.0)
    for config in configs:
        config['score_thr'] = lowest * (1 - 1e-6)
    return predict


def _untrained(cfg: Config, device: str) -> Any:
    """Return a config's model as it starts from one seed, without pretrained weights."""
    init_default_scope(package_of(cfg) or 'mmdet')
    torch.manual_seed(0)
    _drop_pretrained(cfg.model)
    model: Any = MODELS.build(deepcopy(cfg.model)).to(device)
    model.init_weights()
    return model


def _runner(cfg: Config, model: Any, optimizer: Any = None) -> SimpleNamespace:
    """Return what hooks need of a runner, and the config's :data:`COMPUTING_HOOKS` after their ``before_run``."""
    hooks = [HOOKS.build(hook) for hook in cfg.get('custom_hooks', []) if type_name(hook) in COMPUTING_HOOKS]
    logger = MMLogger.get_current_instance()
    run = SimpleNamespace(model=model, logger=logger, optim_wrapper=optimizer, hooks=hooks)
    for hook in hooks:
        hook.before_run(run)
    return run


def _drop_pretrained(model: Any) -> None:
    """Remove pretrained weights from a model's config, on which no time depends, so that nothing is downloaded."""
    for _, entry in mappings(model):
        entry.update(dict.fromkeys({'init_cfg', 'pretrained'} & set(entry)))


def random_batch(cfg: Config, size: tuple[int, int], batch: int) -> dict[str, Any]:
    """Return a batch of noise images with random annotations, in the form of the config's data loader.

    For a segmentor the annotations are maps of classes, in blocks of 32 pixels; for a detector, boxes with masks.
    """
    keys = ('num_classes', 'num_things_classes')  # Mask2Former of mmdet has the latter
    classes = min(entry[key] for _, entry in mappings(cfg.model) for key in keys if entry.get(key) is not None)
    if package_of(cfg) == 'mmseg':
        return _labelled_maps(size, batch, classes)
    return _labelled_boxes(size, batch, classes)


def _labelled_maps(size: tuple[int, int], batch: int, classes: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    samples = [empty_sample(size) for _ in range(batch)]
    for sample in samples:
        blocks = torch.randint(classes, (1, -(-size[0] // 32), -(-size[1] // 32)), generator=generator)
        labels = blocks.repeat_interleave(32, 1).repeat_interleave(32, 2)
        sample.gt_sem_seg = PixelData(data=labels[:, : size[0], : size[1]])
    return dict(inputs=_noise(size, batch), data_samples=samples)


def _noise(size: tuple[int, int], batch: int) -> list[Tensor]:
    """Return images of random bytes as a data loader gives them, ``(3, H, W)`` each."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(256, (3, *size), generator=generator, dtype=torch.uint8) for _ in range(batch)]


def _labelled_boxes(size: tuple[int, int], batch: int, classes: int) -> dict[str, Any]:
    height, width = size
    generator = np.random.default_rng(0)
    # mmdet's own transforms make the samples, by their registered names.
    load = TRANSFORMS.build(dict(type='mmdet.LoadAnnotations', with_bbox=True, with_mask=True))
    pack = TRANSFORMS.build(dict(type='mmdet.PackDetInputs', meta_keys=('img_shape', 'ori_shape', 'scale_factor')))
    packed = []
    for _ in range(batch):
        image = generator.integers(256, size=(height, width, 3), dtype=np.uint8)
        centres = generator.random((OBJECTS, 2)) * (width, height)
        sides = generator.random((OBJECTS, 2)) * (width, height)
        corners = np.stack([centres - sides / 2, centres + sides / 2], 1).clip(0, (width, height))  # (OBJECTS, 2, 2)
        instances = []
        for (left, top), (right, bottom) in corners.tolist():
            outline = [left, top, right, top, right, bottom, left, bottom]
            label = int(generator.integers(classes))
            box = [left, top, right, bottom]
            instances.append(dict(bbox=box, bbox_label=label, mask=[outline], ignore_flag=0))
        results = dict(img=image, img_shape=size, ori_shape=size, scale_factor=(1.0, 1.0), instances=instances)
        packed.append(pack(load(results)))
    return pseudo_collate(packed)

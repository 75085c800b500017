"""The module in the place of ``mmcv._ext``: mmcv's names, arguments, values and gradients for any problem."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from conftest import assert_same
from helpers.compiled_mmcv import compiled
from helpers.memory import Memory
from helpers.properties import hold
from helpers.samplings import make
from hypothesis import strategies as st
from torch import Tensor

from mmgate.mmcv_ext import boxes, deform_conv, extension, focal_loss, peer, roi_align

ops = pytest.importorskip('mmcv.ops')


@pytest.mark.parametrize('name', extension.__all__)
def test_arguments_are_those_of_the_compiled_function(name: str) -> None:
    signature = getattr(compiled(), name).__doc__.splitlines()[0].partition('->')[0]
    assert list(inspect.signature(getattr(extension, name)).parameters) == re.findall(r'(\w+): ', signature)


def test_every_function_of_the_compiled_module_is_there_or_raises_by_name() -> None:
    for name in dir(compiled()):
        if not name.startswith('_') and name not in extension.__all__:
            with pytest.raises(NotImplementedError, match=f'^{name}: mmcv was installed without'):
                extension.not_compiled(name)()
    with pytest.raises(AttributeError):
        extension.not_compiled('__path__')


class Problem(NamedTuple):
    """A call of a function of ``mmcv.ops``.

    Attributes:
        wrapper: The module that has the function.
        function: What is called.
        given: The tensors of the call.
        learnt: Those of them with a gradient.
        formula: What it computes, where mmcv compiles no operator for a CPU.
    """

    wrapper: str
    function: Callable[..., Any]
    given: list[Tensor]
    learnt: Sequence[int] = ()
    formula: Callable[..., Any] | None = None


def computed(
    function: Any, problem: Problem, device: str = 'cpu', dtype: torch.dtype | None = None
) -> dict[str, Tensor]:
    """Return outputs, gradients, and what was given, which has to stay as it was."""
    given = [x.clone().to(device, dtype if x.is_floating_point() else None) for x in problem.given]
    for number in problem.learnt:
        given[number].requires_grad_()
    results = function(*given)
    found = dict(enumerate(results if isinstance(results, tuple) else (results,)))
    if problem.learnt:
        noise = torch.randn(found[0].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        (found[0].double() * noise.to(device)).sum().backward()
    gradients = {f'gradient of {number}': given[number].grad for number in problem.learnt}
    named = {f'output {key}': value for key, value in found.items()} | gradients
    named |= {f'given {number}': x for number, x in enumerate(given)}
    return {name: value.detach().cpu() for name, value in named.items()}


def by_ours(problem: Problem, **where: Any) -> dict[str, Tensor]:
    """Return what our operators compute in the place of mmcv's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module(f'mmcv.ops.{problem.wrapper}'), 'ext_module', extension)
        return computed(problem.function, problem, **where)


def found_boxes(kind: str) -> list[Tensor]:
    number = dict(empty=0, one=1, random=500).get(kind, 200)
    corner = torch.rand(number, 2) * 200
    found, scores = torch.cat([corner, corner + torch.rand(number, 2) * 60], 1), torch.randperm(number) / 512
    if kind == 'ties':
        scores = (scores * 8).round() / 8
        found = found.round() + torch.tensor([0.0, 0.0, 1.0, 1.0])  # no empty ones
    elif kind == 'zero size':
        found[::2, 2:] = found[::2, :2]
        found[1::4] = found[:1]
    elif kind == 'outside':
        found = found - 1000
    elif kind == 'chain':  # each suppresses the next, if it is not suppressed
        found = torch.arange(number)[:, None] * torch.tensor([1.0, 0.0, 1.0, 0.0]) + torch.tensor([0.0, 0.0, 5.0, 5.0])
        scores = torch.linspace(1, 0.1, number)
    return [found, scores]


def nms(kind: str, threshold: float, offset: int) -> Problem:
    return Problem('nms', lambda found, scores: ops.nms(found, scores, threshold, offset), found_boxes(kind))


def soft_nms(kind: str, method: str, offset: int) -> Problem:
    found, scores = found_boxes(kind)
    if method == 'gaussian':
        offset = 1  # without it, mmcv divides 0 by 0 for boxes without a size, and goes on with no numbers
        scores += torch.arange(len(scores)) * 1e-4  # exp differs in the last bit, which would decide between equals
    options = dict(iou_threshold=0.3, sigma=0.5, min_score=0.05, method=method, offset=offset)
    return Problem('nms', lambda found, scores: ops.soft_nms(found, scores, **options), [found, scores])


def batched_nms(kind: str, split: int, agnostic: bool) -> Problem:
    options = dict(type=kind, iou_threshold=0.5, split_thr=split)
    return Problem(
        'nms',
        lambda *given: ops.batched_nms(*given, dict(options), agnostic),
        [*found_boxes('random'), torch.randint(3, (500,))],
    )


def regions(kind: str) -> Tensor:
    """Return regions in two images of 128 by 192 pixels."""
    number = 0 if kind == 'none' else 24
    corner, size = (torch.rand(number, 2) * torch.tensor([192.0, 128.0]) for _ in range(2))
    if kind == 'zero size':
        size[::2] = 0
        size[1::4, 0] = 0
    elif kind == 'outside':
        corner = corner + torch.tensor([[-400.0, 0.0], [150.0, 0.0], [0.0, 300.0], [-50.0, -60.0]]).repeat(6, 1)
    elif kind == 'huge':
        corner, size = corner - 2000, size * 40
    elif kind == 'on pixels':
        corner, size = (corner / 8).round() * 8, (size / 8).round() * 8
    return torch.cat([torch.randint(2, (number, 1)).float(), corner, corner + size], 1)


def align(kind: str, map_size: tuple[int, int], ratio: int, aligned: bool, size: tuple[int, int]) -> Problem:
    return Problem(
        'roi_align',
        lambda x, rois: ops.roi_align(x, rois, size, map_size[0] / 128, ratio, 'avg', aligned),
        [torch.randn(2, 3, *map_size), regions(kind)],
        [0],
    )


STEPS = ((1, 1), (1, 1), (1, 1))
# kernel; stride, padding and dilation; groups and deformable groups
CONVOLUTIONS = [
    ((3, 3), STEPS, (1, 1)),
    ((3, 3), ((2, 2), (2, 2), (2, 2)), (1, 2)),
    ((1, 3), ((2, 1), (0, 1), (1, 1)), (2, 4)),
]


def convolution(case: Any, scale: float, modulated: bool) -> Problem:
    kernel, steps, groups = case
    x, weight = torch.randn(2, 8, 9, 11), torch.randn(6, 8 // groups[0], *kernel)
    size = torch.nn.functional.conv2d(x, weight, None, *steps, groups[0]).shape[2:]
    points = groups[1] * kernel[0] * kernel[1]
    offset, mask = torch.randn(2, 2 * points, *size) * scale, torch.rand(2, points, *size)
    function = ops.modulated_deform_conv2d if modulated else ops.deform_conv2d
    given = [x, offset, mask, weight, torch.randn(6)] if modulated else [x, offset, weight]
    wrapper = 'modulated_deform_conv' if modulated else 'deform_conv'
    return Problem(wrapper, lambda *given: function(*given, *steps, *groups), given, range(len(given)))


def sampling(**sizes: int) -> Problem:
    """No softmax is assumed of the weights."""
    from mmcv.ops import multi_scale_deform_attn as mmcv

    value, shapes, starts, locations, weights, *_ = make(dtype=torch.float64, **sizes)
    return Problem(
        'multi_scale_deform_attn',
        lambda v, x, w, *of: mmcv.MultiScaleDeformableAttnFunction.apply(v, *of, x, w, 64),
        [value, locations, weights, shapes, starts],
        range(3),
        lambda v, x, w, shapes, starts: mmcv.multi_scale_deformable_attn_pytorch(v, shapes, x, w),
    )


def focal(gamma: float, alpha: float, softmax: bool, weighted: bool) -> Problem:
    """mmcv compiles both losses for GPUs alone; a softmax has no class of the background."""
    from mmcv.ops import focal_loss as mmcv

    logits, target = torch.randn(12, 4, dtype=torch.float64), torch.randint(4 if softmax else 5, (12,))
    weight = [torch.rand(4, dtype=torch.float64)] * weighted
    if not softmax:
        logits[0], logits[1] = 40, -40
    function = mmcv.softmax_focal_loss if softmax else mmcv.sigmoid_focal_loss
    hot = torch.nn.functional.one_hot(target, 5)[:, :4].bool()

    def formula(x: Tensor, target: Tensor, *weight: Tensor) -> Tensor:
        log_p, log_rest = x.log_softmax(1), torch.zeros(())
        if not softmax:
            log_p, log_rest = torch.nn.functional.logsigmoid(x), torch.nn.functional.logsigmoid(-x)
        of_target = -alpha * (1 - log_p.exp()) ** gamma * log_p
        of_others = -(1 - alpha) * log_p.exp() ** gamma * log_rest
        factor = torch.cat([weight[0], torch.ones(1)])[target][:, None] if weight else 1.0
        return (torch.where(hot, of_target, of_others) * factor).sum()

    return Problem(
        'focal_loss',
        lambda x, target, weight=None: function(x, target, gamma, alpha, weight, 'sum'),
        [logits, target, *weight],
        [0],
        formula,
    )


EACH = st.sampled_from
KINDS = EACH(['empty', 'one', 'random', 'ties', 'zero size', 'outside', 'chain'])
REGIONS = EACH(['random', 'none', 'zero size', 'outside', 'huge', 'on pixels'])
OPERATORS: dict[str, tuple[Callable[..., Problem], dict[str, Any]]] = {
    'nms': (nms, dict(kind=KINDS, threshold=EACH([0.0, 0.5, 0.7]), offset=EACH([0, 1]))),
    'soft_nms': (soft_nms, dict(kind=KINDS, method=EACH(['naive', 'linear', 'gaussian']), offset=EACH([0, 1]))),
    'batched_nms': (
        batched_nms,
        dict(kind=EACH(['nms', 'soft_nms']), split=EACH([50, 10000]), agnostic=st.booleans()),
    ),
    'roi_align': (
        align,
        dict(
            kind=REGIONS,
            map_size=EACH([(16, 24), (16, 24), (1, 1)]),
            ratio=EACH([0, 2]),
            aligned=st.booleans(),
            size=EACH([(7, 7), (3, 1)]),
        ),
    ),
    'deform_conv': (
        convolution,
        dict(case=EACH(CONVOLUTIONS), scale=EACH([0.0, 1.5, 30.0]), modulated=st.booleans()),
    ),
    'ms_deform_attn': (sampling, dict(queries=EACH([5, 0]), batch=EACH([1, 2, 0]))),
    'focal_loss': (
        focal,
        dict(gamma=EACH([2.0, 0.0, 1.5]), alpha=EACH([0.25, 0.75]), softmax=st.booleans(), weighted=st.booleans()),
    ),
}


@pytest.mark.parametrize('name', OPERATORS)
def test_values_and_gradients_are_mmcvs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And kept boxes, in their order; where mmcv has no operator for a CPU, those of the formula."""
    monkeypatch.setattr(roi_align, 'PIXELS', 3000)  # many groups
    monkeypatch.setattr(boxes, 'PAIRS', 4096)  # many blocks
    make_problem, drawn = OPERATORS[name]

    def check(seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        problem = make_problem(**options)
        if problem.formula is None:
            compiled()
        expected = computed(problem.formula or problem.function, problem)
        rtol, atol = (1e-4, 5e-5) if problem.formula is None else (1e-8, 1e-10)
        assert_same(by_ours(problem), expected, rtol=rtol, atol=atol)

    hold(40, check, seed=st.integers(0, 99), **drawn)


ON_GPU: list[tuple[Callable[..., Problem], tuple[Any, ...], torch.dtype]] = [
    (nms, ('random', 0.3, 0), torch.float64),
    (nms, ('random', 0.3, 1), torch.float64),
    (nms, ('random', 0.3, 0), torch.float16),
    (soft_nms, ('random', 'gaussian', 0), torch.float64),
    *(
        (align, ('random', (16, 24), 0, True, (7, 7)), dtype)
        for dtype in (torch.float64, torch.float16, torch.bfloat16)
    ),
    (convolution, (CONVOLUTIONS[1], 1.5, False), torch.float64),
    (convolution, (CONVOLUTIONS[2], 1.5, True), torch.float64),
    (sampling, (), torch.float64),
    *((focal, (2.0, 0.25, softmax, False), torch.float64) for softmax in (True, False)),
    (focal, (2.0, 0.25, False, False), torch.float16),
]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
@pytest.mark.parametrize('make_problem, options, dtype', ON_GPU, ids=lambda one: getattr(one, '__name__', str(one)))
def test_a_gpu_gives_what_a_cpu_does(
    make_problem: Any, options: tuple[Any, ...], dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By torchvision's operators, where they run, and by ours."""
    problem = make_problem(*options)
    expected, by_torchvision = (by_ours(problem, device=device, dtype=dtype) for device in ('cpu', 'cuda'))
    monkeypatch.setattr(peer, '_of_cuda', lambda: None)
    tolerance = 1e-8 if dtype is torch.float64 else 2e-2
    for found in (by_torchvision, by_ours(problem, device='cuda', dtype=dtype)):
        assert_same(found, expected, rtol=tolerance, atol=tolerance)


def fails(*args: Any) -> None:
    raise NotImplementedError("Could not run 'torchvision::nms' with arguments from the 'CUDA' backend.")


@pytest.mark.parametrize('of_torchvision', [None, SimpleNamespace(nms=fails)], ids=['not there', 'for another torch'])
def test_a_torchvision_that_does_not_run_is_left_alone(monkeypatch: pytest.MonkeyPatch, of_torchvision: Any) -> None:
    monkeypatch.setitem(sys.modules, 'torchvision.ops', of_torchvision)
    assert peer.torchvision_ops(torch.empty(1)) is None
    assert peer._of_cuda.__wrapped__() is None


def test_memory_of_nms_grows_with_the_boxes_and_not_with_their_square() -> None:
    corner = torch.rand(20000, 2) * 2000
    with Memory() as memory:
        boxes.nms(torch.cat([corner, corner + 60], 1), torch.rand(20000), 0.3)
    assert memory.peak < 1e8  # of pairs, 4 * 10^8 for each byte


def test_without_offsets_it_is_a_convolution_and_a_batch_may_be_empty() -> None:
    x, offset, weight, bias = (torch.randn(size) for size in ((2, 8, 9, 11), (2, 18, 9, 11), (6, 8, 3, 3), (6,)))
    expected = torch.nn.functional.conv2d(x, weight, bias, 1, 1)
    found = deform_conv.deform_conv(x, 0 * offset, None, weight, bias, *STEPS)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    found = deform_conv.deform_conv(x[:0], offset[:0], None, weight, bias, *STEPS)
    assert found.shape == expected[:0].shape
    assert roi_align.roi_align(torch.zeros(0, 3, 4, 4), torch.zeros(0, 5), (2, 2), 1.0, 0, True).shape == (0, 3, 2, 2)


def test_rows_of_a_negative_class_are_ignored() -> None:
    for function in (focal_loss.softmax_focal_loss, focal_loss.softmax_focal_loss_gradient):
        assert not function(torch.rand(12, 4), torch.full((12,), -1), torch.empty(0), 2.0, 0.25).any()


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_16_bits_are_summed_in_float32(dtype: torch.dtype) -> None:
    x, rois = torch.randn(2, 3, 16, 24).to(dtype), regions('random')
    found = roi_align.roi_align(x, rois, (7, 7), 1 / 8, 0, True)
    expected = roi_align.roi_align(x.float(), rois, (7, 7), 1 / 8, 0, True)
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
    grad = roi_align.roi_align_gradient(found, rois, x.shape, 1 / 8, 0, True)
    assert torch.equal(grad, roi_align.roi_align_gradient(found.float(), rois, x.shape, 1 / 8, 0, True).to(dtype))


def test_regions_that_do_not_go_are_refused_by_name() -> None:
    """The largest of samples, and a box of a training that has diverged."""
    x, rois = torch.randn(2, 3, 8, 8), regions('random')
    with pytest.raises(NotImplementedError, match="roi_align with pool_mode='max'.*compiled operators"):
        by_ours(Problem('roi_align', lambda *given: ops.roi_align(*given, 2, 1.0, 0, 'max'), [x, rois]))
    for bad in (float('nan'), float('inf')):
        rois = torch.tensor([[0.0, 1, 1, 5, 5], [0.0, 1, bad, 5, 5]])
        with pytest.raises(ValueError, match='NaN or infinite, as of a training that has diverged'):
            roi_align.roi_align(x, rois, (2, 2), 1.0, 0, True)

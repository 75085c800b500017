"""Problems of deformable attention for kernels: cases, random ones, and programs to compare with."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from conftest import assert_same, values_and_gradients
from torch import Tensor

from mmgate.ops import ms_deform_attn
from mmgate.ops.deformable import offset_locations

SMALL = [(3, 5), (1, 1), (2, 1)]
TINY = [(9, 2), (3, 1), (1, 1)]  # more than a band of rows, and odd
REAL = [(100, 134), (50, 67), (25, 34), (13, 17)]
CASES: dict[str, dict[str, Any]] = {  # name: what differs from the default
    'default': dict(batch=2),
    'ungated': dict(gate=None),
    'post_softmax': dict(position='post_softmax'),
    'post_softmax_no_residual': dict(position='post_softmax', residual=False),
    'gate_per_point': dict(gate=(1, 1, 1)),
    'gate_per_level': dict(gate=(0, 1, 0)),
    'offsets_from_points': dict(reference=2, levels=[(4, 3)], points=3),
    'offsets_from_boxes': dict(reference=4, batch=2),
    'empty_last_level': dict(levels=[(2, 3), (0, 3)], reference=4),
    'dim_20': dict(dim=20),
    'huge_logits': dict(logit_scale=1e4),
    'tokens_as_queries': dict(levels=TINY, queries=22, heads=1),
    'neighbours_sample_together': dict(levels=TINY, heads=1, spread=0.3),
    'neighbours_sample_the_same': dict(levels=[(6, 1), (3, 1)], heads=1, spread=0.0, dim=20, reference=2),
}


def case_of(name: str) -> tuple[dict[str, Any], dict[str, Any], float]:
    """Return a case's arguments of :func:`make`, the operator's options, and a tolerance in float32."""
    case = dict(CASES[name])
    options = {key: case.pop(key) for key in ('residual', 'position') if key in case}
    # a logit of 2 * 10^4 has a rounding of 10^-3, by which its weight is off
    return case, options, 5e-3 if name == 'huge_logits' else 2e-5


def make(
    device: str = 'cpu',
    levels: list[tuple[int, int]] = SMALL,
    points: int = 2,
    dim: int = 16,
    queries: int = 5,
    heads: int = 2,
    batch: int = 1,
    gate: tuple[int, int, int] | None = (1, 1, 0),
    reference: int = 0,
    logit_scale: float = 1.0,
    spread: float | None = None,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor | None]:
    """Value, shapes, starts, points, logits, gate and reference points; a third of the samples miss the map.

    With a spread, queries are the tokens, and their samples lie around them by the same pixels, but for the spread.
    """
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    shapes = torch.tensor(levels)
    areas = shapes.prod(1)
    count = len(levels)
    queries = queries if spread is None else int(areas.sum())
    locations = rand(batch, queries, heads, count, points, 2) * 2.2 - 0.6
    anchors = None
    if reference:
        anchors = rand(batch, queries, count, reference) * 0.8 + 0.1
        locations = (locations - 0.5) * 6
    if spread is not None:
        grids = [torch.cartesian_prod(*((torch.arange(n) + 0.5) / n for n in size)) for size in levels]
        centres = torch.cat(grids).flip(-1)
        anchors = centres[None, :, None].expand(batch, -1, count, -1) if reference else None
        pixels = rand(points, 2) * 2.5 - 1 + rand(batch, queries, heads, count, points, 2) * spread
        locations = pixels if reference else centres[:, None, None, None] + pixels / shapes.flip(-1)[:, None]
    locations = off_the_kinks(locations, anchors, shapes)
    logits = (rand(batch, queries, heads, count, points) - 0.5) * 4 * logit_scale
    gates = None if gate is None else rand(
        batch, queries, *(n if own else 1 for n, own in zip((heads, count, points), gate, strict=True))
    ) - 0.5  # fmt: skip
    value = rand(batch, int(areas.sum()), heads, dim) - 0.5
    tensors = [value, shapes, areas.cumsum(0) - areas, locations, logits, gates, anchors]
    return [t if t is None else t.to(device, dtype if t.is_floating_point() else t.dtype) for t in tensors]


def off_the_kinks(points: Tensor, anchors: Tensor | None, shapes: Tensor) -> Tensor:
    """Move what is sampled beside a pixel's centre: there the gradient jumps, and a rounding takes it across."""

    def in_pixels(points: Tensor) -> Tensor:
        locations = points if anchors is None else offset_locations(points, anchors, shapes)
        return locations * shapes.flip(-1)[:, None] - 0.5

    pixels = in_pixels(points)
    one = in_pixels(points + 1) - pixels  # pixels that a unit of the points is
    return torch.where((pixels - pixels.round()).abs() < 0.01, points + 0.02 / one, points)


def run(backend: str, **options: Any):
    def call(value, shapes, starts, points, logits, gate, reference):
        return ms_deform_attn(
            value, shapes, starts, points, logits, gate, reference_points=reference, backend=backend, **options
        )

    return call


def results(backend: str, inputs: list[Tensor | None], dtype: torch.dtype, **options: Any) -> dict[str, Tensor]:
    """Return the output and every gradient of a call on the inputs in ``dtype``."""
    given = {i: x for i, x in enumerate(inputs) if x is not None}
    converted = [x.to(dtype) if x.is_floating_point() else x for x in given.values()]
    differentiable = [i for i, x in enumerate(converted) if x.is_floating_point()]

    def call(*tensors: Tensor) -> Tensor:
        full = dict(zip(given, tensors, strict=True))
        return run(backend, **options)(*(full.get(i) for i in range(7)))

    return values_and_gradients(call, converted, differentiable)


def agree(backend: str, inputs: list[Tensor | None], tolerance: float, **options: Any) -> None:
    """Compare output and gradients in float32 with the reference's in float64, each by its largest number."""
    actual = results(backend, inputs, torch.float32, **options)
    for name, value in results('torch', inputs, torch.float64, **options).items():
        scale = value.abs().max().clamp(min=1e-3).item()
        assert_same({name: actual[name]}, {name: value}, rtol=tolerance, atol=tolerance * scale)


@dataclass(frozen=True)
class Problem:
    """Arguments of the operator; ``points`` are sampling locations, or offsets if there are reference points."""

    value: Tensor
    spatial_shapes: Tensor
    level_start_index: Tensor
    points: Tensor
    logits: Tensor
    gate: Tensor | None
    residual: bool
    position: str
    reference_points: Tensor | None
    num_points: tuple[int, ...] | None = None


def drawn(seed: int) -> tuple[random.Random, Problem]:
    """Return a problem of few numbers in float64 that float32 has as well, and the generator for more of its kind."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    # levels without a pixel, levels of more than a band of rows
    kinds = [(draw.randint(0, 4), draw.randint(1, 4)), (draw.randint(9, 11), draw.randint(1, 2))]
    sizes = [draw.choice([kinds[0], *kinds]) for _ in range(draw.randint(0, 2))] + [(2, 3)]
    order, first, starts = draw.sample(range(len(sizes)), len(sizes)), 0, [0] * len(sizes)
    for level in order:  # levels need not follow each other
        starts[level], first = first, first + sizes[level][0] * sizes[level][1]
    batch, heads, points = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3]), draw.randint(1, 3)
    queries, dim = draw.choice([first, draw.randint(1, 9)]), draw.choice([1, 3, 8, 16, 20, 32, 40, 100])
    samples = (batch, queries, heads, len(sizes), points)
    columns = draw.choice([0, 2, 4])
    reference = rand(batch, queries, len(sizes), columns) * 0.8 + 0.1 if columns else None
    at = rand(*samples, 2) * (1.6 if columns == 0 else 6.0) - (0.3 if columns == 0 else 3.0)
    axes = [n if draw.random() < 0.5 else 1 for n in samples]
    gate = draw.choice([None, rand(*axes) - 0.5, (rand(*axes[::-1]) - 0.5).permute(4, 3, 2, 1, 0)])
    residual, position = draw.random() < 0.5, draw.choice(['pre_softmax', 'post_softmax'])
    logits, value = (rand(*samples) - 0.5) * draw.choice([1, 6]), rand(batch, first, heads, dim) - 0.5
    value, at, logits, gate, reference = (
        x if x is None else x.float().double() for x in (value, at, logits, gate, reference)
    )
    shapes = torch.tensor(sizes), torch.tensor(starts)
    return draw, Problem(value, *shapes, at, logits, gate, residual, position, reference)


def unevenly(seed: int) -> Problem:
    """Return a problem of :func:`drawn` with points left out, so that most have levels with different numbers."""
    draw, given = drawn(seed)
    levels, most = given.logits.shape[3:]
    counts = tuple(draw.randint(1, most) for _ in range(levels))
    there = torch.arange(most) < torch.tensor(counts)[:, None]  # (L, P)
    gate = given.gate
    if gate is not None:
        one_for_all = gate.shape[3:] == (1, 1)
        gate = gate[..., 0] if one_for_all else gate.expand(*gate.shape[:3], levels, most)[:, :, :, there]
    return replace(
        given, points=given.points[:, :, :, there], logits=given.logits[:, :, :, there], gate=gate, num_points=counts
    )


def exactly(given: Problem) -> list[Tensor]:
    """Return the output and all gradients in float64 by hat functions, which share nothing with mmgate."""
    leaves = [x if x is None else x.detach().requires_grad_() for x in _floating(given)]
    starts = given.level_start_index.tolist()
    levels = [(*size, start) for size, start in zip(given.spatial_shapes.tolist(), starts, strict=True)]
    options = dict(residual=given.residual, position=given.position)
    output = sample_by_hats(leaves, levels, options, given.num_points)
    return with_gradients(output, [x for x in leaves if x is not None])


def by_backend(given: Problem, backend: str, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return the same by a backend."""
    leaves = [x if x is None else x.detach().to(dtype).requires_grad_() for x in _floating(given)]
    value, at, logits, gate, reference = leaves
    output = ms_deform_attn(
        value, given.spatial_shapes, given.level_start_index, at, logits, gate,
        residual=given.residual, position=given.position, reference_points=reference, num_points=given.num_points,
        backend=backend,
    )  # fmt: skip
    return with_gradients(output, [x for x in leaves if x is not None])


def _floating(given: Problem) -> tuple[Tensor | None, ...]:
    return given.value, given.points, given.logits, given.gate, given.reference_points


def sample_by_hats(
    leaves: Sequence[Tensor | None],
    levels: list[tuple[int, ...]],
    options: dict[str, Any],
    num_points: Sequence[int] | None = None,
) -> Tensor:
    """Return ``(B, Q, H * D)`` of levels as (height, width, first token)."""
    value, points, logits, gate, reference = leaves
    factor = torch.ones(()) if gate is None else gate + 1 if options['residual'] else gate
    before = options['position'] == 'pre_softmax'
    exponents = (logits * factor if before else logits).flatten(3)
    weights = (exponents - exponents.logsumexp(3, keepdim=True)).exp().view(logits.shape)
    weights = weights if before else weights * factor
    output = torch.zeros((), dtype=torch.float64)
    counts = [points.shape[4]] * len(levels) if num_points is None else list(num_points)
    flat = weights.flatten(3).split(counts, 3), points.reshape(*points.shape[:3], -1, 2).split(counts, 3)
    for level, (height, width, first) in enumerate(levels):
        x, y = flat[1][level].unbind(-1)  # (B, Q, H, P)
        if reference is None:
            x, y = x * width, y * height
        else:
            centre = reference[:, :, None, level, None]  # (B, Q, 1, 1, R)
            box = reference.shape[-1] == 4
            across, down = (centre[..., 2] * width, centre[..., 3] * height) if box else (1, 1)
            share = 0.5 / counts[level] if box else 1
            x, y = centre[..., 0] * width + x * across * share, centre[..., 1] * height + y * down * share
        of_columns = (1 - (x[..., None] - 0.5 - torch.arange(width)).abs()).clamp(min=0)
        of_rows = (1 - (y[..., None] - 0.5 - torch.arange(height)).abs()).clamp(min=0)
        image = value[:, first : first + height * width].unflatten(1, (height, width))
        shares = torch.einsum('bqhp,bqhpy,bqhpx->bqhyx', flat[0][level], of_rows, of_columns)
        output = output + torch.einsum('bqhyx,byxhd->bqhd', shares, image)
    return output.flatten(2)


def compare(problem: str, actual: list[Tensor], expected: list[Tensor], tolerance: float, least: float = 1e-3) -> None:
    """Compare a call's output and gradients, each by the largest of its numbers, or the ``least`` that counts."""
    for number, (x, y) in enumerate(zip(actual, expected, strict=True)):
        scale = max(least, float(y.abs().max()) if y.numel() else 0.0)
        torch.testing.assert_close(
            x.double(), y, rtol=tolerance, atol=tolerance * scale, msg=lambda m, n=number: f'{problem}, {n}: {m}'
        )


def with_gradients(output: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return [output.detach(), *torch.autograd.grad((output.double() * noise).sum(), leaves)]

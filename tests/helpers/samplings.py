"""Problems of deformable attention for its backends: cases, random ones, and a float64 program to compare with."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from mmgate.ops import ms_deform_attn
from mmgate.ops.deformable import offset_locations
from mmgate.ops.deformable.samples import Samples

SMALL = [(3, 5), (1, 1), (2, 1)]
TINY = [(9, 2), (3, 1), (1, 1)]  # more than a band of rows, and odd
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
# A logit of 2 * 10^4 has a rounding of 10^-3, by which its weight is off.
TOLERANCES = {name: 5e-3 if name == 'huge_logits' else 2e-5 for name in CASES}


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
    counts: tuple[int, ...] | None = None,
    **options: Any,
) -> Samples:
    """Return the operator's arguments, of which a third of the samples miss the map.

    With a spread, queries are the tokens, and their samples lie around them by the same pixels, but for the spread.
    With counts, levels have these numbers of points.
    """
    generator = torch.Generator().manual_seed(0)
    rand = partial(torch.rand, generator=generator, dtype=torch.float64)
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
    gates = None
    if gate is not None:
        own = [n if has else 1 for n, has in zip((heads, count, points), gate, strict=True)]
        gates = rand(batch, queries, *own) - 0.5
    value = rand(batch, int(areas.sum()), heads, dim) - 0.5
    given = Samples(value, shapes, areas.cumsum(0) - areas, locations, logits, gates, **options)
    given = given._replace(reference_points=anchors)
    return converted(given if counts is None else leave_out(given, counts), device, dtype)


def converted(given: Samples, device: str, dtype: torch.dtype) -> Samples:
    return given._replace(
        **{name: x.to(device, dtype) for name, x in floating(given).items()},
        **{name: getattr(given, name).to(device) for name in ('spatial_shapes', 'level_start_index')},
    )


def floating(given: Samples) -> dict[str, Tensor]:
    found = {name: getattr(given, name) for name in ('value', 'points', 'logits', 'gate', 'reference_points')}
    return {name: x for name, x in found.items() if x is not None}


def leave_out(given: Samples, counts: tuple[int, ...]) -> Samples:
    """Return the problem with so many points of each level."""
    points = given.logits.shape[4]
    there = torch.arange(points) < torch.tensor(counts)[:, None]  # (L, P)
    gate = given.gate
    if gate is not None:
        one = gate.shape[3:] == (1, 1)  # for all samples of a head
        gate = gate[..., 0] if one else gate.expand(*gate.shape[:3], len(counts), points)[:, :, :, there]
    kept = dict(points=given.points[:, :, :, there], logits=given.logits[:, :, :, there], gate=gate)
    return given._replace(**kept, num_points=counts)


def off_the_kinks(points: Tensor, anchors: Tensor | None, shapes: Tensor) -> Tensor:
    """Move what is sampled beside a pixel's centre: there the gradient jumps, and a rounding takes it across."""

    def in_pixels(points: Tensor) -> Tensor:
        locations = points if anchors is None else offset_locations(points, anchors, shapes)
        return locations * shapes.flip(-1)[:, None] - 0.5

    pixels = in_pixels(points)
    one = in_pixels(points + 1) - pixels  # pixels that a unit of the points is
    return torch.where((pixels - pixels.round()).abs() < 0.01, points + 0.02 / one, points)


def attend(given: Samples, backend: str = 'auto') -> Tensor:
    options = given._asdict()
    return ms_deform_attn(sampling_locations=options.pop('points'), backend=backend, **options)


def solved(
    given: Samples, run: str | Callable[[Samples], Tensor], dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Return the output and every gradient by a backend's name, or another program, of the arguments in ``dtype``."""
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in floating(given).items()}
    wanted = given._replace(**leaves)
    output = attend(wanted, run) if isinstance(run, str) else run(wanted)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(output.device)
    gradients = torch.autograd.grad((output.double() * noise).sum(), list(leaves.values()))
    return {'output': output.detach(), **dict(zip(leaves, gradients, strict=True))}


def compare(
    actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float, problem: str = '', least: float = 1e-2
) -> None:
    """Compare what :func:`solved` returned, each by the largest of its numbers, or by the size of what cancels."""
    for name, right in expected.items():
        scale = max(least, float(right.abs().max()) if right.numel() else 0.0)  # rounding is left of what cancels
        torch.testing.assert_close(
            actual[name].double(), right.double(), rtol=tolerance, atol=tolerance * scale,
            msg=lambda text, name=name: f'{problem} {name}: {text}',
        )  # fmt: skip


def agree(backend: str, given: Samples, tolerance: float) -> None:
    """Compare output and gradients in float32 with the reference's in float64."""
    compare(solved(given, backend), solved(given, 'torch', torch.float64), tolerance)


def drawn(seed: int) -> tuple[random.Random, Samples]:
    """Return a problem of few numbers in float64 that float32 has as well, and the generator for more of its kind.

    Half of them leave points out, so that most of these have levels with different numbers.
    """
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)

    rand = partial(torch.rand, generator=generator)
    # levels without a pixel, levels of more than a band of rows
    kinds = [(draw.randint(0, 4), draw.randint(1, 4)), (draw.randint(9, 11), draw.randint(1, 2))]
    sizes = [draw.choice([kinds[0], *kinds]) for _ in range(draw.randint(0, 3))] + [(2, 3)]
    order, first, starts = draw.sample(range(len(sizes)), len(sizes)), 0, [0] * len(sizes)
    for level in order:  # levels need not follow each other
        starts[level], first = first, first + sizes[level][0] * sizes[level][1]
    batch, heads, points = draw.choice([1, 1, 2]), draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3, 6])
    dim = draw.choice([1, 3, 8, 12, 16, 20, 24, 32, 40, 48, 56, 64, 72, 100])
    queries, columns = draw.choice([first, draw.randint(1, 9)]), draw.choice([0, 2, 4])
    samples = (batch, queries, heads, len(sizes), points)
    reference = rand(batch, queries, len(sizes), columns) * 0.8 + 0.1 if columns else None
    at = rand(*samples, 2) * (1.6 if columns == 0 else 6.0) - (0.3 if columns == 0 else 3.0)
    axes = [n if draw.random() < 0.5 else 1 for n in samples]
    gate = draw.choice([None, rand(*axes) - 0.5, (rand(*axes[::-1]) - 0.5).permute(4, 3, 2, 1, 0)])
    logits, value = (rand(*samples) - 0.5) * draw.choice([1, 6]), rand(batch, first, heads, dim) - 0.5
    options = dict(residual=draw.random() < 0.5, position=draw.choice(['pre_softmax', 'post_softmax']))
    given = Samples(value, torch.tensor(sizes), torch.tensor(starts), at, logits, gate)
    given = given._replace(reference_points=reference, **options)
    if draw.random() < 0.6:
        given = leave_out(given, tuple(draw.randint(1, points) for _ in sizes))
    while given.gate is not None and given.gate.shape[:1] == (1,) and draw.random() < 0.5:
        given = given._replace(gate=given.gate[0])
    return draw, converted(given, 'cpu', torch.float64)


@cache
def problems() -> list[tuple[str, Samples, dict[str, Tensor]]]:
    """Return random problems with their outputs and gradients in float64 by hat functions."""
    given = {f'problem {seed}:': drawn(seed)[1] for seed in range(250)}
    return [(name, problem, solved(problem, by_hats, torch.float64)) for name, problem in given.items()]


def by_hats(given: Samples) -> Tensor:
    """Return ``(B, Q, H * D)`` by a slow and plain program that shares nothing with mmgate.

    It weighs every pixel of every map by the hat function of its distance from the sample.
    """
    factor = torch.ones(()) if given.gate is None else given.gate + 1 if given.residual else given.gate
    before = given.position == 'pre_softmax'
    exponents = (given.logits * factor if before else given.logits).flatten(3)
    weights = (exponents - exponents.logsumexp(3, keepdim=True)).exp().view(given.logits.shape)
    weights = weights if before else weights * factor
    output = torch.zeros((), dtype=torch.float64)
    sizes, starts = given.spatial_shapes.tolist(), given.level_start_index.tolist()
    counts = list(given.num_points or [given.points.shape[4]] * len(sizes))
    flat = weights.flatten(3).split(counts, 3), given.points.flatten(3, -2).split(counts, 3)
    for level, ((height, width), first) in enumerate(zip(sizes, starts, strict=True)):
        x, y = flat[1][level].unbind(-1)  # (B, Q, H, P)
        if given.reference_points is None:
            x, y = x * width, y * height
        else:
            centre = given.reference_points[:, :, None, level, None]  # (B, Q, 1, 1, R)
            box = centre.shape[-1] == 4
            across, down = (centre[..., 2] * width, centre[..., 3] * height) if box else (1, 1)
            share = 0.5 / max(counts[level], 1) if box else 1
            x, y = centre[..., 0] * width + x * across * share, centre[..., 1] * height + y * down * share
        of_columns = (1 - (x[..., None] - 0.5 - torch.arange(width)).abs()).clamp(min=0)
        of_rows = (1 - (y[..., None] - 0.5 - torch.arange(height)).abs()).clamp(min=0)
        image = given.value[:, first : first + height * width].unflatten(1, (height, width))
        shares = torch.einsum('bqhp,bqhpy,bqhpx->bqhyx', flat[0][level], of_rows, of_columns)
        output = output + torch.einsum('bqhyx,byxhd->bqhd', shares, image)
    return output.flatten(2)

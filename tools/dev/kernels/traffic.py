"""Count the Triton sampler's memory accesses from locations: ``python tools/dev/kernels/traffic.py``.

The encoder's queries are the tokens of the maps. Their samples lie as at the start of a Deformable DETR: point p of
head h is p + 1 pixels away in the direction of the head. Independent noise moves each sample, like the offsets of a
trained model, in which neighbours are less independent.
"""

from __future__ import annotations

import argparse
import math

import torch
from torch import Tensor

from mmgate.benchmarks.ops import pixel_centres

SHAPES = ((100, 167), (50, 84), (25, 42), (13, 21))  # of an image of 800 x 1333
HEADS = 8
POINTS = 4
BAND = 8  # rows, as in the kernels


def banded(shapes: list[tuple[int, int]]) -> Tensor:
    """Return the tokens of all levels in the order of the kernels: down the columns of bands of rows."""
    tokens = []
    first = 0
    for height, width in shapes:
        level = torch.arange(first, first + height * width).view(height, width)
        tokens += [band.T.reshape(-1) for band in level.split(BAND)]
        first += height * width
    return torch.cat(tokens)


def corners(shapes: list[tuple[int, int]], noise: float) -> Tensor:
    """Return the upper left pixels that the samples of every token fall on, ``(S, L, H, P, 2)`` as (x, y)."""
    generator = torch.Generator().manual_seed(0)
    reference = pixel_centres(shapes)
    sizes = torch.tensor(shapes).flip(-1)
    angles = torch.arange(HEADS) * (2 * math.pi / HEADS)
    direction = torch.stack((angles.cos(), angles.sin()), -1)
    direction /= direction.abs().amax(-1, keepdim=True)
    offsets = direction[:, None] * torch.arange(1, POINTS + 1)[:, None]  # (H, P, 2)
    pixels = (reference[:, None] * sizes)[:, :, None, None] + offsets - 0.5
    return (pixels + noise * torch.randn(pixels.shape, generator=generator)).floor().long()


def rows(shapes: list[tuple[int, int]], upper_left: Tensor) -> Tensor:
    """Return the rows of values at the four corners of every sample, ``(S, L, H, P, 4)``, -1 off the map."""
    sizes = torch.tensor(shapes).flip(-1)[:, None, None]
    starts = torch.tensor([0] + [h * w for h, w in shapes]).cumsum(0)[:-1, None, None]
    found = []
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        corner = upper_left + torch.tensor((dx, dy))
        on_map = ((corner >= 0) & (corner < sizes)).all(-1)
        found.append(torch.where(on_map, starts + corner[..., 1] * sizes[..., 0] + corner[..., 0], -1))
    return torch.stack(found, -1)


def distinct(rows: Tensor, queries: int) -> float:
    """Return the share of gathered rows that are new to a program of some queries and one head."""
    total = int((rows >= 0).sum())
    largest = int(rows.max()) + 1
    count = 0
    for block in rows.split(queries):
        by_head = block.transpose(1, 2).reshape(len(block), block.shape[2], -1).transpose(0, 1).flatten(1)
        keys = torch.where(by_head >= 0, by_head + largest * torch.arange(len(by_head))[:, None], -1)
        count += int((keys.unique() >= 0).sum())
    return count / total


def reductions(upper_left: Tensor, rows: Tensor) -> float:
    """Return the number of rows to which a sample adds in memory, if pairs of queries first add up common rows."""
    even = len(rows) // 2 * 2
    first = upper_left[:even:2]
    second = upper_left[1:even:2]
    step = second - first
    same = (step == 0).all(-1)
    below = (step == torch.tensor((0, 1))).all(-1)
    on_map = rows[1:even:2] >= 0
    saved = (on_map & same[..., None]).sum() + (on_map[..., :2] & below[..., None]).sum()
    return float((rows >= 0).sum() - saved) / upper_left[..., 0].numel()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--queries', type=int, nargs='+', default=[16, 32, 64], help='of a program')
    parser.add_argument('--noise', type=float, nargs='+', default=[0.0, 0.25, 0.5, 1.0, 2.0], help='pixels')
    args = parser.parse_args()
    shapes = list(SHAPES)
    order = banded(shapes)
    head = ' | '.join(f'{n} in line | {n} in a tile' for n in args.queries)
    print(f'| noise | {head} | rows added a sample | of pairs in line | of pairs in a tile |')
    print('|---' * (2 * len(args.queries) + 4) + '|')
    for noise in args.noise:
        upper_left = corners(shapes, noise)
        every = rows(shapes, upper_left)
        shares = ' | '.join(f'{distinct(x, n):.0%}' for n in args.queries for x in (every, every[order]))
        alone = float((every >= 0).sum()) / upper_left[..., 0].numel()
        pairs = ' | '.join(f'{reductions(upper_left[o], every[o]):.2f}' for o in (torch.arange(len(order)), order))
        print(f'| {noise} | {shares} | {alone:.2f} | {pairs} |', flush=True)


if __name__ == '__main__':
    main()

"""Time other launches of the kernels, one switch at a time, together with the usual launch.

    python tools/dev/kernels/switches.py plug_attention --out switches.csv

``make gpu`` runs it for both operators; ``--device cpu --tiny`` tries it in Triton's interpreter.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from mmgate.benchmarks.measure import MODES, Row, Within, errors, interleaved, write_csv
from mmgate.benchmarks.ops import LEVELS, sampler_inputs
from mmgate.gates.gml import GatingModulation
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops.deformable import triton_deformable
from mmgate.ops.deformable.deformable_blocks import Cut
from mmgate.ops.dense import triton_dense

USUAL = 'as usual'
EXACT = dict(ms_deform_attn='grid_sample', plug_attention='chunked')  # backends, in float64
NOISY = ('queries in line', 'no pairs', '1 warp', '2 warps')  # their worth depends on where the points lie
NOISES = (2, 0, 0.5)  # of the encoder's points, in pixels


def of_pieces(pieces: int, lane: int) -> Callable[[Cut], Cut]:
    """Return a change of the number of pieces of a row and of channels of a lane; the forward kernel has two."""
    return lambda cut: cut._replace(pieces=pieces, lane=lane) if cut.backward else cut


def _otherwise(module: ModuleType, name: str, changes: Mapping[str, Callable[[Any], Any]]) -> dict[str, Within]:
    """Return contexts in which the results of the module's function ``name`` are changed."""
    usual = getattr(module, name)

    def changed(change: Callable[[Any], Any]) -> Within:
        return lambda: mock.patch.object(module, name, lambda *asked: change(usual(*asked)))

    return {switch: changed(change) for switch, change in changes.items()}


SWITCHES: dict[str, dict[str, Within]] = {
    'ms_deform_attn': _otherwise(
        triton_deformable,
        'cut_for',
        {
            'queries in line': lambda cut: cut._replace(tiled=False),
            '2 pieces, 4 channels a lane': of_pieces(2, 4),
            '4 pieces, 1 channel a lane': of_pieces(4, 1),
            '4 pieces, 4 channels a lane': of_pieces(4, 4),
            'no pairs': lambda cut: cut._replace(paired=False),
            '1 warp': lambda cut: cut._replace(warps=1),
            '2 warps': lambda cut: cut._replace(warps=2),
            '8 warps': lambda cut: cut._replace(warps=8),
            'twice the queries': lambda cut: cut._replace(times=2),
        },
    ),
    'plug_attention': _otherwise(
        triton_dense,
        'blocks_for',
        {
            'one head a program': lambda blocks: blocks._replace(pair=False),
            'two heads a program': lambda blocks: blocks._replace(pair=True),
            '32 rows': lambda blocks: blocks._replace(rows=32),
            '32 columns': lambda blocks: blocks._replace(columns=32),
            '1 stage': lambda blocks: blocks._replace(stages=1),
            '8 warps': lambda blocks: blocks._replace(warps=8),
        },
    ),
}


def problem(op: str, device: str, tiny: bool, noise: float = 2) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """Return a call of the operator and its inputs: an encoder's tokens, or 4096 tokens and 8 heads with one gate.

    The call takes ``backend``, the kernels by default. The encoder's points lie as Deformable DETR starts, but for
    ``noise`` in pixels.
    """
    if op == 'ms_deform_attn':
        sizes: dict[str, Any] = dict(heads=1, points=1) if tiny else {}
        levels = [(2, 2)] if tiny else LEVELS
        batch = 1 if tiny else 2
        inputs, reference = sampler_inputs(levels, batch, None, 2, device, distribution='grid', noise=noise, **sizes)

        def sampled(*tensors: Tensor, backend: str = 'triton') -> Tensor:
            points = reference.to(torch.promote_types(tensors[0].dtype, reference.dtype))
            return ms_deform_attn(*tensors, reference_points=points, backend=backend)

        return sampled, inputs
    tokens, heads, dtype = (16, 2, torch.float32) if tiny else (4096, 8, torch.bfloat16)
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)
    inputs = [torch.randn(2, h, tokens, 32, device=device, dtype=dtype) for h in (heads, heads, heads, 1, 1)]

    def attended(*tensors: Tensor, backend: str = 'triton') -> Tensor:
        modulation = gml.double() if tensors[0].dtype is torch.float64 else gml.float()
        return plug_attention(*tensors, modulation, backend=backend)

    return attended, inputs


def rows(op: str, device: str, tiny: bool) -> Iterator[Row]:
    """Yield rows of the usual launch and each switch in turn, so that one that fails does not stop the others.

    Errors beside float64 come before times, because a launch that is fast may be wrong. Pairs of queries pay where
    neighbours sample the same rows, so that they are measured at several noises.
    """
    size = 'tiny' if tiny else 'full'
    repetitions = 1 if tiny else 10
    first = next(iter(SWITCHES[op]))
    for name, within in SWITCHES[op].items():
        for noise in NOISES if name in NOISY else NOISES[:1]:
            run, inputs = problem(op, device, tiny, noise)
            x = size if noise == NOISES[0] else f'{size}, noise {noise}'
            with within():
                yield from errors(op, {name: run}, x, inputs, partial(run, backend=EXACT[op]))
            for mode in MODES:
                pair = {USUAL: run, name: run}
                found = interleaved(op, pair, x, inputs, mode, repetitions, {name: within})
                # The usual launch's rows come once for each input.
                usual_too = name == (first if noise == NOISES[0] else NOISY[0])
                yield from (row for row in found if row.provider == name or usual_too)


def main() -> None:
    """Parse arguments, measure and append to a CSV."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('op', choices=list(SWITCHES))
    parser.add_argument('--device', default='cuda')
    parser.add_argument('--tiny', action='store_true', help='sizes for an interpreter')
    parser.add_argument('--out', type=Path, default=Path('work_dirs/switches.csv'), help='CSV to append to')
    args = parser.parse_args()
    write_csv(rows(args.op, args.device, args.tiny), args.out, append=True)


if __name__ == '__main__':
    main()

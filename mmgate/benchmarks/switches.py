"""The kernels launched otherwise than they are, one switch at a time, beside the usual launch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmgate.layers.gml import GatingModulation
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops.ms_deform_attn.blocks import Cut
from mmgate.ops.plug_attention.blocks import Blocks
from mmgate.ops.triton_backend import launched_otherwise

from .ops import MODES, Row, Within, interleaved
from .ops_cuda import LEVELS, sampler_inputs

USUAL = 'as usual'


def of_pieces(pieces: int, lane: int) -> Callable[[Cut], Cut]:
    """Return the change to so many pieces of a row and channels of a lane; forward there are two."""
    return lambda cut: cut._replace(pieces=pieces, lane=lane) if cut.backward else cut


def _otherwise(kind: type, changes: Mapping[str, Callable[[Any], Any]]) -> dict[str, Within]:
    return {name: partial(launched_otherwise, kind, change) for name, change in changes.items()}


SAMPLER: dict[str, Within] = {
    **_otherwise(
        Cut,
        {
            'queries in line': lambda cut: cut._replace(tiled=False),
            '2 pieces, 4 channels a lane': of_pieces(2, 4),
            '4 pieces, 1 channel a lane': of_pieces(4, 1),
            '4 pieces, 4 channels a lane': of_pieces(4, 4),
            '2 warps': lambda cut: cut._replace(warps=2),
            '8 warps': lambda cut: cut._replace(warps=8),
            'twice the queries': lambda cut: cut._replace(times=2),
        },
    ),
}
PLUG = _otherwise(
    Blocks,
    {
        'one head a program': lambda blocks: blocks._replace(pair=False),
        'two heads a program': lambda blocks: blocks._replace(pair=True),
        '32 rows': lambda blocks: blocks._replace(rows=32),
        '32 columns': lambda blocks: blocks._replace(columns=32),
        '1 stage': lambda blocks: blocks._replace(stages=1),
        '8 warps': lambda blocks: blocks._replace(warps=8),
    },
)


def sampler_switches(
    device: str, levels: list[tuple[int, int]] = LEVELS, batch: int = 2, repetitions: int = 10, **sizes: int
) -> Iterator[Row]:
    """Yield times of the sampler on an encoder's tensors; see :func:`sampler_inputs`."""
    inputs, reference = sampler_inputs(levels, batch, None, 2, device, **sizes)
    run = partial(ms_deform_attn, reference_points=reference, backend='triton')
    return _beside('ms_deform_attn', run, SAMPLER, 'encoder', inputs, repetitions)


def plug_switches(
    device: str, tokens: int = 4096, heads: int = 8, dtype: torch.dtype = torch.bfloat16, repetitions: int = 10
) -> Iterator[Row]:
    """Yield times of PLuG attention, whose heads of 32 channels share a gate."""
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)
    inputs = [torch.randn(2, h, tokens, 32, device=device, dtype=dtype) for h in (heads, heads, heads, 1, 1)]

    def run(*tensors: Tensor) -> Tensor:
        q, k, v, gate_q, gate_k = tensors
        return plug_attention(q, k, v, gate_q, gate_k, gml, backend='triton')

    return _beside('plug_attention', run, PLUG, f'N{tokens}', inputs, repetitions)


def _beside(
    op: str,
    run: Callable[..., Tensor],
    switches: Mapping[str, Within],
    x: str,
    inputs: list[Tensor],
    repetitions: int,
) -> Iterator[Row]:
    """Yield the rows of each switch beside the usual launch, so that what is slow or fails costs no other its rows."""
    first = next(iter(switches))
    for name, within in switches.items():
        for mode in MODES:
            for row in interleaved(op, {USUAL: run, name: run}, x, inputs, mode, repetitions, {name: within}):
                if name in (row.provider, first):  # the usual launch's rows come once
                    yield row

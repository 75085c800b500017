"""How the sampler's Triton kernels are cut into programs: by listings, as no GPU has run them."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..triton_backend import interpreted, padded, target_of

LANE_BYTES = 16  # that a lane loads or adds at once; the values' gradient is always float32
PIECES = 2  # of a row of channels
SCALAR_PIECES = 4  # where a lane adds one float at a time: eight lanes, 32 bytes, a piece at least
INTERPRETED_QUERIES = 4  # of a program in the interpreter, so that small shapes have several


class Cut(NamedTuple):
    """How a kernel works.

    Attributes:
        backward: Whether it is the backward kernel, whose lanes have pairs of queries.
        tiled: Whether queries go down the columns of bands of their map; they have to be the tokens.
        pieces: Of a row of channels: 2, or 4 of the backward kernel.
        lane: Channels of a piece that a lane has.
        times: Queries, or pairs, of a lane.
        warps: Of a program.
    """

    backward: bool
    tiled: bool
    pieces: int
    lane: int
    times: int = 1
    warps: int = 4

    def constants(self, dim: int) -> dict[str, int]:
        """Return what a launch on heads of ``dim`` channels takes: lanes of a warp have pieces of as many rows."""
        piece = padded(dim) // self.pieces
        rows = max(1, 32 * self.lane // piece) * self.times * self.warps
        return dict(PIECE=piece, PIECES=self.pieces, BLOCK_Q=rows * (1 + self.backward), num_warps=self.warps)


def cut_for(value: Tensor, logits: Tensor, backward: bool) -> Cut:
    """Return how a kernel works on these tensors.

    A lane has 16 bytes of every piece, of values or, backward, of float32 sums; where the GPU adds one float at a time,
    one channel.
    """
    tiled = logits.shape[1] == value.shape[1]  # an encoder, where a query's neighbours in the map are known
    if backward and scalar_reductions(value):
        return Cut(backward, tiled, min(SCALAR_PIECES, padded(value.shape[-1]) // 8), 1)
    return Cut(backward, tiled, PIECES, LANE_BYTES // (4 if backward else value.element_size()))


def scalar_reductions(value: Tensor) -> bool:
    """Return whether the GPU adds one float at a time, as before sm_90: then neighbours belong into different lanes."""
    if interpreted():
        return False
    target = target_of(value.device)
    return target.backend == 'cuda' and target.arch < 90

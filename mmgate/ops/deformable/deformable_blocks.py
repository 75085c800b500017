"""Choose the block sizes of the deformable attention's Triton kernels, by compiler listings (times: KERNELS.md)."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from ..triton_backend import interpreted, power_of_two, target_of

LANE_BYTES = 16  # loaded or added by a lane at once; the values' gradient is always float32
PIECES = 2  # pieces of a row of channels
SCALAR_PIECES = 4  # the most pieces if a lane adds one float at a time; a piece has at least eight lanes, 32 bytes
INTERPRETED_QUERIES = 4  # queries of a program in the interpreter, so that small shapes have several programs


class Cut(NamedTuple):
    """Division of a Triton kernel's work: queries for each program, channels for each lane, number of warps.

    Attributes:
        backward: True for the backward kernel.
        tiled: True if queries go down the columns of bands of their map; they have to be the tokens.
        pieces: Pieces of a row of channels: 2, or 4 in the backward kernel.
        lane: A lane's channels of a piece.
        times: Queries, or pairs, of a lane.
        warps: Warps of a program.
        paired: True if a lane of the backward kernel has two queries at a time.
    """

    backward: bool
    tiled: bool
    pieces: int
    lane: int
    times: int = 1
    warps: int = 4
    paired: bool = True

    def constants(self, dim: int) -> dict[str, int]:
        """Return the compile-time constants for a launch on heads with ``dim`` channels."""
        piece = power_of_two(dim) // self.pieces
        rows = max(1, 32 * self.lane // piece) * self.times * self.warps
        constants = dict(PIECE=piece, PIECES=self.pieces, BLOCK_Q=rows, num_warps=self.warps)
        if self.backward:
            constants |= dict(BLOCK_Q=rows * (1 + self.paired), PAIRED=self.paired)
        return constants


def cut_for(value: Tensor, logits: Tensor, backward: bool) -> Cut:
    """Choose block sizes for the forward or the backward kernel on these tensors.

    A lane has 16 bytes of every piece, of values or, in the backward pass, of float32 sums. It has one channel if the
    GPU adds one float at a time.
    """
    # In an encoder the queries are the tokens, whose neighbours in the map are known.
    tiled = logits.shape[1] == value.shape[1]
    if backward and scalar_reductions(value):
        return Cut(backward, tiled, min(SCALAR_PIECES, power_of_two(value.shape[-1]) // 8), 1)
    return Cut(backward, tiled, PIECES, LANE_BYTES // (4 if backward else value.element_size()))


def scalar_reductions(value: Tensor) -> bool:
    """Return True if the GPU's atomic additions take one float at a time, as before sm_90.

    Neighbouring channels then belong into different lanes.
    """
    if interpreted():
        return False
    target = target_of(value.device)
    return target.backend == 'cuda' and target.arch < 90

# mypy: disable-error-code=no-untyped-def
"""Triton kernels of multi-scale deformable attention, which compute gate, softmax and sampling in one pass.

    O[q] = sum_j w_j bilinear(V_l(j), x_j),   w = softmax(A F)  or  softmax(A) F,   F = 1 + G or G,   j over (L, P)

Layout: value (B, S, H, D); shapes (L, 2); starts (L,); points (B, Q, H, L, P, 2), locations or offsets; reference
(B, Q, L, R) with R = 0 (points are locations), 2 or 4; logits (B, Q, H, L, P); gate with strides, 0 where it
broadcasts; output (B, Q, H, D); lse (B, Q, H), log2 of the softmax's sum. All contiguous but the gate. Offsets within
an image fit into int32, which the CPU checks.

A program has one head of one image and BLOCK_Q neighbouring queries. If the queries are the tokens (TILED), it goes
down the columns of bands of BAND rows of their map. Rows of D channels are read in pieces of PIECE channels, and every
lane has a few channels of a piece. ../KERNELS.md gives the reasons. The backward kernel is in deformable_backward.py.
"""

import triton
import triton.language as tl

BAND = tl.constexpr(8)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _level(shapes_ptr, starts_ptr, level):
    """Load height, width and first token of a level."""
    height = tl.load(shapes_ptr + 2 * level).to(tl.int32)
    width = tl.load(shapes_ptr + 2 * level + 1).to(tl.int32)
    return height, width, tl.load(starts_ptr + level).to(tl.int32)


@triton.jit
def order_kernel(shapes_ptr, starts_ptr, order_ptr, tokens, LEVELS: tl.constexpr, BLOCK: tl.constexpr):
    """Write an order of all tokens (S,) in which neighbours lie in small tiles of a map, for kernels that are TILED.

    It goes down the columns of bands of BAND rows of each map.

    This is a separate kernel, because its divisions would keep the others from one layout for all of a query's numbers.
    """
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    start = place  # no token of a level stays where it is
    height = tl.full((BLOCK,), 1, tl.int32)
    width = tl.full((BLOCK,), 1, tl.int32)
    for level in tl.static_range(LEVELS):
        rows, columns, first = _level(shapes_ptr, starts_ptr, level)
        here = (place >= first) & (place < first + rows * columns)
        start = tl.where(here, first, start)
        height = tl.where(here, rows, height)
        width = tl.where(here, columns, width)
    top = (place - start) // (width * BAND) * BAND
    in_band = place - start - top * width
    rows = tl.minimum(height - top, BAND)
    tl.store(order_ptr + place, start + (top + in_band % rows) * width + in_band // rows, mask=place < tokens)


@triton.jit
def _place(order_ptr, place, queries, heads, TILED: tl.constexpr):
    """Return a program's image and head, its queries, their rows in (Q, H), and a mask of those that exist."""
    b = (tl.program_id(1) // heads).to(tl.int64)
    h = tl.program_id(1) % heads
    q = tl.load(order_ptr + place, mask=place < queries, other=queries) if TILED else place
    return b, h, q, q * heads + h, q < queries


@triton.jit
def _products(
    logits_ptr, gate_ptr, logits_at, gate_at, mask,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Load logits A and gates; return A, the gate's factor F, and the softmax's input, A F or A."""
    a = tl.load(logits_ptr + logits_at, mask=mask, other=0.0).to(tl.float32)
    f = tl.full(a.shape, 1.0, tl.float32)
    if GATED:
        g = tl.load(gate_ptr + gate_at, mask=mask, other=0.0).to(tl.float32)
        f = 1.0 + g if RESIDUAL else g
    return a, f, a if POST else a * f


@triton.jit
def _tile(
    logits_ptr, gate_ptr, row, q, in_tile, gate_q, gate_l, gate_p: tl.constexpr,
    COUNT: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Load all logits and gates of a block of queries; return offsets, mask, A, F and the softmax's exponents.

    All are (queries, PADDED); exponents are to base 2, and -inf in padding.
    """
    col = tl.arange(0, PADDED)
    at = (row * COUNT)[:, None] + col[None, :]
    mask = in_tile[:, None] & (col < COUNT)[None, :]
    gate_at = (q * gate_q)[:, None] + (col // POINTS * gate_l + col % POINTS * gate_p)[None, :]
    a, f, x = _products(logits_ptr, gate_ptr, at, gate_at, mask, GATED, RESIDUAL, POST)
    return at, mask, a, f, tl.where((col < COUNT)[None, :], x * LOG2E, float('-inf'))


@triton.jit
def _weight(
    logits_ptr, gate_ptr, logits_at, gate_at, mask, lse,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Return the attention weight of one sample of each query."""
    _, f, x = _products(logits_ptr, gate_ptr, logits_at, gate_at, mask, GATED, RESIDUAL, POST)
    p = tl.exp2(x * LOG2E - lse)
    return p * f if POST else p


@triton.jit
def _scales(reference_ptr, q, level, in_tile, height, width, LEVELS: tl.constexpr, POINTS: tl.constexpr,
            REFERENCE: tl.constexpr):  # fmt: skip
    """Return scale and shift that convert a query's sampling points to pixel coordinates on a level."""
    across = width.to(tl.float32)
    down = height.to(tl.float32)
    scale_x = tl.full(q.shape, 1.0, tl.float32)
    scale_y = tl.full(q.shape, 1.0, tl.float32)
    shift_x = tl.full(q.shape, -0.5, tl.float32)
    shift_y = tl.full(q.shape, -0.5, tl.float32)
    if REFERENCE == 0:
        scale_x = scale_x * across
        scale_y = scale_y * down
    else:
        at = reference_ptr + (q * LEVELS + level) * REFERENCE
        shift_x += tl.load(at, mask=in_tile, other=0.0).to(tl.float32) * across
        shift_y += tl.load(at + 1, mask=in_tile, other=0.0).to(tl.float32) * down
    if REFERENCE == 4:  # offsets are shares of half a box, divided by the points
        scale_x = tl.load(at + 2, mask=in_tile, other=0.0).to(tl.float32) * (across * (0.5 / POINTS))
        scale_y = tl.load(at + 3, mask=in_tile, other=0.0).to(tl.float32) * (down * (0.5 / POINTS))
    return scale_x, scale_y, shift_x, shift_y


@triton.jit
def _corners(points_ptr, at, in_tile, height, width, scale_x, scale_y, shift_x, shift_y):
    """Return for a sample the pixel at its upper left, the fractions beyond it, and masks of corners on the map."""
    x = tl.load(points_ptr + at, mask=in_tile, other=0.0).to(tl.float32) * scale_x + shift_x
    y = tl.load(points_ptr + at + 1, mask=in_tile, other=0.0).to(tl.float32) * scale_y + shift_y
    # Points far off the map stay off it, within the range of int32. So does NaN: maximum and minimum return the other
    # argument.
    x = tl.minimum(tl.maximum(x, -2.0), width.to(tl.float32))
    y = tl.minimum(tl.maximum(y, -2.0), height.to(tl.float32))
    x0 = tl.floor(x)
    y0 = tl.floor(y)
    fx = x - x0
    fy = y - y0
    left = x0.to(tl.int32)
    top = y0.to(tl.int32)
    # As unsigned integers, negative ones are too large as well.
    columns = width.to(tl.uint32)
    rows = height.to(tl.uint32)
    in_left = left.to(tl.uint32) < columns
    in_right = (left + 1).to(tl.uint32) < columns
    in_top = (top.to(tl.uint32) < rows) & in_tile
    in_bottom = ((top + 1).to(tl.uint32) < rows) & in_tile
    return fx, fy, left, top, in_left, in_right, in_top, in_bottom


@triton.jit
def _bilinear(w, fx, fy):
    """Return the bilinear weights of a sample's four corners: upper left, upper right, lower left, lower right."""
    upper = w * (1.0 - fy)
    lower = w * fy
    return upper * (1.0 - fx), upper * fx, lower * (1.0 - fx), lower * fx


@triton.jit
def _piece(row, on, d, FIRST: tl.constexpr, D: tl.constexpr):
    """Return memory offsets and mask for a piece of rows: the channels from FIRST on."""
    at = (row * D)[:, None] + (d + FIRST)[None, :]
    mask = on[:, None] & (d < D - FIRST)[None, :]
    return at, mask


@triton.jit
def _load(ptr, row, on, d, FIRST: tl.constexpr, D: tl.constexpr):
    """Load a piece of rows, the channels from FIRST on, with 0 where the mask ``on`` is False."""
    at, mask = _piece(row, on, d, FIRST, D)
    return tl.load(ptr + at, mask=mask, other=0.0)


@triton.jit
def _load2(ptr, row, on, d, D: tl.constexpr):
    """Load rows of a head's channels in two pieces, with 0 where the mask ``on`` is False."""
    return _load(ptr, row, on, d, 0, D), _load(ptr, row, on, d, d.shape[0], D)


@triton.jit
def forward_kernel(
    value_ptr, shapes_ptr, starts_ptr, order_ptr, points_ptr, reference_ptr, logits_ptr, gate_ptr, output_ptr, lse_ptr,
    tokens, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p: tl.constexpr,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, REFERENCE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
    TILED: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Compute and store the output, and log2 of each softmax's sum for the backward pass."""
    tl.static_assert(PIECES == 2)
    COUNT: tl.constexpr = LEVELS * POINTS
    place = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    b, h, q, row, in_tile = _place(order_ptr, place, queries, heads, TILED)
    d = tl.arange(0, PIECE)
    value_ptr += (b * tokens * heads + h) * D
    points_ptr += b * queries * heads * COUNT * 2
    reference_ptr += b * queries * LEVELS * REFERENCE
    logits_ptr += b * queries * heads * COUNT
    gate_ptr += b * gate_b + h * gate_h
    output_ptr += b * queries * heads * D
    lse_ptr += b * queries * heads

    _, _, _, _, x = _tile(
        logits_ptr, gate_ptr, row, q, in_tile, gate_q, gate_l, gate_p,
        COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
    )  # fmt: skip
    largest = tl.max(x, 1)
    tl.store(lse_ptr + row, largest + tl.log2(tl.sum(tl.exp2(x - largest[:, None]), 1)), mask=in_tile)
    # The sum goes to the lanes of the loop through memory, which the backward pass needs anyway. In registers the
    # weights would change lanes for every sample.
    tl.debug_barrier()
    lse = tl.load(lse_ptr + row, mask=in_tile, other=0.0)
    total = tl.zeros((BLOCK_Q, PIECE), tl.float32)
    total2 = tl.zeros((BLOCK_Q, PIECE), tl.float32)
    for level in range(LEVELS):
        height, width, start = _level(shapes_ptr, starts_ptr, level)
        scale_x, scale_y, shift_x, shift_y = _scales(
            reference_ptr, q, level, in_tile, height, width, LEVELS, POINTS, REFERENCE
        )
        for point in tl.static_range(POINTS):
            at = row * COUNT + level * POINTS + point
            gate_at = q * gate_q + level * gate_l + point * gate_p
            w = _weight(logits_ptr, gate_ptr, at, gate_at, in_tile, lse, GATED, RESIDUAL, POST)
            fx, fy, left, top, in_left, in_right, in_top, in_bottom = _corners(
                points_ptr, at * 2, in_tile, height, width, scale_x, scale_y, shift_x, shift_y
            )
            w00, w10, w01, w11 = _bilinear(w, fx, fy)
            # All loads come before the first use of one, so that the assembler keeps more of them under way.
            upper = (start + top * width + left) * heads
            lower = upper + width * heads
            v00, u00 = _load2(value_ptr, upper, in_top & in_left, d, D)
            v10, u10 = _load2(value_ptr, upper + heads, in_top & in_right, d, D)
            v01, u01 = _load2(value_ptr, lower, in_bottom & in_left, d, D)
            v11, u11 = _load2(value_ptr, lower + heads, in_bottom & in_right, d, D)
            total += w00[:, None] * v00.to(tl.float32)
            total += w10[:, None] * v10.to(tl.float32)
            total += w01[:, None] * v01.to(tl.float32)
            total += w11[:, None] * v11.to(tl.float32)
            total2 += w00[:, None] * u00.to(tl.float32)
            total2 += w10[:, None] * u10.to(tl.float32)
            total2 += w01[:, None] * u01.to(tl.float32)
            total2 += w11[:, None] * u11.to(tl.float32)
    at, mask = _piece(row, in_tile, d, 0, D)
    tl.store(output_ptr + at, total.to(output_ptr.dtype.element_ty), mask=mask)
    at, mask = _piece(row, in_tile, d, PIECE, D)
    tl.store(output_ptr + at, total2.to(output_ptr.dtype.element_ty), mask=mask)

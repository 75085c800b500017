# mypy: disable-error-code=no-untyped-def
"""Triton kernels of multi-scale deformable attention: gate, softmax and sampling in one.

    O[q] = sum_j w_j bilinear(V_l(j), x_j),   w = softmax(A F)  or  softmax(A) F,   F = 1 + G or G,   j over (L, P)

Layout: value (B, S, H, D); shapes (L, 2); starts (L,); points (B, Q, H, L, P, 2), locations or offsets; reference
(B, Q, L, R) with R = 0 (points are locations), 2 or 4; logits (B, Q, H, L, P); gate with strides, 0 where it
broadcasts; output (B, Q, H, D). All contiguous but the gate. Offsets within an image fit into int32, which the host
checks. size_class is for the autotuner's key alone.

A program has one head of one image and BLOCK_Q neighbouring queries, so that the rows it gathers are close together,
and reads whole rows of D channels. Coordinates, softmax and sums are float32 for every input type. The softmax's
maximum and sum come from one tile (BLOCK_Q, L P); the loop then forms location and weight of a sample where they are
used, from logits that lie in the first cache by then, so that no lane waits for another and neither reaches memory.
"""

import triton
import triton.language as tl


@triton.jit
def _place(queries, heads, BLOCK_Q: tl.constexpr):
    """Return a program's image and head, its queries, their rows in (Q, H), and which of them there are."""
    b, h = (tl.program_id(1) // heads).to(tl.int64), tl.program_id(1) % heads
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    return b, h, q, q * heads + h, q < queries


@triton.jit
def _products(
    logits_ptr, gate_ptr, logits_at, gate_at, mask,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Return logits A, factor F and what goes into the softmax, A F or A."""
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
    """Return offsets, mask, A, F and what goes into the softmax of all samples, (BLOCK_Q, PADDED); -inf in padding."""
    col = tl.arange(0, PADDED)
    at = (row * COUNT)[:, None] + col[None, :]
    mask = in_tile[:, None] & (col < COUNT)[None, :]
    gate_at = (q * gate_q)[:, None] + (col // POINTS * gate_l + col % POINTS * gate_p)[None, :]
    a, f, x = _products(logits_ptr, gate_ptr, at, gate_at, mask, GATED, RESIDUAL, POST)
    return at, mask, a, f, tl.where((col < COUNT)[None, :], x, float('-inf'))


@triton.jit
def _softmax(
    logits_ptr, gate_ptr, softmax_ptr, row, q, in_tile, gate_q, gate_l, gate_p: tl.constexpr,
    COUNT: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Store maximum and inverse sum of every query's softmax."""
    _, _, _, _, x = _tile(
        logits_ptr, gate_ptr, row, q, in_tile, gate_q, gate_l, gate_p,
        COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
    )  # fmt: skip
    largest = tl.max(x, 1)
    share = 1.0 / tl.sum(tl.exp(x - largest[:, None]), 1)
    tl.store(softmax_ptr + row * 2, largest, mask=in_tile)
    tl.store(softmax_ptr + row * 2 + 1, share, mask=in_tile)


@triton.jit
def _weight(
    logits_ptr, gate_ptr, logits_at, gate_at, mask, largest, share,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Return a sample's weight from its softmax's maximum and inverse sum."""
    _, f, x = _products(logits_ptr, gate_ptr, logits_at, gate_at, mask, GATED, RESIDUAL, POST)
    p = tl.exp(x - largest) * share
    return p * f if POST else p


@triton.jit
def _level(shapes_ptr, starts_ptr, reference_ptr, q, level, in_tile, LEVELS: tl.constexpr, POINTS: tl.constexpr,
           REFERENCE: tl.constexpr):  # fmt: skip
    """Return height, width and first token of a level, and the scales and shifts that take points to its pixels."""
    height = tl.load(shapes_ptr + 2 * level).to(tl.int32)
    width = tl.load(shapes_ptr + 2 * level + 1).to(tl.int32)
    start = tl.load(starts_ptr + level).to(tl.int32)
    across, down = width.to(tl.float32), height.to(tl.float32)
    scale_x, scale_y = tl.full(q.shape, 1.0, tl.float32), tl.full(q.shape, 1.0, tl.float32)
    shift_x, shift_y = tl.full(q.shape, -0.5, tl.float32), tl.full(q.shape, -0.5, tl.float32)
    if REFERENCE == 0:
        scale_x, scale_y = scale_x * across, scale_y * down
    else:
        at = reference_ptr + (q * LEVELS + level) * REFERENCE
        shift_x += tl.load(at, mask=in_tile, other=0.0).to(tl.float32) * across
        shift_y += tl.load(at + 1, mask=in_tile, other=0.0).to(tl.float32) * down
    if REFERENCE == 4:  # offsets are shares of half a box, divided by the points
        scale_x = tl.load(at + 2, mask=in_tile, other=0.0).to(tl.float32) * (across * (0.5 / POINTS))
        scale_y = tl.load(at + 3, mask=in_tile, other=0.0).to(tl.float32) * (down * (0.5 / POINTS))
    return height, width, start, scale_x, scale_y, shift_x, shift_y


@triton.jit
def _corners(points_ptr, at, in_tile, height, width, start, scale_x, scale_y, shift_x, shift_y, heads):
    """Return the sample's fractions, the token row of its upper left corner, and which corners lie on the map."""
    x = tl.load(points_ptr + at, mask=in_tile, other=0.0).to(tl.float32) * scale_x + shift_x
    y = tl.load(points_ptr + at + 1, mask=in_tile, other=0.0).to(tl.float32) * scale_y + shift_y
    # what is far off the map stays off it, within the range of int32; so does what is no number, which neither returns
    x = tl.minimum(tl.maximum(x, -2.0), width.to(tl.float32))
    y = tl.minimum(tl.maximum(y, -2.0), height.to(tl.float32))
    x0, y0 = tl.floor(x), tl.floor(y)
    fx, fy = x - x0, y - y0
    left, top = x0.to(tl.int32), y0.to(tl.int32)
    # as unsigned integers, negative ones are too large as well
    columns, rows = width.to(tl.uint32), height.to(tl.uint32)
    in_left, in_right = left.to(tl.uint32) < columns, (left + 1).to(tl.uint32) < columns
    in_top, in_bottom = (top.to(tl.uint32) < rows) & in_tile, ((top + 1).to(tl.uint32) < rows) & in_tile
    return fx, fy, (start + top * width + left) * heads, in_left, in_right, in_top, in_bottom


@triton.jit
def _channels(value_ptr, row, on_map, d, D: tl.constexpr):
    """Return offsets, mask and channels of one corner."""
    at = (row * D)[:, None] + d[None, :]
    mask = on_map[:, None] & (d < D)[None, :]
    return at, mask, tl.load(value_ptr + at, mask=mask, other=0.0).to(tl.float32)


@triton.jit(do_not_specialize=['size_class'])
def forward_kernel(
    value_ptr, shapes_ptr, starts_ptr, points_ptr, reference_ptr, logits_ptr, gate_ptr, output_ptr, softmax_ptr,
    tokens, queries, size_class, heads, gate_b, gate_q, gate_h, gate_l, gate_p: tl.constexpr,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Store the attended values, and maximum and inverse sum of every softmax, (B, Q, H, 2)."""
    COUNT: tl.constexpr = LEVELS * POINTS
    b, h, q, row, in_tile = _place(queries, heads, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    value_ptr += (b * tokens * heads + h) * D
    points_ptr += b * queries * heads * COUNT * 2
    reference_ptr += b * queries * LEVELS * REFERENCE
    logits_ptr += b * queries * heads * COUNT
    gate_ptr += b * gate_b + h * gate_h
    output_ptr += b * queries * heads * D
    softmax_ptr += b * queries * heads * 2

    _softmax(
        logits_ptr, gate_ptr, softmax_ptr, row, q, in_tile, gate_q, gate_l, gate_p,
        COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
    )  # fmt: skip
    # Through memory, which the backward pass needs anyway, to the lanes of the loop: kept in registers, the weights
    # would change lanes for every sample.
    tl.debug_barrier()
    largest = tl.load(softmax_ptr + row * 2, mask=in_tile, other=0.0)
    share = tl.load(softmax_ptr + row * 2 + 1, mask=in_tile, other=0.0)
    total = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for level in range(LEVELS):
        height, width, start, scale_x, scale_y, shift_x, shift_y = _level(
            shapes_ptr, starts_ptr, reference_ptr, q, level, in_tile, LEVELS, POINTS, REFERENCE
        )
        for point in tl.static_range(POINTS):
            at = row * COUNT + level * POINTS + point
            gate_at = q * gate_q + level * gate_l + point * gate_p
            w = _weight(logits_ptr, gate_ptr, at, gate_at, in_tile, largest, share, GATED, RESIDUAL, POST)
            fx, fy, token, in_left, in_right, in_top, in_bottom = _corners(
                points_ptr, at * 2, in_tile, height, width, start, scale_x, scale_y, shift_x, shift_y, heads
            )
            _at, _mask, v00 = _channels(value_ptr, token, in_top & in_left, d, D)
            _at, _mask, v10 = _channels(value_ptr, token + heads, in_top & in_right, d, D)
            _at, _mask, v01 = _channels(value_ptr, token + width * heads, in_bottom & in_left, d, D)
            _at, _mask, v11 = _channels(value_ptr, token + (width + 1) * heads, in_bottom & in_right, d, D)
            upper, lower = w * (1.0 - fy), w * fy
            total += (upper * (1.0 - fx))[:, None] * v00
            total += (upper * fx)[:, None] * v10
            total += (lower * (1.0 - fx))[:, None] * v01
            total += (lower * fx)[:, None] * v11
    out = output_ptr + (row * D)[:, None] + d[None, :]
    tl.store(out, total.to(output_ptr.dtype.element_ty), mask=in_tile[:, None] & (d < D)[None, :])


@triton.jit
def _scatter(grad_value_ptr, at, mask, weight, grad):
    tl.atomic_add(grad_value_ptr + at, weight[:, None] * grad, mask=mask, sem='relaxed')


@triton.jit(do_not_specialize=['size_class'])
def backward_kernel(
    grad_ptr, softmax_ptr, value_ptr, shapes_ptr, starts_ptr, points_ptr, reference_ptr, logits_ptr, gate_ptr,
    grad_value_ptr, grad_points_ptr, grad_reference_ptr, grad_logits_ptr, grad_gate_ptr,
    tokens, queries, size_class, heads, gate_b, gate_q, gate_h, gate_l, gate_p: tl.constexpr,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, BLOCK_Q: tl.constexpr,
    SCATTER: tl.constexpr, GRAD_REFERENCE: tl.constexpr,
):  # fmt: skip
    """Gradients of values (by atomics, if SCATTER), points, reference (if GRAD_REFERENCE), logits and gate.

    Those of the reference are a head's, (B, Q, H, L, R), and the gate's are a logit's; the host sums them.
    """
    COUNT: tl.constexpr = LEVELS * POINTS
    b, h, q, row, in_tile = _place(queries, heads, BLOCK_Q)
    d = tl.arange(0, BLOCK_D)
    value_ptr += (b * tokens * heads + h) * D
    grad_value_ptr += (b * tokens * heads + h) * D
    points_ptr += b * queries * heads * COUNT * 2
    reference_ptr += b * queries * LEVELS * REFERENCE
    logits_ptr += b * queries * heads * COUNT
    gate_ptr += b * gate_b + h * gate_h
    grad_ptr += b * queries * heads * D
    grad_points_ptr += b * queries * heads * COUNT * 2
    grad_reference_ptr += b * queries * heads * LEVELS * REFERENCE
    grad_logits_ptr += b * queries * heads * COUNT
    grad_gate_ptr += b * queries * heads * COUNT

    softmax_ptr += b * queries * heads * 2
    largest = tl.load(softmax_ptr + row * 2, mask=in_tile, other=0.0)
    share = tl.load(softmax_ptr + row * 2 + 1, mask=in_tile, other=0.0)
    channels = in_tile[:, None] & (d < D)[None, :]
    grad = tl.load(grad_ptr + (row * D)[:, None] + d[None, :], mask=channels, other=0.0).to(tl.float32)
    # what the loop finds for a sample goes to the sample's place in a tile
    col = tl.arange(0, PADDED)
    tile_w = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    tile_x = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    tile_y = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    for level in range(LEVELS):
        height, width, start, scale_x, scale_y, shift_x, shift_y = _level(
            shapes_ptr, starts_ptr, reference_ptr, q, level, in_tile, LEVELS, POINTS, REFERENCE
        )
        ref_x, ref_y = tl.zeros((BLOCK_Q,), tl.float32), tl.zeros((BLOCK_Q,), tl.float32)
        ref_w, ref_h = tl.zeros((BLOCK_Q,), tl.float32), tl.zeros((BLOCK_Q,), tl.float32)
        for point in tl.static_range(POINTS):
            at = row * COUNT + level * POINTS + point
            gate_at = q * gate_q + level * gate_l + point * gate_p
            w = _weight(logits_ptr, gate_ptr, at, gate_at, in_tile, largest, share, GATED, RESIDUAL, POST)
            fx, fy, token, in_left, in_right, in_top, in_bottom = _corners(
                points_ptr, at * 2, in_tile, height, width, start, scale_x, scale_y, shift_x, shift_y, heads
            )
            at00, mask00, v00 = _channels(value_ptr, token, in_top & in_left, d, D)
            at10, mask10, v10 = _channels(value_ptr, token + heads, in_top & in_right, d, D)
            at01, mask01, v01 = _channels(value_ptr, token + width * heads, in_bottom & in_left, d, D)
            at11, mask11, v11 = _channels(value_ptr, token + (width + 1) * heads, in_bottom & in_right, d, D)
            dot00, dot10 = tl.sum(v00 * grad, 1), tl.sum(v10 * grad, 1)
            dot01, dot11 = tl.sum(v01 * grad, 1), tl.sum(v11 * grad, 1)
            if SCATTER:
                upper, lower = w * (1.0 - fy), w * fy
                _scatter(grad_value_ptr, at00, mask00, upper * (1.0 - fx), grad)
                _scatter(grad_value_ptr, at10, mask10, upper * fx, grad)
                _scatter(grad_value_ptr, at01, mask01, lower * (1.0 - fx), grad)
                _scatter(grad_value_ptr, at11, mask11, lower * fx, grad)
            above, below = dot00 + fx * (dot10 - dot00), dot01 + fx * (dot11 - dot01)
            grad_w = above + fy * (below - above)
            grad_x = w * ((dot10 - dot00) + fy * ((dot11 - dot01) - (dot10 - dot00)))
            grad_y = w * (below - above)
            here = (col == level * POINTS + point)[None, :]
            tile_w = tl.where(here, grad_w[:, None], tile_w)
            tile_x = tl.where(here, (grad_x * scale_x)[:, None], tile_x)
            tile_y = tl.where(here, (grad_y * scale_y)[:, None], tile_y)
            if GRAD_REFERENCE:
                ref_x += grad_x
                ref_y += grad_y
                if REFERENCE == 4:
                    ref_w += grad_x * tl.load(points_ptr + at * 2, mask=in_tile, other=0.0).to(tl.float32)
                    ref_h += grad_y * tl.load(points_ptr + at * 2 + 1, mask=in_tile, other=0.0).to(tl.float32)
        if GRAD_REFERENCE:
            across, down = width.to(tl.float32), height.to(tl.float32)
            ref = grad_reference_ptr + (row * LEVELS + level) * REFERENCE
            tl.store(ref, ref_x * across, mask=in_tile)
            tl.store(ref + 1, ref_y * down, mask=in_tile)
            if REFERENCE == 4:
                tl.store(ref + 2, ref_w * (across * (0.5 / POINTS)), mask=in_tile)
                tl.store(ref + 3, ref_h * (down * (0.5 / POINTS)), mask=in_tile)

    at_tile, inside, a, factor, products = _tile(
        logits_ptr, gate_ptr, row, q, in_tile, gate_q, gate_l, gate_p,
        COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
    )  # fmt: skip
    softmax = tl.exp(products - largest[:, None]) * share[:, None]
    grad_softmax = tile_w * factor if POST else tile_w
    grad_products = softmax * (grad_softmax - tl.sum(softmax * grad_softmax, 1)[:, None])
    tl.store(grad_points_ptr + at_tile * 2, tile_x, mask=inside)
    tl.store(grad_points_ptr + at_tile * 2 + 1, tile_y, mask=inside)
    tl.store(grad_logits_ptr + at_tile, grad_products if POST else grad_products * factor, mask=inside)
    if GATED:
        tl.store(grad_gate_ptr + at_tile, tile_w * softmax if POST else grad_products * a, mask=inside)

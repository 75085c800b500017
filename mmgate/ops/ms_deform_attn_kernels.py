# mypy: disable-error-code=no-untyped-def
"""Triton kernels of multi-scale deformable attention: gate, softmax and sampling in one.

    O[q] = sum_j w_j bilinear(V_l(j), x_j),   w = softmax(A F)  or  softmax(A) F,   F = 1 + G or G,   j over (L, P)

Layout: value (B, S, H, D); shapes (L, 2); starts (L,); points (B, Q, H, L, P, 2), locations or offsets; reference
(B, Q, L, R) with R = 0 (points are locations), 2 or 4; logits (B, Q, H, L, P); gate with strides, 0 where it
broadcasts; output (B, Q, H, D). All contiguous but the gate.

A program has one head of one image and BLOCK_Q neighbouring queries, so that the rows it gathers are close together,
and reads whole rows of D channels. Coordinates, softmax and sums are float32 for every input type. The (L, P) axis lies
in one padded register tile, from which the loop takes a column at a time: locations and weights never reach memory.
"""

import triton
import triton.language as tl


@triton.jit
def _tile(
    logits_ptr, gate_ptr, b, q, h, col, inside, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p,
    POINTS: tl.constexpr, COUNT: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Return logits, F and softmax of a (BLOCK_Q, padded L P) tile."""
    row = ((b * queries + q) * heads + h) * COUNT
    a = tl.load(logits_ptr + row[:, None] + col[None, :], mask=inside, other=0.0).to(tl.float32)
    f = tl.full(a.shape, 1.0, tl.float32)
    if GATED:
        at = b * gate_b + q[:, None] * gate_q + h * gate_h + (col // POINTS)[None, :] * gate_l
        g = tl.load(gate_ptr + at + (col % POINTS)[None, :] * gate_p, mask=inside, other=0.0).to(tl.float32)
        f = 1.0 + g if RESIDUAL else g
    x = a if POST else a * f
    x = tl.where((col < COUNT)[None, :], x, float('-inf'))
    e = tl.exp(x - tl.max(x, 1)[:, None])
    return a, f, e / tl.sum(e, 1)[:, None]


@triton.jit
def _pixel(
    points_ptr, reference_ptr, shapes_ptr, b, q, h, j, in_tile, queries, heads,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, REFERENCE: tl.constexpr,
):  # fmt: skip
    """Return level, its height and width, and the pixel coordinates (x, y) of point j; centres are integers."""
    level = j // POINTS
    height = tl.load(shapes_ptr + 2 * level).to(tl.float32)
    width = tl.load(shapes_ptr + 2 * level + 1).to(tl.float32)
    at = points_ptr + (((b * queries + q) * heads + h) * (LEVELS * POINTS) + j) * 2
    px = tl.load(at, mask=in_tile, other=0.0).to(tl.float32)
    py = tl.load(at + 1, mask=in_tile, other=0.0).to(tl.float32)
    if REFERENCE > 0:
        ref = reference_ptr + ((b * queries + q) * LEVELS + level) * REFERENCE
        rx = tl.load(ref, mask=in_tile, other=0.0).to(tl.float32)
        ry = tl.load(ref + 1, mask=in_tile, other=0.0).to(tl.float32)
        if REFERENCE == 4:  # offsets are shares of half a box, divided by the points
            px *= tl.load(ref + 2, mask=in_tile, other=0.0).to(tl.float32) * (0.5 / POINTS)
            py *= tl.load(ref + 3, mask=in_tile, other=0.0).to(tl.float32) * (0.5 / POINTS)
        else:
            px /= width
            py /= height
        px += rx
        py += ry
    return level, height, width, px * width - 0.5, py * height - 0.5


@triton.jit
def _corner(value_ptr, b, h, start, x, y, height, width, in_tile, tokens, heads, d, D: tl.constexpr):
    """Return whether the corner (x, y) lies on the map, and the offset of its row of channels."""
    on_map = in_tile & (x >= 0) & (x < width) & (y >= 0) & (y < height)
    token = start + tl.where(on_map, y * width + x, 0.0).to(tl.int64)
    return on_map, ((b.to(tl.int64) * tokens + token) * heads + h)[:, None] * D + d[None, :]


@triton.jit
def forward_kernel(
    value_ptr, shapes_ptr, starts_ptr, points_ptr, reference_ptr, logits_ptr, gate_ptr, output_ptr,
    tokens, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, BLOCK_Q: tl.constexpr,
):  # fmt: skip
    """Store the attended values."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d, col = tl.arange(0, BLOCK_D), tl.arange(0, PADDED)
    in_tile = q < queries
    COUNT: tl.constexpr = LEVELS * POINTS
    inside = in_tile[:, None] & (col < COUNT)[None, :]
    _, f, weights = _tile(
        logits_ptr, gate_ptr, b, q, h, col, inside, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p,
        POINTS, COUNT, GATED, RESIDUAL, POST,
    )  # fmt: skip
    if POST:
        weights = weights * f
    total = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    for j in range(COUNT):
        level, height, width, x, y = _pixel(
            points_ptr, reference_ptr, shapes_ptr, b, q, h, j, in_tile, queries, heads, LEVELS, POINTS, REFERENCE
        )
        start = tl.load(starts_ptr + level).to(tl.int64)
        w = tl.sum(tl.where((col == j)[None, :], weights, 0.0), 1)
        x0, y0 = tl.floor(x), tl.floor(y)
        fx, fy = x - x0, y - y0
        for corner in tl.static_range(4):
            on_map, at = _corner(
                value_ptr, b, h, start, x0 + corner % 2, y0 + corner // 2, height, width, in_tile, tokens, heads, d, D
            )
            bilinear = (fx if corner % 2 else 1.0 - fx) * (fy if corner // 2 else 1.0 - fy)
            rows = tl.load(value_ptr + at, mask=on_map[:, None] & (d < D)[None, :], other=0.0).to(tl.float32)
            total += (w * bilinear)[:, None] * rows
    out = output_ptr + ((b * queries + q) * heads + h)[:, None].to(tl.int64) * D + d[None, :]
    tl.store(out, total.to(output_ptr.dtype.element_ty), mask=in_tile[:, None] & (d < D)[None, :])


@triton.jit
def backward_kernel(
    grad_ptr, value_ptr, shapes_ptr, starts_ptr, points_ptr, reference_ptr, logits_ptr, gate_ptr,
    grad_value_ptr, grad_location_ptr, grad_logits_ptr, grad_gate_ptr,
    tokens, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    REFERENCE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr, BLOCK_Q: tl.constexpr,
    SCATTER: tl.constexpr,
):  # fmt: skip
    """Gradients of values (by atomics, if SCATTER), locations in units of a level, logits and gate."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    q = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    d, col = tl.arange(0, BLOCK_D), tl.arange(0, PADDED)
    in_tile = q < queries
    COUNT: tl.constexpr = LEVELS * POINTS
    inside = in_tile[:, None] & (col < COUNT)[None, :]
    a, f, p = _tile(
        logits_ptr, gate_ptr, b, q, h, col, inside, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p,
        POINTS, COUNT, GATED, RESIDUAL, POST,
    )  # fmt: skip
    weights = p * f if POST else p
    row = (b * queries + q) * heads + h
    channels = in_tile[:, None] & (d < D)[None, :]
    grad = tl.load(grad_ptr + row[:, None].to(tl.int64) * D + d[None, :], mask=channels, other=0.0).to(tl.float32)
    grad_weights = tl.zeros((BLOCK_Q, PADDED), tl.float32)
    for j in range(COUNT):
        level, height, width, x, y = _pixel(
            points_ptr, reference_ptr, shapes_ptr, b, q, h, j, in_tile, queries, heads, LEVELS, POINTS, REFERENCE
        )
        start = tl.load(starts_ptr + level).to(tl.int64)
        column = (col == j)[None, :]
        w = tl.sum(tl.where(column, weights, 0.0), 1)
        x0, y0 = tl.floor(x), tl.floor(y)
        fx, fy = x - x0, y - y0
        grad_w = tl.zeros((BLOCK_Q,), tl.float32)
        grad_x = tl.zeros((BLOCK_Q,), tl.float32)
        grad_y = tl.zeros((BLOCK_Q,), tl.float32)
        for corner in tl.static_range(4):
            on_map, at = _corner(
                value_ptr, b, h, start, x0 + corner % 2, y0 + corner // 2, height, width, in_tile, tokens, heads, d, D
            )
            mask = on_map[:, None] & (d < D)[None, :]
            across, down = (fx if corner % 2 else 1.0 - fx), (fy if corner // 2 else 1.0 - fy)
            rows = tl.load(value_ptr + at, mask=mask, other=0.0).to(tl.float32)
            dot = tl.sum(rows * grad, 1)
            grad_w += across * down * dot
            grad_x += (down if corner % 2 else -down) * dot
            grad_y += (across if corner // 2 else -across) * dot
            if SCATTER:
                tl.atomic_add(grad_value_ptr + at, (w * across * down)[:, None] * grad, mask=mask, sem='relaxed')
        location = grad_location_ptr + (row.to(tl.int64) * COUNT + j) * 2
        tl.store(location, w * grad_x * width, mask=in_tile)
        tl.store(location + 1, w * grad_y * height, mask=in_tile)
        grad_weights = tl.where(column, grad_w[:, None], grad_weights)
    grad_p = grad_weights * f if POST else grad_weights
    grad_softmax = p * (grad_p - tl.sum(p * grad_p, 1)[:, None])
    at_tile = row[:, None].to(tl.int64) * COUNT + col[None, :]
    tl.store(grad_logits_ptr + at_tile, grad_softmax if POST else grad_softmax * f, mask=inside)
    if GATED:
        tl.store(grad_gate_ptr + at_tile, grad_weights * p if POST else grad_softmax * a, mask=inside)

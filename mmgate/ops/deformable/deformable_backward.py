# mypy: disable-error-code=no-untyped-def
"""Triton kernel for the backward pass of deformable attention; formula and layout are in deformable_kernels.py.

    dw_j = dO . v_j,   dx_j = w_j dO . dv_j/dx,   dV[row] = sum of s dO over all samples with a corner of share s there

    pre-softmax:   dA = P (dw - sum P dw) F,   dG = P (dw - sum P dw) A
    post-softmax:  dA = P (dw F - sum P dw F),   dG = P dw

The sum over a row's samples, by reductions in memory, takes most of the time. So a lane works on two neighbouring
queries at a time, one above the other in the map if TILED. It first adds up the gradients that both have for the same
rows of values: six reductions are left of eight if the second sample is a pixel below the first, and four if both have
the same corners. The reductions come before the gathers, whose results take up the registers.
"""

import triton
import triton.language as tl

from .deformable_kernels import _bilinear, _corners, _level, _load, _piece, _place, _scales, _tile, _weight


@triton.jit
def _dot(ptr, row, on, d, g0, g1, g2, g3, D: tl.constexpr, PIECES: tl.constexpr):
    """Return the scalar product of each value row in memory with an output gradient's row, given in pieces."""
    PIECE: tl.constexpr = d.shape[0]
    x = _load(ptr, row, on, d, 0, D).to(tl.float32) * g0
    x += _load(ptr, row, on, d, PIECE, D).to(tl.float32) * g1
    if PIECES == 4:
        x += _load(ptr, row, on, d, 2 * PIECE, D).to(tl.float32) * g2
        x += _load(ptr, row, on, d, 3 * PIECE, D).to(tl.float32) * g3
    return tl.sum(x, 1)


@triton.jit
def _grads(ptr, row, on, d, D: tl.constexpr, PIECES: tl.constexpr):
    """Load the output gradients' rows in four pieces of channels, of which the first PIECES are in use."""
    PIECE: tl.constexpr = d.shape[0]
    g0 = _load(ptr, row, on, d, 0, D).to(tl.float32)
    g1 = _load(ptr, row, on, d, PIECE, D).to(tl.float32)
    g2 = g0
    g3 = g1
    if PIECES == 4:
        g2 = _load(ptr, row, on, d, 2 * PIECE, D).to(tl.float32)
        g3 = _load(ptr, row, on, d, 3 * PIECE, D).to(tl.float32)
    return g0, g1, g2, g3


@triton.jit
def _reduce(ptr, row, on, d, x, FIRST: tl.constexpr, D: tl.constexpr):
    at, mask = _piece(row, on, d, FIRST, D)
    tl.atomic_add(ptr + at, x, mask=mask, sem='relaxed')


@triton.jit
def _scatter(ptr, row, on, d, s, g0, g1, g2, g3, D: tl.constexpr, PIECES: tl.constexpr):
    """Add an output gradient's row times the factor s to a row of the values' gradient, by atomic additions."""
    PIECE: tl.constexpr = d.shape[0]
    s = s[:, None]
    _reduce(ptr, row, on, d, s * g0, 0, D)
    _reduce(ptr, row, on, d, s * g1, PIECE, D)
    if PIECES == 4:
        _reduce(ptr, row, on, d, s * g2, 2 * PIECE, D)
        _reduce(ptr, row, on, d, s * g3, 3 * PIECE, D)


@triton.jit
def _scatter2(ptr, row, on, d, s, g0, g1, g2, g3, t, h0, h1, h2, h3, D: tl.constexpr, PIECES: tl.constexpr):
    """Add two rows, times the factors s and t, to one row of the values' gradient, by atomic additions."""
    PIECE: tl.constexpr = d.shape[0]
    s = s[:, None]
    t = t[:, None]
    _reduce(ptr, row, on, d, s * g0 + t * h0, 0, D)
    _reduce(ptr, row, on, d, s * g1 + t * h1, PIECE, D)
    if PIECES == 4:
        _reduce(ptr, row, on, d, s * g2 + t * h2, 2 * PIECE, D)
        _reduce(ptr, row, on, d, s * g3 + t * h3, 3 * PIECE, D)


@triton.jit
def _sample_gradients(
    value_ptr, upper, lower, heads, w, fx, fy, in_left, in_right, in_top, in_bottom, d, g0, g1, g2, g3,
    D: tl.constexpr, PIECES: tl.constexpr,
):  # fmt: skip
    """Return the gradients of a sample's attention weight and of its x and y in pixels."""
    dot00 = _dot(value_ptr, upper, in_top & in_left, d, g0, g1, g2, g3, D, PIECES)
    dot10 = _dot(value_ptr, upper + heads, in_top & in_right, d, g0, g1, g2, g3, D, PIECES)
    dot01 = _dot(value_ptr, lower, in_bottom & in_left, d, g0, g1, g2, g3, D, PIECES)
    dot11 = _dot(value_ptr, lower + heads, in_bottom & in_right, d, g0, g1, g2, g3, D, PIECES)
    above = dot00 + fx * (dot10 - dot00)
    below = dot01 + fx * (dot11 - dot01)
    grad_x = w * ((dot10 - dot00) + fy * ((dot11 - dot01) - (dot10 - dot00)))
    return above + fy * (below - above), grad_x, w * (below - above)


@triton.jit
def _store_gradients(
    tile_w, tile_x, tile_y, lse, logits_ptr, gate_ptr, grad_points_ptr, grad_logits_ptr, grad_gate_ptr,
    row, q, in_tile, gate_q, gate_l, gate_p: tl.constexpr,
    COUNT: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr,
    GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
):  # fmt: skip
    """Store a block's gradients of points, logits and gate, given those of weights and points (queries, PADDED)."""
    at, mask, a, factor, x = _tile(
        logits_ptr, gate_ptr, row, q, in_tile, gate_q, gate_l, gate_p,
        COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
    )  # fmt: skip
    softmax = tl.exp2(x - lse[:, None])
    # A GPU forms x - lse in one step with x's last product, so that the weights of huge logits do not sum to 1.
    softmax = softmax / tl.maximum(tl.sum(softmax, 1), 1e-30)[:, None]
    grad_softmax = tile_w * factor if POST else tile_w
    grad_products = softmax * (grad_softmax - tl.sum(softmax * grad_softmax, 1)[:, None])
    tl.store(grad_points_ptr + at * 2, tile_x, mask=mask)
    tl.store(grad_points_ptr + at * 2 + 1, tile_y, mask=mask)
    tl.store(grad_logits_ptr + at, grad_products if POST else grad_products * factor, mask=mask)
    if GATED:
        tl.store(grad_gate_ptr + at, tile_w * softmax if POST else grad_products * a, mask=mask)


@triton.jit
def _store_reference(
    ptr, row, level, in_tile, height, width, x, y, w, h,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, REFERENCE: tl.constexpr,
):  # fmt: skip
    """Store one head's gradients of the reference points on a level, given the sums over its sampling points."""
    across = width.to(tl.float32)
    down = height.to(tl.float32)
    at = ptr + (row * LEVELS + level) * REFERENCE
    tl.store(at, x * across, mask=in_tile)
    tl.store(at + 1, y * down, mask=in_tile)
    if REFERENCE == 4:
        tl.store(at + 2, w * (across * (0.5 / POINTS)), mask=in_tile)
        tl.store(at + 3, h * (down * (0.5 / POINTS)), mask=in_tile)


@triton.jit
def backward_kernel(
    grad_ptr, lse_ptr, value_ptr, shapes_ptr, starts_ptr, order_ptr, points_ptr, reference_ptr, logits_ptr, gate_ptr,
    grad_value_ptr, grad_points_ptr, grad_reference_ptr, grad_logits_ptr, grad_gate_ptr,
    tokens, queries, heads, gate_b, gate_q, gate_h, gate_l, gate_p: tl.constexpr,
    LEVELS: tl.constexpr, POINTS: tl.constexpr, PADDED: tl.constexpr, D: tl.constexpr, PIECE: tl.constexpr,
    PIECES: tl.constexpr, REFERENCE: tl.constexpr, GATED: tl.constexpr, RESIDUAL: tl.constexpr, POST: tl.constexpr,
    TILED: tl.constexpr, BLOCK_Q: tl.constexpr, PAIRED: tl.constexpr, GRAD_REFERENCE: tl.constexpr,
):  # fmt: skip
    """Compute and store the gradients of values (by atomic additions), points, reference, logits and gate.

    Those of the reference are a head's, (B, Q, H, L, R), and those of the gate a logit's; the caller sums them. PIECES
    is 2 or 4. Without PAIRED a lane has one query at a time, which takes fewer registers.
    """
    COUNT: tl.constexpr = LEVELS * POINTS
    ROWS: tl.constexpr = BLOCK_Q // (1 + PAIRED)
    place = tl.program_id(0) * BLOCK_Q + tl.arange(0, ROWS) * (1 + PAIRED)
    b, h, q, row, in_tile = _place(order_ptr, place, queries, heads, TILED)
    # Names that end in _ belong to the second of each two queries.
    if PAIRED:
        _, _, q_, row_, in_tile_ = _place(order_ptr, place + 1, queries, heads, TILED)
    d = tl.arange(0, PIECE)
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
    lse_ptr += b * queries * heads

    lse = tl.load(lse_ptr + row, mask=in_tile, other=0.0)
    g0, g1, g2, g3 = _grads(grad_ptr, row, in_tile, d, D, PIECES)
    # The loop writes a sample's gradients to the sample's place in a tile.
    col = tl.arange(0, PADDED)
    tile_w = tl.zeros((ROWS, PADDED), tl.float32)
    tile_x = tile_w
    tile_y = tile_w
    if PAIRED:
        lse_ = tl.load(lse_ptr + row_, mask=in_tile_, other=0.0)
        g0_, g1_, g2_, g3_ = _grads(grad_ptr, row_, in_tile_, d, D, PIECES)
        tile_w_ = tile_w
        tile_x_ = tile_w
        tile_y_ = tile_w
    for level in range(LEVELS):
        height, width, start = _level(shapes_ptr, starts_ptr, level)
        scale_x, scale_y, shift_x, shift_y = _scales(
            reference_ptr, q, level, in_tile, height, width, LEVELS, POINTS, REFERENCE
        )
        ref_x = tl.zeros((ROWS,), tl.float32)
        ref_y = ref_x
        ref_w = ref_x
        ref_h = ref_x
        if PAIRED:
            scale_x_, scale_y_, shift_x_, shift_y_ = _scales(
                reference_ptr, q_, level, in_tile_, height, width, LEVELS, POINTS, REFERENCE
            )
            ref_x_ = ref_x
            ref_y_ = ref_x
            ref_w_ = ref_x
            ref_h_ = ref_x
        for point in range(POINTS):
            at = row * COUNT + level * POINTS + point
            gate_at = q * gate_q + level * gate_l + point * gate_p
            w = _weight(logits_ptr, gate_ptr, at, gate_at, in_tile, lse, GATED, RESIDUAL, POST)
            fx, fy, left, top, in_left, in_right, in_top, in_bottom = _corners(
                points_ptr, at * 2, in_tile, height, width, scale_x, scale_y, shift_x, shift_y
            )
            upper = (start + top * width + left) * heads
            lower = upper + width * heads
            s00, s10, s01, s11 = _bilinear(w, fx, fy)
            if PAIRED:
                at_ = row_ * COUNT + level * POINTS + point
                gate_at_ = q_ * gate_q + level * gate_l + point * gate_p
                w_ = _weight(logits_ptr, gate_ptr, at_, gate_at_, in_tile_, lse_, GATED, RESIDUAL, POST)
                fx_, fy_, left_, top_, in_left_, in_right_, in_top_, in_bottom_ = _corners(
                    points_ptr, at_ * 2, in_tile_, height, width, scale_x_, scale_y_, shift_x_, shift_y_
                )
                upper_ = (start + top_ * width + left_) * heads
                lower_ = upper_ + width * heads
                t00, t10, t01, t11 = _bilinear(w_, fx_, fy_)
                # Rows in common: both, or the lower one of the first query and the upper one of the second.
                same = (left == left_) & (top == top_)
                below = (left == left_) & (top + 1 == top_)
                with00 = tl.where(same, t00, 0.0)
                with10 = tl.where(same, t10, 0.0)
                with01 = tl.where(same, t01, tl.where(below, t00, 0.0))
                with11 = tl.where(same, t11, tl.where(below, t10, 0.0))
                own_top = in_top_ & ~(same | below)
                own_bottom = in_bottom_ & ~same
                _scatter2(grad_value_ptr, upper, in_top & in_left, d, s00, g0, g1, g2, g3,
                          with00, g0_, g1_, g2_, g3_, D, PIECES)  # fmt: skip
                _scatter2(grad_value_ptr, upper + heads, in_top & in_right, d, s10, g0, g1, g2, g3,
                          with10, g0_, g1_, g2_, g3_, D, PIECES)  # fmt: skip
                _scatter2(grad_value_ptr, lower, in_bottom & in_left, d, s01, g0, g1, g2, g3,
                          with01, g0_, g1_, g2_, g3_, D, PIECES)  # fmt: skip
                _scatter2(grad_value_ptr, lower + heads, in_bottom & in_right, d, s11, g0, g1, g2, g3,
                          with11, g0_, g1_, g2_, g3_, D, PIECES)  # fmt: skip
                _scatter(grad_value_ptr, upper_, own_top & in_left_, d, t00, g0_, g1_, g2_, g3_, D, PIECES)
                _scatter(grad_value_ptr, upper_ + heads, own_top & in_right_, d, t10, g0_, g1_, g2_, g3_, D, PIECES)
                _scatter(grad_value_ptr, lower_, own_bottom & in_left_, d, t01, g0_, g1_, g2_, g3_, D, PIECES)
                _scatter(grad_value_ptr, lower_ + heads, own_bottom & in_right_, d, t11, g0_, g1_, g2_, g3_, D, PIECES)
            else:
                _scatter(grad_value_ptr, upper, in_top & in_left, d, s00, g0, g1, g2, g3, D, PIECES)
                _scatter(grad_value_ptr, upper + heads, in_top & in_right, d, s10, g0, g1, g2, g3, D, PIECES)
                _scatter(grad_value_ptr, lower, in_bottom & in_left, d, s01, g0, g1, g2, g3, D, PIECES)
                _scatter(grad_value_ptr, lower + heads, in_bottom & in_right, d, s11, g0, g1, g2, g3, D, PIECES)
            grad_w, grad_x, grad_y = _sample_gradients(
                value_ptr, upper, lower, heads, w, fx, fy, in_left, in_right, in_top, in_bottom, d,
                g0, g1, g2, g3, D, PIECES,
            )  # fmt: skip
            if PAIRED:
                grad_w_, grad_x_, grad_y_ = _sample_gradients(
                    value_ptr, upper_, lower_, heads, w_, fx_, fy_, in_left_, in_right_, in_top_, in_bottom_, d,
                    g0_, g1_, g2_, g3_, D, PIECES,
                )  # fmt: skip
            here = (col == level * POINTS + point)[None, :]
            tile_w = tl.where(here, grad_w[:, None], tile_w)
            tile_x = tl.where(here, (grad_x * scale_x)[:, None], tile_x)
            tile_y = tl.where(here, (grad_y * scale_y)[:, None], tile_y)
            if PAIRED:
                tile_w_ = tl.where(here, grad_w_[:, None], tile_w_)
                tile_x_ = tl.where(here, (grad_x_ * scale_x_)[:, None], tile_x_)
                tile_y_ = tl.where(here, (grad_y_ * scale_y_)[:, None], tile_y_)
            if GRAD_REFERENCE:
                ref_x += grad_x
                ref_y += grad_y
                if REFERENCE == 4:
                    ref_w += grad_x * tl.load(points_ptr + at * 2, mask=in_tile, other=0.0).to(tl.float32)
                    ref_h += grad_y * tl.load(points_ptr + at * 2 + 1, mask=in_tile, other=0.0).to(tl.float32)
                if PAIRED:
                    ref_x_ += grad_x_
                    ref_y_ += grad_y_
                    if REFERENCE == 4:
                        ref_w_ += grad_x_ * tl.load(points_ptr + at_ * 2, mask=in_tile_, other=0.0).to(tl.float32)
                        ref_h_ += grad_y_ * tl.load(points_ptr + at_ * 2 + 1, mask=in_tile_, other=0.0).to(tl.float32)
        if GRAD_REFERENCE:
            _store_reference(grad_reference_ptr, row, level, in_tile, height, width, ref_x, ref_y, ref_w, ref_h,
                             LEVELS, POINTS, REFERENCE)  # fmt: skip
            if PAIRED:
                _store_reference(grad_reference_ptr, row_, level, in_tile_, height, width, ref_x_, ref_y_, ref_w_,
                                 ref_h_, LEVELS, POINTS, REFERENCE)  # fmt: skip

    _store_gradients(
        tile_w, tile_x, tile_y, lse, logits_ptr, gate_ptr, grad_points_ptr, grad_logits_ptr, grad_gate_ptr,
        row, q, in_tile, gate_q, gate_l, gate_p, COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
    )  # fmt: skip
    if PAIRED:
        _store_gradients(
            tile_w_, tile_x_, tile_y_, lse_, logits_ptr, gate_ptr, grad_points_ptr, grad_logits_ptr, grad_gate_ptr,
            row_, q_, in_tile_, gate_q, gate_l, gate_p, COUNT, POINTS, PADDED, GATED, RESIDUAL, POST,
        )  # fmt: skip

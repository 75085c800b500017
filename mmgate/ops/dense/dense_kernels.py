# mypy: disable-error-code=no-untyped-def
"""Triton kernels of PLuG attention, forward and backward, with no N x M map in memory.

    S = Q K^T / sqrt(d),  R = Qg Kg^T / sqrt(g),  u = (a R + b)(c R + e) = (a c R + a e + b c) R + b e,  t = tanh u
    f = 1 + t,  L = S f + bias,  P = softmax(L),  O = P V

    dL = P (dO V^T - delta),  delta = rowsum(dO O),  dS = f dL
    du = (1 - t^2) (sum of dL S over the heads of the gate),  dR = du (2 a c R + a e + b c)

Layout: q (B, H, N, D), k, v (B, H, M, D), gq (B, G, N, E), gk (B, G, M, E) with G = H or 1, all contiguous; bias with
strides over (B, H, N, M), 0 where it broadcasts; output (B, H, N, D); lse (B, H, 2, N), the softmax's largest exponent
and log2 of its sum: added up, the sum would be lost in a row whose bias is -10^9 throughout.

A program computes a block of rows (of columns in the last kernel) of one head or, with PAIR, of two neighbouring heads
that share their gate and bias; names that end in 2 belong to the second head. Each program stores its share of the
gradients of a shared gate, and the shares are added outside. ../KERNELS.md says why.

Q K^T and Qg Kg^T are not scaled. The scales, and log2(e) for exponentials to base 2, are part of the numbers that
multiply the products anyway. FAST_TANH takes the GPU's own tanh, which is accurate to 2^-11; without it tanh is
2 sigmoid(2 u) - 1. INTERPRETED is for Triton's interpreter, which has no products of bfloat16.
"""

import triton
import triton.language as tl

# The largest number of float32.
LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _rows(base, index, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load the rows with these indices from a (count, WIDTH) matrix, with zeros for rows and columns outside."""
    column = tl.arange(0, BLOCK)
    mask = (index < count)[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + index[:, None].to(tl.int64) * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, index, count, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Store x into the rows with these indices of a (count, WIDTH) matrix."""
    column = tl.arange(0, BLOCK)
    mask = (index < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(base + index[:, None].to(tl.int64) * WIDTH + column[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _dot(x, y, total, INTERPRETED: tl.constexpr):
    """Return the matrix ``total`` plus the product x y, with x converted to the dtype of y."""
    x = x.to(y.dtype)
    if INTERPRETED:
        x = x.to(tl.float32)
        y = y.to(tl.float32)
    return tl.dot(x, y, total, input_precision='tf32x3')


@triton.jit
def _tanh(u, FAST_TANH: tl.constexpr):
    """Return tanh of u, by the GPU's approximate instruction if FAST_TANH."""
    if FAST_TANH:
        return tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [u], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 * tl.sigmoid(2.0 * u) - 1.0


@triton.jit
def _place(blocks, heads, gate_heads, PAIR: tl.constexpr):
    """Return which block, image and head a program computes, and the indices of its head and its gate in memory.

    The grid has one axis, because only the first axis may be long: in windowed attention every window is an image.
    """
    groups = heads // 2 if PAIR else heads
    block = tl.program_id(0) % blocks
    group = (tl.program_id(0) // blocks).to(tl.int64)
    image = group // groups
    head = group % groups * (2 if PAIR else 1)
    # If the heads share their gate, gate_heads is 1 and the remainder 0.
    return block, image, head, image * heads + head, image * gate_heads + head % gate_heads


@triton.jit
def _scalars(scalars_ptr):
    """Load the gate's four scalars a, b, c and e."""
    return tl.load(scalars_ptr), tl.load(scalars_ptr + 1), tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)


@triton.jit
def _gate(gx, gy, a, b, c, e, gate_scale, FAST_TANH: tl.constexpr, INTERPRETED: tl.constexpr):
    """Compute a block of raw gates R = Qg Kg^T and of gates t = tanh u; both transposed if gx holds Kg."""
    r = _dot(gx, tl.trans(gy), tl.zeros((gx.shape[0], gy.shape[0]), tl.float32), INTERPRETED)
    u = ((a * c * gate_scale * gate_scale) * r + (a * e + b * c) * gate_scale) * r + b * e
    return r, _tanh(u, FAST_TANH)


@triton.jit
def _added(bias_ptr, n, m, rows, columns, bias_n, bias_m, BIASED: tl.constexpr, EVEN: tl.constexpr):
    """Load the bias of a block times log2(e), with -inf in columns beyond the last unless EVEN.

    The indices n and m have the shapes (N, 1) and (1, M), or (1, N) and (M, 1). If all rows share the bias, the rows'
    axis of the result is 1.
    """
    inside = m < columns
    if not BIASED:
        return tl.where(inside, 0.0, float('-inf'))
    at = m.to(tl.int64) * bias_m
    # The rows do not share the bias.
    if BIASED == 2:
        at += n.to(tl.int64) * bias_n
        inside = inside & (n < rows)
    bias = tl.load(bias_ptr + at, mask=inside, other=0.0 if EVEN else float('-inf')).to(tl.float32)
    # A finite bias stays finite. A row with the least number throughout then weighs its keys evenly; one with -inf
    # throughout would be NaN.
    scaled = tl.minimum(tl.maximum(bias * 1.4426950408889634, -LARGEST), LARGEST)
    return tl.where(bias == float('-inf'), bias, scaled)


@triton.jit
def _logits(x, y, factor, added, ADDED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Compute a block of Q K^T and of gated logits times log2(e); both transposed if x holds K and y holds Q.

    ``factor`` is f times the scale. ``added`` is added in the same instruction.

    Rows outside need no mask. The forward pass stores nothing of them. In the backward pass their log-sum-exp is inf,
    so that their weights are 0 with any bias. In the kernel over columns these need no mask either, because no column
    depends on another.
    """
    s = _dot(x, tl.trans(y), tl.zeros((x.shape[0], y.shape[0]), tl.float32), INTERPRETED)
    return s, s * factor + added if ADDED else s * factor


@triton.jit
def _attend(
    q, factor, added, top, total, out, k_ptr, v_ptr, m, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BIASED: tl.constexpr, ADDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Attend to one more block of keys: return the updated running maximum, softmax sum and output of a head."""
    k = _rows(k_ptr, m, columns, D, BLOCK_D)
    v = _rows(v_ptr, m, columns, D, BLOCK_D)
    _, logits = _logits(q, k, factor, added, ADDED, INTERPRETED)
    new_top = tl.maximum(top, tl.max(logits, 1))
    # The maximum is -inf while all keys were masked, which only a bias does.
    shift = tl.where(new_top == float('-inf'), 0.0, new_top) if BIASED else new_top
    p = tl.exp2(logits - shift[:, None])
    fade = tl.exp2(top - shift)
    return new_top, total * fade + tl.sum(p, 1), _dot(p, v, out * fade[:, None], INTERPRETED)


@triton.jit
def _finish(out_ptr, lse_ptr, n, rows, top, total, out, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """Divide the output of a block of queries by its softmax sum, and store it with the log-sum-exp."""
    total = tl.where(n < rows, total, 1.0)
    _store(out_ptr, n, rows, out / total[:, None], D, BLOCK_D)
    tl.store(lse_ptr + n, top, mask=n < rows)
    tl.store(lse_ptr + rows + n, tl.log2(total), mask=n < rows)


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, out_ptr, lse_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST_TANH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Forward kernel: compute and store output and log-sum-exp (base 2, in two parts) for BLOCK_N queries."""
    ADDED: tl.constexpr = BIASED or not EVEN
    block, image, head, first, gate = _place(tl.cdiv(rows, BLOCK_N), heads, gate_heads, PAIR)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    a, b, c, e = _scalars(scalars_ptr)
    to_base_2 = scale * 1.4426950408889634
    gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
    k_ptr += first * columns * D
    v_ptr += first * columns * D
    bias = bias_ptr + image * bias_b + head * bias_h
    q = _rows(q_ptr + first * rows * D, n, rows, D, BLOCK_D)
    top = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    out = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if PAIR:
        q2 = _rows(q_ptr + (first + 1) * rows * D, n, rows, D, BLOCK_D)
        top2 = top
        total2 = total
        out2 = out
    for start in range(0, columns, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
        _, t = _gate(gq, gk, a, b, c, e, gate_scale, FAST_TANH, INTERPRETED)
        factor = t * to_base_2 + to_base_2
        added = 0.0
        if ADDED:
            added = _added(bias, n[:, None], m[None, :], rows, columns, bias_n, bias_m, BIASED, EVEN)
        top, total, out = _attend(
            q, factor, added, top, total, out, k_ptr, v_ptr, m, columns, D, BLOCK_D, BIASED, ADDED, INTERPRETED
        )
        if PAIR:
            top2, total2, out2 = _attend(
                q2, factor, added, top2, total2, out2, k_ptr + columns * D, v_ptr + columns * D, m, columns,
                D, BLOCK_D, BIASED, ADDED, INTERPRETED,
            )  # fmt: skip
    _finish(out_ptr + first * rows * D, lse_ptr + first * rows * 2, n, rows, top, total, out, D, BLOCK_D)
    if PAIR:
        second = (first + 1) * rows
        _finish(out_ptr + second * D, lse_ptr + second * 2, n, rows, top2, total2, out2, D, BLOCK_D)


@triton.jit
def _gradients(x, y, grad, v, top, total, delta, t, factor, added, ADDED: tl.constexpr, INTERPRETED: tl.constexpr):
    """Return a block's attention weights P, the gradient of S, and that of the gate's factor, both before scaling.

    With L the gated logits they are P, ``dS / scale`` and ``dL S / scale``. They are transposed if x holds K, y Q, grad
    V and v dO.
    """
    s, logits = _logits(x, y, factor, added, ADDED, INTERPRETED)
    p = tl.exp2(logits - top - total)
    grad_p = _dot(grad, tl.trans(v), tl.zeros(s.shape, tl.float32), INTERPRETED)
    grad_logits = p * (grad_p - delta)
    return p, grad_logits * t + grad_logits, grad_logits * s


@triton.jit
def _of_row(
    q_ptr, grad_ptr, lse_ptr, delta_ptr, n, rows, D: tl.constexpr, BLOCK_D: tl.constexpr, BIASED: tl.constexpr
):  # fmt: skip
    """Load for a block of queries q, dO, both parts of the log-sum-exp, and delta."""
    q = _rows(q_ptr, n, rows, D, BLOCK_D)
    grad = _rows(grad_ptr, n, rows, D, BLOCK_D)
    top = tl.load(lse_ptr + n, mask=n < rows, other=float('inf'))
    total = tl.load(lse_ptr + rows + n, mask=n < rows, other=0.0)
    # Without a bias the two parts are added, which saves an instruction for every element.
    if not BIASED:
        top = top + total
        total = tl.zeros(total.shape, tl.float32)
    return q, grad, top, total, tl.load(delta_ptr + n, mask=n < rows, other=0.0)


@triton.jit
def _by_columns(
    q, grad, top, total, delta, t, factor, added, grad_q, k_ptr, v_ptr, m, columns,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ADDED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the share of one block of keys to the gradient of Q; return it and the gradient of the gate's factor.

    The latter is ``dL S / scale``, for this block.
    """
    k = _rows(k_ptr, m, columns, D, BLOCK_D)
    v = _rows(v_ptr, m, columns, D, BLOCK_D)
    _, grad_s, grad_f = _gradients(
        q, k, grad, v, top[:, None], total[:, None], delta[:, None], t, factor, added, ADDED, INTERPRETED
    )
    return _dot(grad_s, k, grad_q, INTERPRETED), grad_f


@triton.jit
def rows_backward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_q_ptr, grad_gq_ptr, grad_scalars_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST_TANH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Backward kernel over queries: store dQ of BLOCK_N rows, and shares of the gradients of Qg and the scalars."""
    ADDED: tl.constexpr = BIASED or not EVEN
    block, image, head, first, gate = _place(tl.cdiv(rows, BLOCK_N), heads, gate_heads, PAIR)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    a, b, c, e = _scalars(scalars_ptr)
    to_base_2 = scale * 1.4426950408889634
    gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
    k_ptr += first * columns * D
    v_ptr += first * columns * D
    bias = bias_ptr + image * bias_b + head * bias_h
    at = first * rows
    q, grad, top, total, delta = _of_row(
        q_ptr + at * D, grad_ptr + at * D, lse_ptr + at * 2, delta_ptr + at, n, rows, D, BLOCK_D, BIASED
    )
    grad_q = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    if PAIR:
        at += rows
        q2, grad2, top2, total2, delta2 = _of_row(
            q_ptr + at * D, grad_ptr + at * D, lse_ptr + at * 2, delta_ptr + at, n, rows, D, BLOCK_D, BIASED
        )
        grad_q2 = grad_q
    grad_gq = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    # Sums of du, du R and du R^2, from which the scalars' gradients are computed.
    sum0 = tl.zeros((BLOCK_N,), tl.float32)
    sum1 = tl.zeros((BLOCK_N,), tl.float32)
    sum2 = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, columns, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
        r, t = _gate(gq, gk, a, b, c, e, gate_scale, FAST_TANH, INTERPRETED)
        factor = t * to_base_2 + to_base_2
        added = 0.0
        if ADDED:
            added = _added(bias, n[:, None], m[None, :], rows, columns, bias_n, bias_m, BIASED, EVEN)
        grad_q, grad_f = _by_columns(
            q, grad, top, total, delta, t, factor, added, grad_q, k_ptr, v_ptr, m, columns,
            D, BLOCK_D, ADDED, INTERPRETED,
        )  # fmt: skip
        if PAIR:
            grad_q2, grad_f2 = _by_columns(
                q2, grad2, top2, total2, delta2, t, factor, added, grad_q2, k_ptr + columns * D,
                v_ptr + columns * D, m, columns, D, BLOCK_D, ADDED, INTERPRETED,
            )  # fmt: skip
            grad_f += grad_f2
        grad_u = grad_f * (1.0 - t * t)
        grad_r = grad_u * ((2.0 * scale * gate_scale * a * c) * r + scale * (a * e + b * c))
        grad_gq = _dot(grad_r, gk, grad_gq, INTERPRETED)
        sum0 += tl.sum(grad_u, 1)
        sum1 += tl.sum(grad_u * r, 1)
        sum2 += tl.sum(grad_u * r * r, 1)
    _store(grad_q_ptr + first * rows * D, n, rows, grad_q * scale, D, BLOCK_D)
    if PAIR:
        _store(grad_q_ptr + (first + 1) * rows * D, n, rows, grad_q2 * scale, D, BLOCK_D)
    share = (first // 2 if PAIR else first) * rows * E
    _store(grad_gq_ptr + share, n, rows, grad_gq * gate_scale, E, BLOCK_E)
    zeroth = tl.sum(sum0) * scale
    linear = tl.sum(sum1) * (scale * gate_scale)
    square = tl.sum(sum2) * (scale * gate_scale * gate_scale)
    grad_scalars_ptr += tl.program_id(0) * 4
    tl.store(grad_scalars_ptr, c * square + e * linear)
    tl.store(grad_scalars_ptr + 1, c * linear + e * zeroth)
    tl.store(grad_scalars_ptr + 2, a * square + b * linear)
    tl.store(grad_scalars_ptr + 3, a * linear + b * zeroth)


@triton.jit
def _by_rows(
    k, v, t, factor, added, grad_k, grad_v, q_ptr, grad_ptr, lse_ptr, delta_ptr, n, rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BIASED: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Add the share of one block of queries to the gradients of K and V; return both, and that of the gate's factor.

    The latter is the transpose of ``dL S / scale``, for this block.
    """
    q, grad, top, total, delta = _of_row(q_ptr, grad_ptr, lse_ptr, delta_ptr, n, rows, D, BLOCK_D, BIASED)
    p, grad_s, grad_f = _gradients(
        k, q, v, grad, top[None, :], total[None, :], delta[None, :], t, factor, added, BIASED, INTERPRETED
    )
    return _dot(grad_s, q, grad_k, INTERPRETED), _dot(p, grad, grad_v, INTERPRETED), grad_f


@triton.jit
def columns_backward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_k_ptr, grad_v_ptr, grad_gk_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, PAIR: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
    FAST_TANH: tl.constexpr, INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Backward kernel over keys: store dK and dV of BLOCK_M columns, and a share of the gradient of Kg."""
    block, image, head, first, gate = _place(tl.cdiv(columns, BLOCK_M), heads, gate_heads, PAIR)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    a, b, c, e = _scalars(scalars_ptr)
    to_base_2 = scale * 1.4426950408889634
    gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
    q_ptr += first * rows * D
    grad_ptr += first * rows * D
    lse_ptr += first * rows * 2
    delta_ptr += first * rows
    bias = bias_ptr + image * bias_b + head * bias_h
    at = first * columns * D
    k = _rows(k_ptr + at, m, columns, D, BLOCK_D)
    v = _rows(v_ptr + at, m, columns, D, BLOCK_D)
    grad_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    if PAIR:
        at2 = at + columns * D
        k2 = _rows(k_ptr + at2, m, columns, D, BLOCK_D)
        v2 = _rows(v_ptr + at2, m, columns, D, BLOCK_D)
        grad_k2 = grad_k
        grad_v2 = grad_v
    grad_gk = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    of_columns = 0.0
    if BIASED == 1:
        of_columns = _added(bias, 0, m[:, None], rows, columns, bias_n, bias_m, BIASED, EVEN)
    for start in range(0, rows, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
        r, t = _gate(gk, gq, a, b, c, e, gate_scale, FAST_TANH, INTERPRETED)
        factor = t * to_base_2 + to_base_2
        added = of_columns
        if BIASED == 2:
            added = _added(bias, n[None, :], m[:, None], rows, columns, bias_n, bias_m, BIASED, EVEN)
        grad_k, grad_v, grad_f = _by_rows(
            k, v, t, factor, added, grad_k, grad_v, q_ptr, grad_ptr, lse_ptr, delta_ptr, n, rows,
            D, BLOCK_D, BIASED, INTERPRETED,
        )  # fmt: skip
        if PAIR:
            grad_k2, grad_v2, grad_f2 = _by_rows(
                k2, v2, t, factor, added, grad_k2, grad_v2, q_ptr + rows * D, grad_ptr + rows * D, lse_ptr + rows * 2,
                delta_ptr + rows, n, rows, D, BLOCK_D, BIASED, INTERPRETED,
            )  # fmt: skip
            grad_f += grad_f2
        grad_r = grad_f * (1.0 - t * t) * ((2.0 * scale * gate_scale * a * c) * r + scale * (a * e + b * c))
        grad_gk = _dot(grad_r, gq, grad_gk, INTERPRETED)
    _store(grad_k_ptr + at, m, columns, grad_k * scale, D, BLOCK_D)
    _store(grad_v_ptr + at, m, columns, grad_v, D, BLOCK_D)
    if PAIR:
        _store(grad_k_ptr + at2, m, columns, grad_k2 * scale, D, BLOCK_D)
        _store(grad_v_ptr + at2, m, columns, grad_v2, D, BLOCK_D)
    share = (first // 2 if PAIR else first) * columns * E
    _store(grad_gk_ptr + share, m, columns, grad_gk * gate_scale, E, BLOCK_E)

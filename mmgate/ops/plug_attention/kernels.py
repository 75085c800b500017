# mypy: disable-error-code=no-untyped-def
"""Triton kernels of PLuG attention with no N x M map in memory.

    S = Q K^T / sqrt(d),  R = Qg Kg^T / sqrt(g),  u = (a R + b)(c R + e),  t = tanh u,  f = 1 + t
    L = S f + bias,  P = softmax(L),  O = P V

    dL = P (dO V^T - delta),  delta = rowsum(dO O),  dS = f dL,  du = dL S (1 - t^2),  dR = du (2 a c R + a e + b c)

Layout: q (B, H, N, D), k, v (B, H, M, D), gq (B, G, N, E), gk (B, G, M, E) with G = H or 1, all contiguous; bias with
strides over (B, H, N, M), 0 where it broadcasts; output (B, H, N, D), lse (B, H, N).

R is formed anew for every head, also where heads share it: O(N) memory for one more product of width E. What a shared
gate collects over the heads is written per head and summed outside, so nothing is added by atomics and every
gradient is deterministic.

The blocks keep the products as they come, K and Kg unscaled: scales, and log2(e) for exponentials to base 2, sit in
the numbers that multiply them anyway. FAST_TANH takes the GPU's own tanh, good to 2^-11, else it is
2 sigmoid(2 u) - 1. INTERPRETED is for Triton's interpreter, which has no products of bfloat16.
"""

import triton
import triton.language as tl


@triton.jit
def _rows(base, index, count, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Load rows ``index`` of a (count, WIDTH) matrix, zeros outside."""
    column = tl.arange(0, BLOCK)
    mask = (index < count)[:, None] & (column < WIDTH)[None, :]
    return tl.load(base + index[:, None].to(tl.int64) * WIDTH + column[None, :], mask=mask, other=0.0)


@triton.jit
def _store(base, index, count, x, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    column = tl.arange(0, BLOCK)
    mask = (index < count)[:, None] & (column < WIDTH)[None, :]
    tl.store(base + index[:, None].to(tl.int64) * WIDTH + column[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _dot(x, y, total, INTERPRETED: tl.constexpr):
    """Return total + x y, y being of the type whose precision counts."""
    x = x.to(y.dtype)
    if INTERPRETED:
        x, y = x.to(tl.float32), y.to(tl.float32)
    return tl.dot(x, y, total, input_precision='tf32x3')


@triton.jit
def _tanh(u, FAST_TANH: tl.constexpr):
    if FAST_TANH:
        return tl.inline_asm_elementwise('tanh.approx.f32 $0, $1;', '=f,f', [u], dtype=tl.float32, is_pure=True, pack=1)
    else:
        return 2.0 * tl.sigmoid(2.0 * u) - 1.0


@triton.jit
def _logits(
    x, y, gx, gy, bias_ptr, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale,
    BIASED: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, FAST_TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return Q K^T, Qg Kg^T, t and the logits times log2(e) of a block; -inf in columns outside, unless EVEN.

    x is of Q and y of K, or the other way round if TRANSPOSED, which every map then is.
    """
    zero = tl.zeros((x.shape[0], y.shape[0]), tl.float32)
    s = _dot(x, tl.trans(y), zero, INTERPRETED)
    r = _dot(gx, tl.trans(gy), zero, INTERPRETED)
    t = _tanh(((a * gate_scale) * r + b) * ((c * gate_scale) * r + e), FAST_TANH)
    to_base_2 = scale * 1.4426950408889634
    logits = s * (t * to_base_2 + to_base_2)
    n, m = (n[None, :], m[:, None]) if TRANSPOSED else (n[:, None], m[None, :])
    if BIASED:
        at = m.to(tl.int64) * bias_m
        inside = m < columns
        if BIASED == 2:  # not one for all rows
            at += n.to(tl.int64) * bias_n
            inside = inside & (n < rows)
        logits += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32) * 1.4426950408889634
    # A row outside needs no mask: forward nothing of it is stored, backward its log-sum-exp is inf, so that its
    # weights are 0 whatever the bias. Nor does a column in the pass over columns, where nothing of one reaches another.
    return s, r, t, logits if EVEN else tl.where(m < columns, logits, float('-inf'))


@triton.jit
def _place(blocks, heads, gate_heads):
    """Return a program's block, its (image, head) in one number and in two, and the index of its gate.

    The grid has one axis, the only one that may be long: windows are many images.
    """
    block, pid = tl.program_id(0) % blocks, (tl.program_id(0) // blocks).to(tl.int64)
    image, head = pid // heads, pid % heads
    return block, pid, image, head, image * gate_heads + head % gate_heads  # gate 0 where the heads share it


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, out_ptr, lse_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, FAST_TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp, to base 2, of BLOCK_N rows of one head."""
    block, pid, image, head, gate = _place(tl.cdiv(rows, BLOCK_N), heads, gate_heads)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    a, b = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    c, e = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    q = _rows(q_ptr + pid * rows * D, n, rows, D, BLOCK_D)
    gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
    bias = bias_ptr + image * bias_b + head * bias_h
    top = tl.full((BLOCK_N,), float('-inf'), tl.float32)
    total = tl.zeros((BLOCK_N,), tl.float32)
    out = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    for start in range(0, columns, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        k = _rows(k_ptr + pid * columns * D, m, columns, D, BLOCK_D)
        v = _rows(v_ptr + pid * columns * D, m, columns, D, BLOCK_D)
        gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
        _, _, _, logits = _logits(
            q, k, gq, gk, bias, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale,
            BIASED, EVEN, False, FAST_TANH, INTERPRETED,
        )  # fmt: skip
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float('-inf'), 0.0, new_top)  # nothing seen yet but masked keys
        p = tl.exp2(logits - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(p, 1)
        out = _dot(p, v, out * fade[:, None], INTERPRETED)
        top = new_top
    total = tl.where(n < rows, total, 1.0)
    _store(out_ptr + pid * rows * D, n, rows, out / total[:, None], D, BLOCK_D)
    tl.store(lse_ptr + pid * rows + n, top + tl.log2(total), mask=n < rows)


@triton.jit
def _gradients(
    x, y, gx, gy, grad, v, lse, delta, bias_ptr, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale,
    BIASED: tl.constexpr, EVEN: tl.constexpr, TRANSPOSED: tl.constexpr, FAST_TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Return P, dS, dR, du / scale and Qg Kg^T of a block; grad and v change places if TRANSPOSED."""
    s, r, t, logits = _logits(
        x, y, gx, gy, bias_ptr, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale,
        BIASED, EVEN, TRANSPOSED, FAST_TANH, INTERPRETED,
    )  # fmt: skip
    p = tl.exp2(logits - lse)
    grad_p = _dot(grad, tl.trans(v), tl.zeros(s.shape, tl.float32), INTERPRETED)
    grad_logits = p * (grad_p - delta)
    grad_u = grad_logits * s * (1.0 - t * t)
    grad_r = grad_u * ((2.0 * scale * gate_scale * a * c) * r + scale * (a * e + b * c))
    return p, grad_logits * t + grad_logits, grad_r, grad_u, r


@triton.jit
def rows_backward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_q_ptr, grad_gq_ptr, grad_scalars_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, FAST_TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store dQ, dQg of this head and the scalars' share for BLOCK_N rows."""
    block, pid, image, head, gate = _place(tl.cdiv(rows, BLOCK_N), heads, gate_heads)
    n = block * BLOCK_N + tl.arange(0, BLOCK_N)
    a, b = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    c, e = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    q = _rows(q_ptr + pid * rows * D, n, rows, D, BLOCK_D)
    grad = _rows(grad_ptr + pid * rows * D, n, rows, D, BLOCK_D)
    gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
    lse = tl.load(lse_ptr + pid * rows + n, mask=n < rows, other=float('inf'))
    delta = tl.load(delta_ptr + pid * rows + n, mask=n < rows, other=0.0)
    bias = bias_ptr + image * bias_b + head * bias_h
    grad_q = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_gq = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    # sums of du, du R and du R^2, of which the scalars' gradients are made
    zeroth = tl.zeros((BLOCK_N,), tl.float32)
    first = tl.zeros((BLOCK_N,), tl.float32)
    second = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, columns, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        k = _rows(k_ptr + pid * columns * D, m, columns, D, BLOCK_D)
        v = _rows(v_ptr + pid * columns * D, m, columns, D, BLOCK_D)
        gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
        _, grad_s, grad_r, grad_u, r = _gradients(
            q, k, gq, gk, grad, v, lse[:, None], delta[:, None], bias, n, m, rows, columns, bias_n, bias_m,
            a, b, c, e, scale, gate_scale, BIASED, EVEN, False, FAST_TANH, INTERPRETED,
        )  # fmt: skip
        grad_q = _dot(grad_s, k, grad_q, INTERPRETED)
        grad_gq = _dot(grad_r, gk, grad_gq, INTERPRETED)
        zeroth += tl.sum(grad_u, 1)
        first += tl.sum(grad_u * r, 1)
        second += tl.sum(grad_u * r * r, 1)
    _store(grad_q_ptr + pid * rows * D, n, rows, grad_q * scale, D, BLOCK_D)
    _store(grad_gq_ptr + pid * rows * E, n, rows, grad_gq * gate_scale, E, BLOCK_E)
    sum0 = tl.sum(zeroth) * scale
    sum1 = tl.sum(first) * (scale * gate_scale)
    sum2 = tl.sum(second) * (scale * gate_scale * gate_scale)
    share = grad_scalars_ptr + tl.program_id(0) * 4
    tl.store(share, c * sum2 + e * sum1)
    tl.store(share + 1, c * sum1 + e * sum0)
    tl.store(share + 2, a * sum2 + b * sum1)
    tl.store(share + 3, a * sum1 + b * sum0)


@triton.jit
def columns_backward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_k_ptr, grad_v_ptr, grad_gk_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    EVEN: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, FAST_TANH: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Store dK, dV and dKg of this head for BLOCK_M columns."""
    block, pid, image, head, gate = _place(tl.cdiv(columns, BLOCK_M), heads, gate_heads)
    m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    a, b = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    c, e = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    k = _rows(k_ptr + pid * columns * D, m, columns, D, BLOCK_D)
    v = _rows(v_ptr + pid * columns * D, m, columns, D, BLOCK_D)
    gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
    bias = bias_ptr + image * bias_b + head * bias_h
    grad_k = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    grad_v = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    grad_gk = tl.zeros((BLOCK_M, BLOCK_E), tl.float32)
    for start in range(0, rows, BLOCK_N):
        n = start + tl.arange(0, BLOCK_N)
        q = _rows(q_ptr + pid * rows * D, n, rows, D, BLOCK_D)
        grad = _rows(grad_ptr + pid * rows * D, n, rows, D, BLOCK_D)
        gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
        lse = tl.load(lse_ptr + pid * rows + n, mask=n < rows, other=float('inf'))
        delta = tl.load(delta_ptr + pid * rows + n, mask=n < rows, other=0.0)
        p, grad_s, grad_r, _, _ = _gradients(
            k, q, gk, gq, v, grad, lse[None, :], delta[None, :], bias, n, m, rows, columns, bias_n, bias_m,
            a, b, c, e, scale, gate_scale, BIASED, EVEN, True, FAST_TANH, INTERPRETED,
        )  # fmt: skip
        grad_v = _dot(p, grad, grad_v, INTERPRETED)
        grad_k = _dot(grad_s, q, grad_k, INTERPRETED)
        grad_gk = _dot(grad_r, gq, grad_gk, INTERPRETED)
    _store(grad_k_ptr + pid * columns * D, m, columns, grad_k * scale, D, BLOCK_D)
    _store(grad_v_ptr + pid * columns * D, m, columns, grad_v, D, BLOCK_D)
    _store(grad_gk_ptr + pid * columns * E, m, columns, grad_gk * gate_scale, E, BLOCK_E)

# mypy: disable-error-code=no-untyped-def
"""Triton kernels of PLuG attention with no N x M map in memory.

    S = Q K^T / sqrt(d),  R = Qg Kg^T / sqrt(g),  u = (a R + b)(c R + e),  t = tanh u,  f = 1 + t
    L = S f + bias,  P = softmax(L),  O = P V

    dL = P (dO V^T - delta),  delta = rowsum(dO O),  dS = f dL,  du = dL S (1 - t^2),  dR = du (2 a c R + a e + b c)

Layout: q (B, H, N, D), k, v (B, H, M, D), gq (B, G, N, E), gk (B, G, M, E) with G = H or 1, all contiguous; bias with
strides over (B, H, N, M), 0 where it broadcasts; output (B, H, N, D), lse (B, H, N).

R is formed anew for every head, also where heads share it: O(N) memory for one more product of width E. What a shared
gate collects over the heads is written per head and summed outside, so nothing is added by atomics and every
gradient is deterministic. tanh is 2 sigmoid(2 u) - 1, because Triton's interpreter has no tanh.
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
def _logits(
    q, k, gq, gk, bias_ptr, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Return S, R, the factors' values, t and the logits of a block; -inf outside the map."""
    s = tl.dot(q, tl.trans(k), input_precision='tf32x3') * scale
    r = tl.dot(gq, tl.trans(gk), input_precision='tf32x3') * gate_scale
    first, second = a * r + b, c * r + e
    t = 2.0 * tl.sigmoid(2.0 * first * second) - 1.0
    logits = s * (1.0 + t)
    inside = (n < rows)[:, None] & (m < columns)[None, :]
    if BIASED:
        at = n[:, None].to(tl.int64) * bias_n + m[None, :].to(tl.int64) * bias_m
        logits += tl.load(bias_ptr + at, mask=inside, other=0.0).to(tl.float32)
    return s, r, first, second, t, tl.where(inside, logits, float('-inf'))


@triton.jit
def _head(pid, heads, gate_heads):
    """Return image and head of a program, and the index of its gate."""
    image, head = pid // heads, pid % heads
    return image, head, image * gate_heads + head % gate_heads  # 0 where the heads share it


@triton.jit
def forward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, out_ptr, lse_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store output and log-sum-exp of BLOCK_N rows of one head."""
    pid = tl.program_id(1).to(tl.int64)
    image, head, gate = _head(pid, heads, gate_heads)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
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
        _, _, _, _, _, logits = _logits(
            q, k, gq, gk, bias, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale, BIASED
        )
        new_top = tl.maximum(top, tl.max(logits, 1))
        shift = tl.where(new_top == float('-inf'), 0.0, new_top)  # nothing seen yet but masked keys
        p = tl.exp(logits - shift[:, None])
        fade = tl.exp(top - shift)
        total = total * fade + tl.sum(p, 1)
        out = out * fade[:, None] + tl.dot(p.to(v.dtype), v, input_precision='tf32x3')
        top = new_top
    total = tl.where(n < rows, total, 1.0)
    _store(out_ptr + pid * rows * D, n, rows, out / total[:, None], D, BLOCK_D)
    tl.store(lse_ptr + pid * rows + n, top + tl.log(total), mask=n < rows)


@triton.jit
def _gradients(
    q, k, v, gq, gk, grad, lse, delta, bias_ptr, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale,
    BIASED: tl.constexpr,
):  # fmt: skip
    """Return P, dS, dR, du, R and both factors of a block."""
    s, r, first, second, t, logits = _logits(
        q, k, gq, gk, bias_ptr, n, m, rows, columns, bias_n, bias_m, a, b, c, e, scale, gate_scale, BIASED
    )
    p = tl.exp(logits - lse[:, None])
    grad_logits = p * (tl.dot(grad, tl.trans(v), input_precision='tf32x3') - delta[:, None])
    grad_u = grad_logits * s * (1.0 - t * t)
    return p, grad_logits * (1.0 + t), grad_u * (a * second + c * first), grad_u, r, first, second


@triton.jit
def rows_backward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_q_ptr, grad_gq_ptr, grad_scalars_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store dQ, dQg of this head and the scalars' share for BLOCK_N rows."""
    pid = tl.program_id(1).to(tl.int64)
    image, head, gate = _head(pid, heads, gate_heads)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a, b = tl.load(scalars_ptr), tl.load(scalars_ptr + 1)
    c, e = tl.load(scalars_ptr + 2), tl.load(scalars_ptr + 3)
    q = _rows(q_ptr + pid * rows * D, n, rows, D, BLOCK_D)
    grad = _rows(grad_ptr + pid * rows * D, n, rows, D, BLOCK_D)
    gq = _rows(gq_ptr + gate * rows * E, n, rows, E, BLOCK_E)
    lse = tl.load(lse_ptr + pid * rows + n, mask=n < rows, other=0.0)
    delta = tl.load(delta_ptr + pid * rows + n, mask=n < rows, other=0.0)
    bias = bias_ptr + image * bias_b + head * bias_h
    grad_q = tl.zeros((BLOCK_N, BLOCK_D), tl.float32)
    grad_gq = tl.zeros((BLOCK_N, BLOCK_E), tl.float32)
    grad_a = tl.zeros((BLOCK_N,), tl.float32)
    grad_b = tl.zeros((BLOCK_N,), tl.float32)
    grad_c = tl.zeros((BLOCK_N,), tl.float32)
    grad_e = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, columns, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        k = _rows(k_ptr + pid * columns * D, m, columns, D, BLOCK_D)
        v = _rows(v_ptr + pid * columns * D, m, columns, D, BLOCK_D)
        gk = _rows(gk_ptr + gate * columns * E, m, columns, E, BLOCK_E)
        _, grad_s, grad_r, grad_u, r, first, second = _gradients(
            q, k, v, gq, gk, grad, lse, delta, bias, n, m, rows, columns, bias_n, bias_m,
            a, b, c, e, scale, gate_scale, BIASED,
        )  # fmt: skip
        grad_q += tl.dot(grad_s.to(k.dtype), k, input_precision='tf32x3') * scale
        grad_gq += tl.dot(grad_r.to(gk.dtype), gk, input_precision='tf32x3') * gate_scale
        grad_a += tl.sum(grad_u * second * r, 1)
        grad_b += tl.sum(grad_u * second, 1)
        grad_c += tl.sum(grad_u * first * r, 1)
        grad_e += tl.sum(grad_u * first, 1)
    _store(grad_q_ptr + pid * rows * D, n, rows, grad_q, D, BLOCK_D)
    _store(grad_gq_ptr + pid * rows * E, n, rows, grad_gq, E, BLOCK_E)
    share = grad_scalars_ptr + (pid * tl.num_programs(0) + tl.program_id(0)) * 4
    tl.store(share, tl.sum(grad_a))
    tl.store(share + 1, tl.sum(grad_b))
    tl.store(share + 2, tl.sum(grad_c))
    tl.store(share + 3, tl.sum(grad_e))


@triton.jit
def columns_backward_kernel(
    q_ptr, k_ptr, v_ptr, gq_ptr, gk_ptr, scalars_ptr, bias_ptr, lse_ptr, delta_ptr, grad_ptr,
    grad_k_ptr, grad_v_ptr, grad_gk_ptr,
    heads, gate_heads, rows, columns, bias_b, bias_h, bias_n, bias_m, scale, gate_scale,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BIASED: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Store dK, dV and dKg of this head for BLOCK_M columns."""
    pid = tl.program_id(1).to(tl.int64)
    image, head, gate = _head(pid, heads, gate_heads)
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
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
        lse = tl.load(lse_ptr + pid * rows + n, mask=n < rows, other=0.0)
        delta = tl.load(delta_ptr + pid * rows + n, mask=n < rows, other=0.0)
        p, grad_s, grad_r, _, _, _, _ = _gradients(
            q, k, v, gq, gk, grad, lse, delta, bias, n, m, rows, columns, bias_n, bias_m,
            a, b, c, e, scale, gate_scale, BIASED,
        )  # fmt: skip
        grad_v += tl.dot(tl.trans(p.to(grad.dtype)), grad, input_precision='tf32x3')
        grad_k += tl.dot(tl.trans(grad_s.to(q.dtype)), q, input_precision='tf32x3') * scale
        grad_gk += tl.dot(tl.trans(grad_r.to(gq.dtype)), gq, input_precision='tf32x3') * gate_scale
    _store(grad_k_ptr + pid * columns * D, m, columns, grad_k, D, BLOCK_D)
    _store(grad_v_ptr + pid * columns * D, m, columns, grad_v, D, BLOCK_D)
    _store(grad_gk_ptr + pid * columns * E, m, columns, grad_gk, E, BLOCK_E)

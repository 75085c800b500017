"""Linear attention of features of queries and keys, by products in the order ``Q (K^T V)``, and its N x N reference.

Layout: q, k, v (B, H, N, d); output (B, H, N, d). In sums over the tokens both factors are scaled by 1 / sqrt(N), so
that the sums stay within half precision.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .layout import check_qkv

# Added to a denominator, which is 0 for a query that agrees with no key.
EPS = 1e-6
# Least denominator in half precision: its inverse, which the gradient holds, has to be in range.
EPS_HALF = 2**-12


def key_value_map(k: Tensor, v: Tensor) -> Tensor:
    """Compute ``K^T V / N``, ``(..., d, d)``, from keys and values ``(..., N, d)``, in the values' dtype."""
    share = k.shape[-2] ** -0.5
    return (k * share).to(v.dtype).transpose(-1, -2) @ (v * share)


def kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, norm_q: Tensor | None = None, norm_k: Tensor | None = None
) -> Tensor:
    """Compute linear attention ``Q (K^T V) / (Q sum(K))``, whose weights ``q_i k_j`` are divided by their sum.

    Args:
        q: Features of the queries, not negative, ``(B, H, N, d)``.
        k: Features of the keys, not negative, ``(B, H, N, d)``.
        v: Values ``(B, H, N, e)``.
        norm_q: Features of the queries in the denominator, if those in the numerator are rotated; ``q`` by default.
        norm_k: Features of the keys in the denominator; ``k`` by default.

    Features may have a wider dtype than the values, which powers need.

    Raises:
        ValueError: Shapes or dtypes do not go together, or there are no keys.

    Source: Transformers are RNNs (Katharopoulos et al., 2020), Eq. 5.
    """
    check_qkv(
        q,
        k,
        v,
        ('norm_q', norm_q, 'B H N f'),
        ('norm_k', norm_k, 'B H M f'),
        filled='M d f',
        one_dtype=False,
    )
    norm_q = q if norm_q is None else norm_q
    norm_k = k if norm_k is None else norm_k
    # Features in half precision have gradients in half precision, too. These grow as features shrink, so that features
    # of a length below 1 are not brought to 1.
    least = 1.0 if torch.float16 in (norm_q.dtype, norm_k.dtype) else 1e-12
    norm_q = _wide(norm_q)
    norm_k = _wide(norm_k)
    eps: float | Tensor = EPS
    if v.dtype == torch.float16:
        # The weights do not depend on the features' lengths. Features of a length near 1 keep the products in range.
        long_q = norm_q.detach().abs().amax(-1, keepdim=True).clamp(min=least)
        long_k = norm_k.detach().abs().mean(-2, keepdim=True).amax(-1, keepdim=True).clamp(min=least)
        q = q / long_q
        k = k / long_k
        norm_q = norm_q / long_q
        norm_k = norm_k / long_k
        eps = EPS / (long_q * long_k)
    total = (norm_q * norm_k.mean(-2, keepdim=True)).sum(-1, keepdim=True) + eps
    if v.dtype == torch.float16:
        total = total.clamp(min=EPS_HALF)
    return (_wide(q.to(v.dtype) @ key_value_map(k, v)) / total).to(v.dtype)


def kernel_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, norm_q: Tensor | None = None, norm_k: Tensor | None = None
) -> Tensor:
    """Compute :func:`kernel_attention` with its N x N weights in memory, as a reference for tests."""
    norm_q = q if norm_q is None else norm_q
    norm_k = k if norm_k is None else norm_k
    total = (norm_q @ norm_k.transpose(-1, -2)).sum(-1, keepdim=True)
    return (q @ k.transpose(-1, -2)) / (total + EPS * k.shape[-2]) @ v


def _wide(x: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32; return any other tensor as it is."""
    return x.float() if x.dtype.itemsize < 4 else x

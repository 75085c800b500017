"""Linear attentions: products in the order Q (K^T V), and the N x N form of each, which they equal.

Layout: q, k, v (B, H, N, d) with any features in the place of q and k; O (B, H, N, d). Sums over the tokens are taken
with 1 / sqrt(N) on both factors, so that they stay within half precision. Shapes or dtypes that do not go together, and
sums over nothing, are a ValueError in every function.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import check_layout, check_qkv

EPS = 1e-6  # keeps a query that agrees with no key from dividing by 0
EPS_HALF = 2**-12  # the same in half precision, in whose range the inverse, a gradient, has to be


def key_value_map(k: Tensor, v: Tensor) -> Tensor:
    """Return ``K^T V / N``, ``(..., d, d)``, of keys and values ``(..., N, d)``, in the dtype of the values."""
    share = k.shape[-2] ** -0.5
    return (k * share).to(v.dtype).transpose(-1, -2) @ (v * share)


def kernel_attention(
    q: Tensor, k: Tensor, v: Tensor, norm_q: Tensor | None = None, norm_k: Tensor | None = None
) -> Tensor:
    """Return ``Q (K^T V) / (Q sum(K))``: weights ``q_i k_j`` that sum to 1.

    Args:
        q: Features of the queries, not negative, ``(B, H, N, d)``.
        k: Features of the keys, not negative, ``(B, H, N, d)``.
        v: Values ``(B, H, N, e)``.
        norm_q: Features of the queries in the denominator, where those above are rotated; ``q`` by default.
        norm_k: Of the keys, likewise.

    Features may be of a wider dtype than the values, as powers have to be.

    Source: Transformers are RNNs (Katharopoulos et al., 2020), Eq. 5.
    """
    norms = ('norm_q', norm_q, 'B H N f'), ('norm_k', norm_k, 'B H M f')
    check_qkv(q, k, v, *norms, filled='M d f', one_dtype=False)
    norm_q, norm_k = (q if norm_q is None else norm_q), (k if norm_k is None else norm_k)
    # Features in half precision have their gradients there too, which grow as features shrink: those stay short.
    least = 1.0 if torch.float16 in (norm_q.dtype, norm_k.dtype) else 1e-12
    norm_q, norm_k = _wide(norm_q), _wide(norm_k)
    eps: float | Tensor = EPS
    if v.dtype == torch.float16:
        # The weights do not depend on the features' lengths; brought to about 1, products stay in range.
        long_q = norm_q.detach().abs().amax(-1, keepdim=True).clamp(min=least)
        long_k = norm_k.detach().abs().mean(-2, keepdim=True).amax(-1, keepdim=True).clamp(min=least)
        q, k, norm_q, norm_k = q / long_q, k / long_k, norm_q / long_q, norm_k / long_k
        eps = EPS / (long_q * long_k)
    total = (norm_q * norm_k.mean(-2, keepdim=True)).sum(-1, keepdim=True) + eps
    if v.dtype == torch.float16:
        total = total.clamp(min=EPS_HALF)
    return (_wide(q.to(v.dtype) @ key_value_map(k, v)) / total).to(v.dtype)


def kernel_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, norm_q: Tensor | None = None, norm_k: Tensor | None = None
) -> Tensor:
    """Return the same by the N x N weights."""
    norm_q, norm_k = q if norm_q is None else norm_q, k if norm_k is None else norm_k
    total = (norm_q @ norm_k.transpose(-1, -2)).sum(-1, keepdim=True)
    return (q @ k.transpose(-1, -2)) / (total + EPS * k.shape[-2]) @ v


def hydra_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``q̂ * sum_N(k̂ * v)`` of ``(B, N, C)``: as many heads as channels, the lengths taken over all of them.

    Source: Hydra attention (Bolya et al., 2022), Eq. 8.
    """
    check_layout(('q', q, 'B N C'), ('k', k, 'B M C'), ('v', v, 'B M C'))
    q, k = _unit(q), _unit(k)
    # a sum over many tokens may leave half precision
    total = (k * v).sum(-2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
    return (q * total).to(v.dtype)


def hydra_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same by one N x N map a channel."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    maps = torch.einsum('bnc,bmc->bcnm', q, k)
    return torch.einsum('bcnm,bmc->bnc', maps, v)


def efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``softmax_d(Q) (softmax_N(K)^T V)``.

    Source: Efficient attention (Shen et al., 2021), Eq. 4 and 5.
    """
    check_qkv(q, k, v, filled='')
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def efficient_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same by the N x N weights, which sum to 1."""
    return (q.softmax(-1) @ k.softmax(-2).transpose(-1, -2)) @ v


def linear_angular_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return ``V / 2 + Q̂ (K̂^T V) / pi``, every token and head brought to length 1.

    Source: Castling-ViT (You et al., 2023), the linear term of the angular kernel.
    """
    check_layout(('q', q, 'B H N d'), ('k', k, 'B H N d'), ('v', v, 'B H N e'), filled='N')
    q, k = _unit(q), _unit(k)
    tokens = _wide(q @ key_value_map(k, v)) * (k.shape[-2] / math.pi)
    return _unit(_wide(v) / 2 + tokens, v.dtype)


def linear_angular_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Return the same by the N x N map ``I / 2 + Q̂ K̂^T / pi``."""
    q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
    return F.normalize((identity / 2 + q @ k.transpose(-1, -2) / math.pi) @ v, dim=-1)


def focused_features(x: Tensor, power: float = 3.0) -> Tensor:
    """Return ``‖x‖ x^p / ‖x^p‖`` of features ``(..., C)`` from 0 up: the direction sharpened, the length kept.

    In no less than float32: powers of what 16 bits hold leave their range.

    Source: FLatten transformer (Han et al., 2023), Eq. 5.
    """
    wide = _wide(x)
    raised = wide**power
    length = wide.norm(dim=-1, keepdim=True) / raised.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return raised * length


def polarity_features(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Return the positive and the negative part of ``x``, both as positive numbers raised to a power.

    Args:
        x: ``(B, H, N, d)``.
        power: More than 1, broadcastable to ``x``.

    Returns:
        Both in no less than float32: powers of what 16 bits hold leave their range.

    Source: PolaFormer (Meng et al., 2025), section 3.
    """
    # Where x is 0 the gradient of 0^p with respect to p, 0 log 0, would be no number.
    wide = _wide(x)
    positive, negative = (part.clamp(min=EPS) ** power * (part > 0) for part in (wide, -wide))
    return positive, negative


def polarity_attention(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """Attend by products of same sign in the first half of the values' channels, of opposite sign in the second.

    Values have an even number of channels; the ``power`` is that of :func:`polarity_features`.

    Source: PolaFormer, section 3.
    """
    check_qkv(q, k, v, ('power', power, 'B|1 H|1 N|1 d|1'), one_dtype=False)
    if v.shape[-1] % 2:
        raise ValueError(f'v must have an even number of channels, half for each polarity, got {tuple(v.shape)}.')
    (q_plus, q_minus), (k_plus, k_minus) = polarity_features(q, power), polarity_features(k, power)
    same, opposite = v.chunk(2, -1)
    keys = torch.cat([k_plus, k_minus], -1)
    halves = (q_plus, q_minus, same), (q_minus, q_plus, opposite)
    return torch.cat([kernel_attention(torch.cat([a, b], -1), keys, values) for a, b, values in halves], -1)


def polarity_attention_reference(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """Return the same by four N x N products."""
    (q_plus, q_minus), (k_plus, k_minus) = polarity_features(q, power), polarity_features(k, power)
    k_plus, k_minus = k_plus.transpose(-1, -2), k_minus.transpose(-1, -2)
    both = q_plus @ k_plus + q_minus @ k_minus, q_minus @ k_plus + q_plus @ k_minus
    totals = [weights.sum(-1, keepdim=True) + EPS * k.shape[-2] for weights in both]
    return torch.cat([w / total @ x for w, total, x in zip(both, totals, v.chunk(2, -1), strict=True)], -1)


def inline_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Return linear attention whose weights are normalised by a difference: ``q_i k_j - mean_j(q_i k_j) + 1 / N``.

    The products are scaled by ``scale / N``, ``1 / sqrt(d)`` by default. Unlike a quotient, the difference maps no two
    queries to the same weights.

    Source: Bridging the divide: reconsidering softmax and linear attention (Han et al., 2024), Eq. 5.
    """
    check_qkv(q, k, v)
    # Q cov(K, V) + mean(V): centring first keeps what the difference would cancel out of half precision.
    mean = v.mean(-2, keepdim=True)
    covariance = key_value_map(k - k.mean(-2, keepdim=True), v - mean)
    return q @ (covariance * (q.shape[-1] ** -0.5 if scale is None else scale)) + mean


def inline_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Return the same by the N x N weights, which sum to 1."""
    tokens = k.shape[-2]
    weights = q @ k.transpose(-1, -2) * ((q.shape[-1] ** -0.5 if scale is None else scale) / tokens)
    return (weights - weights.mean(-1, keepdim=True) + 1 / tokens) @ v


def rank_augmented_keys(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """Return keys weighted by their attention from the mean query: ``alpha_j k_j`` with ``sum(alpha) = N``.

    Source: Breaking the low-rank dilemma of linear attention (Fan et al., 2024), section 3.
    """
    check_layout(('q', q, 'B H N d'), ('k', k, 'B H M d'), filled='N M d')
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (q.mean(-2, keepdim=True) @ k.transpose(-1, -2) * scale).softmax(-1)  # (B, H, 1, N)
    return k * (weights * k.shape[-2]).transpose(-1, -2)


def rotate(x: Tensor, hw_shape: tuple[int, int], base: float = 10_000.0, *, inclusive: bool = False) -> Tensor:
    """Rotate pairs of channels by angles that grow with the row (first half of the pairs) and the column (second).

    Args:
        x: ``(..., N, d)`` over an ``h x w`` map, ``d`` a multiple of 4.
        hw_shape: Height and width of the map.
        base: The slowest angle is ``1 / base`` of the fastest, to the power ``1 - 4 / d``.
        inclusive: Whether it is ``1 / base`` of the fastest itself, as in RALA, the powers between evenly spaced.

    Source: RoFormer (Su et al., 2021), over two axes as in MLLA (Han et al., 2024).
    """
    if x.dim() < 2 or x.shape[-2] != hw_shape[0] * hw_shape[1] or x.shape[-1] % 4:
        raise ValueError(
            f'x must be (..., {hw_shape[0]} * {hw_shape[1]}, d) with d a multiple of 4, got {tuple(x.shape)}.'
        )
    pairs = x.shape[-1] // 4  # an axis
    kind = torch.float64 if x.dtype == torch.float64 else torch.float32
    steps = torch.arange(pairs, device=x.device, dtype=kind) / (max(pairs - 1, 1) if inclusive else pairs)
    speeds = base**-steps
    rows, columns = (torch.arange(size, device=x.device, dtype=kind)[:, None] * speeds for size in hw_shape)
    height, width = hw_shape
    grids = rows[:, None].expand(height, width, pairs), columns[None].expand(height, width, pairs)
    angles = torch.cat(grids, -1).flatten(0, 1)  # (N, d / 2)
    cosine, sine = angles.cos(), angles.sin()
    even, odd = _wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2).to(x.dtype)


def _unit(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Return ``x`` at length 1, in ``dtype`` or its own.

    In half precision torch's 1e-12 would be 0, and the gradient of a token at 0, its inverse, infinite; there a token
    shorter than 1e-4 is 0 and gets no gradient.
    """
    dtype, wide = x.dtype if dtype is None else dtype, _wide(x)
    if dtype != torch.float16:
        return F.normalize(wide, dim=-1).to(dtype)
    length = wide.norm(dim=-1, keepdim=True)
    return (wide * torch.where(length > 1e-4, 1 / length.clamp(min=1e-4), 0)).to(dtype)


def _wide(x: Tensor) -> Tensor:
    """Return 16 bits widened to 32."""
    return x.float() if x.dtype.itemsize < 4 else x

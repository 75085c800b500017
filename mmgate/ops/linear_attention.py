"""Linear attentions as functions, by products in the order ``Q (K^T V)``, each with a reference by N x N maps.

Layout: q, k, v (B, H, N, d), where q and k may be features of queries and keys; output (B, H, N, d). In sums over the
tokens both factors are scaled by 1 / sqrt(N), so that the sums stay within half precision. Every function raises
ValueError for shapes or dtypes that do not go together, and for sums over nothing.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import check_layout, check_qkv

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


def hydra_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute hydra attention ``q̂ * sum_N(k̂ * v)`` of ``(B, N, C)`` tensors; ``q̂``, ``k̂`` are normalised over C.

    Source: Hydra attention (Bolya et al., 2022), Eq. 8.
    """
    check_layout(('q', q, 'B N C'), ('k', k, 'B M C'), ('v', v, 'B M C'))
    q = _unit(q)
    k = _unit(k)
    # A sum over many tokens may leave half precision.
    total = (k * v).sum(-2, keepdim=True, dtype=torch.promote_types(v.dtype, torch.float32))
    return (q * total).to(v.dtype)


def hydra_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute :func:`hydra_attention` with an N x N map for each channel, as a reference for tests."""
    q = F.normalize(q, dim=-1)
    k = F.normalize(k, dim=-1)
    maps = torch.einsum('bnc,bmc->bcnm', q, k)
    return torch.einsum('bcnm,bmc->bnc', maps, v)


def efficient_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute efficient attention ``softmax_d(Q) (softmax_N(K)^T V)``, with softmaxes over channels and over tokens.

    Source: Efficient attention (Shen et al., 2021), Eq. 4 and 5.
    """
    check_qkv(q, k, v, filled='')
    return q.softmax(-1) @ (k.softmax(-2).transpose(-1, -2) @ v)


def efficient_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute :func:`efficient_attention` with its N x N weights in memory, as a reference for tests."""
    return (q.softmax(-1) @ k.softmax(-2).transpose(-1, -2)) @ v


def linear_angular_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute linear angular attention ``V / 2 + Q̂ (K̂^T V) / pi``; each head of each token is normalised.

    Source: Castling-ViT (You et al., 2023), the linear term of the angular kernel.
    """
    check_layout(('q', q, 'B H N d'), ('k', k, 'B H N d'), ('v', v, 'B H N e'), filled='N')
    q = _unit(q)
    k = _unit(k)
    tokens = _wide(q @ key_value_map(k, v)) * (k.shape[-2] / math.pi)
    return _unit(_wide(v) / 2 + tokens, v.dtype)


def linear_angular_attention_reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Compute :func:`linear_angular_attention` with its N x N map in memory, as a reference for tests.

    The map is ``I / 2 + Q̂ K̂^T / pi``.
    """
    q = F.normalize(q, dim=-1)
    k = F.normalize(k, dim=-1)
    identity = torch.eye(k.shape[-2], dtype=q.dtype, device=q.device)
    return F.normalize((identity / 2 + q @ k.transpose(-1, -2) / math.pi) @ v, dim=-1)


def focused_features(x: Tensor, power: float = 3.0) -> Tensor:
    """Sharpen non-negative features ``(..., C)`` by a power and keep their norm: ``‖x‖ x^p / ‖x^p‖``.

    This sharpens their direction and keeps their length. The result is in float32 if ``x`` has 16 bits, whose range
    powers leave.

    Source: FLatten transformer (Han et al., 2023), Eq. 5.
    """
    wide = _wide(x)
    raised = wide**power
    length = wide.norm(dim=-1, keepdim=True) / raised.norm(dim=-1, keepdim=True).clamp(min=1e-12)
    return raised * length


def polarity_features(x: Tensor, power: Tensor) -> tuple[Tensor, Tensor]:
    """Split features into their positive and their negative part, both as numbers from 0 up, raised to a power.

    Args:
        x: Queries or keys ``(B, H, N, d)``.
        power: Power above 1, broadcastable to ``x``.

    Returns:
        Two tensors of the shape of ``x``, in float32 if ``x`` has 16 bits, whose range powers leave.

    Source: PolaFormer (Meng et al., 2025), section 3.
    """
    # Without the clamp, the gradient of 0^p with respect to p, which is 0 log 0, would be NaN.
    wide = _wide(x)
    positive, negative = (part.clamp(min=EPS) ** power * (part > 0) for part in (wide, -wide))
    return positive, negative


def polarity_attention(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """Compute PolaFormer's linear attention: parts of queries and keys of the same and of opposite sign attend apart.

    Products of parts of the same sign weigh the first half of the values' channels, those of opposite sign the second
    half.

    Args:
        q: Queries ``(B, H, N, d)``.
        k: Keys ``(B, H, M, d)``.
        v: Values ``(B, H, M, e)`` with an even number e of channels.
        power: Power of :func:`polarity_features`.

    Source: PolaFormer, section 3.
    """
    check_qkv(q, k, v, ('power', power, 'B|1 H|1 N|1 d|1'), one_dtype=False)
    if v.shape[-1] % 2:
        raise ValueError(f'v must have an even number of channels, half for each polarity, got {tuple(v.shape)}.')
    q_plus, q_minus = polarity_features(q, power)
    k_plus, k_minus = polarity_features(k, power)
    same, opposite = v.chunk(2, -1)
    keys = torch.cat([k_plus, k_minus], -1)
    first = kernel_attention(torch.cat([q_plus, q_minus], -1), keys, same)
    second = kernel_attention(torch.cat([q_minus, q_plus], -1), keys, opposite)
    return torch.cat([first, second], -1)


def polarity_attention_reference(q: Tensor, k: Tensor, v: Tensor, power: Tensor) -> Tensor:
    """Compute :func:`polarity_attention` with four N x N products in memory, as a reference for tests."""
    q_plus, q_minus = polarity_features(q, power)
    k_plus, k_minus = (part.transpose(-1, -2) for part in polarity_features(k, power))
    same = q_plus @ k_plus + q_minus @ k_minus
    opposite = q_minus @ k_plus + q_plus @ k_minus
    halves = []
    for weights, values in zip((same, opposite), v.chunk(2, -1), strict=True):
        total = weights.sum(-1, keepdim=True) + EPS * k.shape[-2]
        halves.append(weights / total @ values)
    return torch.cat(halves, -1)


def inline_attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute InLine's linear attention, with the weights ``q_i k_j - mean_j(q_i k_j) + 1 / N``.

    The products ``q_i k_j`` are scaled by ``scale / N``; ``scale`` is ``1 / sqrt(d)`` by default. Normalised by a
    quotient, several queries could get the same weights; by a difference, they cannot.

    Source: Bridging the divide: reconsidering softmax and linear attention (Han et al., 2024), Eq. 5.
    """
    check_qkv(q, k, v)
    # This is Q cov(K, V) + mean(V). Centred first, the products do not hold, in half precision, large equal terms that
    # the difference cancels.
    mean = v.mean(-2, keepdim=True)
    covariance = key_value_map(k - k.mean(-2, keepdim=True), v - mean)
    return q @ (covariance * (q.shape[-1] ** -0.5 if scale is None else scale)) + mean


def inline_attention_reference(q: Tensor, k: Tensor, v: Tensor, *, scale: float | None = None) -> Tensor:
    """Compute :func:`inline_attention` with its N x N weights in memory, as a reference for tests."""
    tokens = k.shape[-2]
    weights = q @ k.transpose(-1, -2) * ((q.shape[-1] ** -0.5 if scale is None else scale) / tokens)
    return (weights - weights.mean(-1, keepdim=True) + 1 / tokens) @ v


def rank_augmented_keys(q: Tensor, k: Tensor, *, scale: float | None = None) -> Tensor:
    """Weigh the keys by the attention of the mean query, for RALA: ``alpha_j k_j`` with ``sum(alpha) = N``.

    Source: Breaking the low-rank dilemma of linear attention (Fan et al., 2024), section 3.
    """
    check_layout(('q', q, 'B H N d'), ('k', k, 'B H M d'), filled='N M d')
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    weights = (q.mean(-2, keepdim=True) @ k.transpose(-1, -2) * scale).softmax(-1)  # (B, H, 1, N)
    return k * (weights * k.shape[-2]).transpose(-1, -2)


def rotate(x: Tensor, hw_shape: tuple[int, int], base: float = 10_000.0, *, inclusive: bool = False) -> Tensor:
    """Apply rotary positions to tokens of a map: pairs of channels rotate by the row, others by the column.

    Args:
        x: Tokens ``(..., N, d)`` of an ``h x w`` map, row by row; ``d`` is a multiple of 4.
        hw_shape: Height and width of the map.
        base: Ratio of the fastest angle to the slowest. By default the slowest is the fastest times ``base`` to the
            power ``4 / d - 1``.
        inclusive: True makes the slowest exactly ``1 / base`` of the fastest, as in RALA, with evenly spaced powers in
            between.

    Source: RoFormer (Su et al., 2021), over two axes as in MLLA (Han et al., 2024).
    """
    if x.dim() < 2 or x.shape[-2] != hw_shape[0] * hw_shape[1] or x.shape[-1] % 4:
        raise ValueError(
            f'x must be (..., {hw_shape[0]} * {hw_shape[1]}, d) with d a multiple of 4, got {tuple(x.shape)}.'
        )
    height, width = hw_shape
    pairs = x.shape[-1] // 4  # for each axis
    dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
    steps = torch.arange(pairs, device=x.device, dtype=dtype) / (max(pairs - 1, 1) if inclusive else pairs)
    speeds = base**-steps
    rows = torch.arange(height, device=x.device, dtype=dtype)[:, None] * speeds
    columns = torch.arange(width, device=x.device, dtype=dtype)[:, None] * speeds
    by_row = rows[:, None].expand(height, width, pairs)
    by_column = columns[None].expand(height, width, pairs)
    angles = torch.cat([by_row, by_column], -1).flatten(0, 1)  # (N, d / 2)
    cosine = angles.cos()
    sine = angles.sin()
    even, odd = _wide(x).unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([even * cosine - odd * sine, even * sine + odd * cosine], -1).flatten(-2).to(x.dtype)


def _unit(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Normalise ``x`` to length 1 along the last axis; the result has ``dtype``, by default that of ``x``.

    The gradient grows with the inverse of the length. F.normalize allows lengths down to 1e-12, whose inverse is
    infinite in half precision. There a vector shorter than 1e-4 becomes 0 and gets no gradient.
    """
    dtype = x.dtype if dtype is None else dtype
    wide = _wide(x)
    if dtype != torch.float16:
        return F.normalize(wide, dim=-1).to(dtype)
    length = wide.norm(dim=-1, keepdim=True)
    return (wide * torch.where(length > 1e-4, 1 / length.clamp(min=1e-4), 0)).to(dtype)


def _wide(x: Tensor) -> Tensor:
    """Convert a 16-bit tensor to float32; return any other tensor as it is."""
    return x.float() if x.dtype.itemsize < 4 else x

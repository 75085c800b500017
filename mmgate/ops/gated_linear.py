"""SAGA's gated linear attention as a function, at a cost linear in the number of tokens.

Eq. 8: O = Q ((K * A)^T (V * B)), with A and B in (0, 1); q, k, v, gate_k, gate_v are (B, H, N, d).
The paper leaves the scale open. Here the map K^T V is scaled by 1 / N, as 1 / sqrt(N) on K and on V, and Q by
1 / sqrt(d); unscaled, the output would grow with the number of tokens.
"""

from __future__ import annotations

from torch import Tensor

from .layout import check_qkv
from .linear_attention import key_value_map


def gated_linear_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, gate_k: Tensor | None, gate_v: Tensor | None
) -> Tensor:
    """Compute SAGA's attention by its Eq. 5, token by token with (N, d, d) tensors, as a reference for tests.

    A gate matrix ``G_i = alpha_i^T beta_i`` multiplies each token's ``k_i^T v_i``.
    """
    outer = k[..., :, None] * v[..., None, :]  # (B, H, N, d, d)
    if gate_k is not None and gate_v is not None:
        outer = outer * (gate_k[..., :, None] * gate_v[..., None, :])
    semantic = outer.sum(2) / k.shape[2]  # (B, H, d, d)
    return (q * q.shape[-1] ** -0.5) @ semantic


def gated_linear_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate_k: Tensor | None = None,
    gate_v: Tensor | None = None,
    *,
    scale: float | None = None,
    scale_by_tokens: bool = True,
) -> Tensor:
    """Compute SAGA's linear attention ``Q ((K * gate_k)^T (V * gate_v))``, scaled, in memory linear in the tokens.

    Args:
        q: Queries ``(B, H, N, d)``.
        k: Keys ``(B, H, M, d)``.
        v: Values ``(B, H, M, d)``.
        gate_k: Gates of the keys in (0, 1), of the shape of ``k``, or None for no gate.
        gate_v: Gates of the values in (0, 1), of the shape of ``v``, or None for no gate.
        scale: Factor of Q; ``1 / sqrt(d)`` by default.
        scale_by_tokens: True divides ``K^T V`` by the number of keys. Without that it grows with the number of keys,
            and soon leaves half precision.

    Returns:
        ``(B, H, N, d)``.

    Raises:
        ValueError: Shapes or dtypes do not go together, or there are no keys.

    Source: SAGA, Eq. 6 and 8.
    """
    check_qkv(q, k, v, ('gate_k', gate_k, 'B|1 H|1 M|1 d|1'), ('gate_v', gate_v, 'B|1 H|1 M|1 e|1'))
    k = k if gate_k is None else k * gate_k
    v = v if gate_v is None else v * gate_v
    semantic = key_value_map(k, v) if scale_by_tokens else k.transpose(-1, -2) @ v  # (B, H, d, d)
    return q @ (semantic * (q.shape[-1] ** -0.5 if scale is None else scale))

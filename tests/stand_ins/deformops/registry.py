"""``msda`` with the package's signature, checks and keywords; it samples by mmgate's reference.

Unlike mmgate's operators, NaN and infinite locations spread here, as in the package's kernels.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmgate.ops.ms_deform_attn.reference import sample

OPTIONS = {'chunk_step', 'num_points', 'channels_per_thread', 'threads_per_block', 'fp32acc'}
CALLS: list[dict[str, Any]] = []


def msda(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    /,
    *,
    method: str | None = None,
    softmax: bool = False,
    backend: Any = None,
    **options: Any,
) -> Tensor:
    """Return ``(B, Q, G * D)`` from weights, or from logits with ``method='softmax'``."""
    unknown = set(options) - OPTIONS
    if unknown:
        raise TypeError(f'msda got unexpected keyword argument(s): {sorted(unknown)}')
    if attention_weights.dtype != value.dtype:
        raise ValueError('mixed input dtypes are not supported')
    CALLS.append(dict(method=method, **options))
    weights = attention_weights
    if method == 'softmax' or softmax:
        weights = weights.float().flatten(-2).softmax(-1).view(weights.shape)
    spread = (sampling_locations * 0).sum()
    return sample(value, spatial_shapes, level_start_index, sampling_locations, weights) + spread.to(value.dtype)

"""Agent attention as a function: two softmax attentions through a few agent tokens, linear in the tokens.

Eq. 5: O = softmax(Q A^T / sqrt(d) + B2) softmax(A K^T / sqrt(d) + B1) V, with q, k, v (B, H, N, d),
agents (B, H, n, d), bias1 (1|B, H, n, N), bias2 (1|B, H, N, n).
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .layout import check_qkv
from .tracing import hides_numbers


def agent_attention_reference(
    q: Tensor, k: Tensor, v: Tensor, agents: Tensor, bias1: Tensor | None, bias2: Tensor | None, scale: float
) -> Tensor:
    """Compute agent attention by the paper's Eq. 5 with all maps in memory, as a reference for tests.

    The arguments are those of :func:`agent_attention`.
    """
    # Agent aggregation: the agents attend to the keys.
    logits = agents @ k.transpose(-1, -2) * scale
    agent_v = (logits if bias1 is None else logits + bias1).softmax(-1) @ v  # (B, H, n, d)
    # Agent broadcast: the queries attend to the agents.
    logits = q @ agents.transpose(-1, -2) * scale
    return (logits if bias2 is None else logits + bias2).softmax(-1) @ agent_v


def agent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    agents: Tensor,
    bias1: Tensor | None = None,
    bias2: Tensor | None = None,
    *,
    scale: float | None = None,
    broadcast_scale: float | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Compute agent attention by two fused attentions: values to agent tokens, and agent tokens to queries.

    Args:
        q: Queries ``(B, H, N, d)``.
        k: Keys ``(B, H, M, d)``.
        v: Values ``(B, H, M, e)``, most often e = d.
        agents: Agent tokens ``(B, H, n, d)``.
        bias1: Bias of the logits of agents and keys, broadcastable to ``(B, H, n, M)``.
        bias2: Bias of the logits of queries and agents, broadcastable to ``(B, H, N, n)``.
        scale: Factor of the logits in both attentions; ``1 / sqrt(d)`` by default.
        broadcast_scale: Factor in the second one, of queries and agents; ``scale`` by default.
        dropout: Probability of dropping an attention weight in both attentions.

    Returns:
        ``(B, H, N, e)`` in the dtype of ``v``.

    Raises:
        ValueError: Shapes or dtypes that do not go together, no keys or no agents.

    Source: Agent attention, Eq. 5.
    """
    check_qkv(
        q,
        k,
        v,
        ('agents', agents, 'B H n d'),
        ('bias1', bias1, 'B|1 H|1 n|1 M|1'),
        ('bias2', bias2, 'B|1 H|1 N|1 n|1'),
        filled='M d n',
    )
    agent_v = F.scaled_dot_product_attention(agents, k, v, attn_mask=bias1, dropout_p=dropout, scale=scale)
    second = scale if broadcast_scale is None else broadcast_scale
    return F.scaled_dot_product_attention(q, agents, agent_v, attn_mask=bias2, dropout_p=dropout, scale=second)


def keeps_constants(like: Tensor) -> bool:
    """Return True if tensors computed now may be kept for later calls: none of them is traced, fake or transformed."""
    if hides_numbers(like) or torch.jit.is_tracing():
        return False
    return torch._C._functorch.peek_interpreter_stack() is None


def interpolation_matrix(source: int, target: int, like: Tensor, *, ones: bool = False) -> Tensor:
    """Return the matrix ``(target, source)`` that resizes one axis bilinearly from ``source`` to ``target`` entries.

    It resizes as ``F.interpolate(mode='bilinear', align_corners=False)`` does. A resize is linear and separable, so it
    may be applied to the factors of a map before they are multiplied. The matrix is made once; do not write to it.

    Args:
        source: Size of the axis.
        target: Size after the resize.
        like: Tensor whose device and dtype the matrix has.
        ones: True adds a last column of ones, ``(target, source + 1)``.
    """
    make = _kept_matrix if keeps_constants(like) else _matrix
    return make(source, target, like.device, like.dtype, ones)


def grid_interpolation_matrix(source: int, target: int, like: Tensor) -> Tensor:
    """Return the matrix ``(target^2, source^2)`` that resizes a square grid, row by row, as its sides are resized."""
    make = _kept_grid_matrix if keeps_constants(like) else _grid_matrix
    return make(source, target, like.device, like.dtype)


def _matrix(source: int, target: int, device: torch.device, dtype: torch.dtype, ones: bool) -> Tensor:
    centres = (torch.arange(target, device=device, dtype=torch.float64) + 0.5) * (source / target) - 0.5
    centres = centres.clamp(0, source - 1)
    distances = (centres[:, None] - torch.arange(source, device=device)).abs()
    matrix = (1 - distances).clamp(min=0).to(dtype)
    return torch.cat([matrix, matrix.new_ones(target, 1)], -1) if ones else matrix


def _grid_matrix(source: int, target: int, device: torch.device, dtype: torch.dtype) -> Tensor:
    side = _matrix(source, target, device, dtype, False)
    return torch.kron(side, side)


@functools.lru_cache(maxsize=1024)
def _kept_matrix(*key: Any) -> Tensor:
    # A later call may need a gradient, for which torch refuses tensors of inference mode.
    with torch.inference_mode(False):
        return _matrix(*key)


@functools.lru_cache(maxsize=64)
def _kept_grid_matrix(*key: Any) -> Tensor:
    with torch.inference_mode(False):
        return _grid_matrix(*key)

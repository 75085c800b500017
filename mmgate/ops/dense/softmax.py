r"""Softmax of gated logits for a chunk of queries, and its gradients, by torch's operators.

With the logits S, the gate's factor f and a bias, over the columns of a row:

    P = softmax(f S + bias)
    dL = P (dP - delta);  dS = f dL;  df = sum over the heads that share f of dL S

Each step goes over the chunk again. ``native_dense.py`` has the same by a C++ loop, which goes over each row once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Softmax(NamedTuple):
    """One way to compute the gated softmax of a chunk.

    Attributes:
        forward: Has the arguments of :func:`gated_softmax`.
        backward: Has the arguments of :func:`gated_softmax_backward`.
        forms_factor: True if ``forward`` can form the factor from raw gates.
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, Tensor]]
    forms_factor: bool


def gated_softmax(
    logits: Tensor,
    factor: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    scalars: Sequence[float] | None = None,
) -> Tensor:
    """Compute ``softmax(logits * factor + bias)`` over the last axis, write it into ``out`` and return it.

    Args:
        logits: ``(B, H, N, M)``, contiguous, float32 or float64.
        factor: ``(B, H|1, N, M)`` in the dtype of the logits, contiguous; None leaves the logits as they are.
        bias: Four axes that broadcast to ``(B, H, N, M)``, any dtype; None for none.
        out: A contiguous tensor like ``logits``, or ``logits`` itself.
        scalars: None, as this softmax does not form the factor.
    """
    if factor is None:
        out.copy_(logits)
    else:
        torch.mul(logits, factor, out=out)
    if bias is not None:
        out.add_(bias)
    out.sub_(out.amax(-1, keepdim=True)).exp_()
    return out.div_(out.sum(-1, keepdim=True))


def gated_softmax_backward(
    logits: Tensor, factor: Tensor, weights: Tensor, grad_weights: Tensor, delta: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of the logits and of the gate's factor, given that of the attention weights.

    Args:
        logits: ``(B, H, N, M)`` before the gate, contiguous. Their values may be lost.
        factor: ``(B, H|1, N, M)``, contiguous.
        weights: What :func:`gated_softmax` returned, contiguous.
        grad_weights: Their gradient, contiguous. The gradient of the logits is written over it.
        delta: Sum of the weights times their gradient over the columns, ``(B, H, N, 1)``, contiguous.
    """
    grad_logits = grad_weights.sub_(delta).mul_(weights)
    of_factor = logits.mul_(grad_logits)
    return grad_logits.mul_(factor), sum_heads(of_factor, factor)


def sum_heads(grad: Tensor, factor: Tensor) -> Tensor:
    """Sum the gradient of the gate's factor over the heads if all heads share one gate."""
    return grad.sum(1, keepdim=True) if factor.shape[1] == 1 else grad


BY_TORCH = Softmax(gated_softmax, gated_softmax_backward, forms_factor=False)

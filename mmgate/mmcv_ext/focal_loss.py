r"""Focal losses and their gradients, as mmcv's CUDA kernels define them.

With p the probability of class c, its loss is :math:`-\alpha (1 - p)^\gamma \log p` where c is the target. In the
sigmoid's loss every other class adds :math:`-(1 - \alpha) p^\gamma \log(1 - p)`. Logarithms of the sigmoid come from
the logits. mmcv takes them of a rounded p, and jumps from 17 to 87 where 1 - p is 0 in float32.

Source: Focal Loss for Dense Object Detection (arXiv 1708.02002).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def sigmoid_focal_loss(logits: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    """Return the loss ``(N, C)``.

    Args:
        logits: ``(N, C)``.
        target: Class of each row, ``(N,)``, integer; C is the background.
        weight: A factor for the rows of each class, ``(C,)``, or empty. Rows of background have the factor 1.
        gamma: Exponent.
        alpha: Weight of the target's class; the others have ``1 - alpha``.
    """
    x = logits.float() if logits.dtype.itemsize < 4 else logits
    p = x.sigmoid()
    of_target = -alpha * (1 - p) ** gamma * F.logsigmoid(x)
    of_others = -(1 - alpha) * p**gamma * F.logsigmoid(-x)
    return torch.where(_is_target(x, target), of_target, of_others) * _row_weight(x, target, weight)[:, None]


def sigmoid_focal_loss_gradient(logits: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    """Return the gradient of the sum of :func:`sigmoid_focal_loss` with respect to the logits, ``(N, C)``."""
    x = logits.float() if logits.dtype.itemsize < 4 else logits
    p = x.sigmoid()
    of_target = -alpha * (1 - p) ** gamma * (1 - p - gamma * p * F.logsigmoid(x))
    of_others = (1 - alpha) * p**gamma * (p - gamma * (1 - p) * F.logsigmoid(-x))
    return torch.where(_is_target(x, target), of_target, of_others) * _row_weight(x, target, weight)[:, None]


def softmax_focal_loss(softmax: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    """Return the loss ``(N,)`` of probabilities ``(N, C)``; it is 0 where the target is negative."""
    p = _of_target(softmax, target)
    loss = -alpha * (1 - p) ** gamma * _log(p)
    return torch.where(target >= 0, loss * _row_weight(p, target, weight), 0.0)


def softmax_focal_loss_gradient(softmax: Tensor, target: Tensor, weight: Tensor, gamma: float, alpha: float) -> Tensor:
    """Return the gradient of the sum of :func:`softmax_focal_loss` with respect to the softmax's input, ``(N, C)``."""
    p = _of_target(softmax, target)
    by_log_p = alpha * (gamma * (1 - p) ** (gamma - 1) * p * _log(p) - (1 - p) ** gamma)
    by_log_p = torch.where(target >= 0, by_log_p * _row_weight(p, target, weight), 0.0)
    return by_log_p[:, None] * (_is_target(softmax, target).to(p.dtype) - softmax)


def _is_target(scores: Tensor, target: Tensor) -> Tensor:
    return torch.arange(scores.shape[1], device=scores.device) == target[:, None]


def _row_weight(x: Tensor, target: Tensor, weight: Tensor) -> Tensor:
    if not weight.numel():
        return x.new_ones(len(target))
    return F.pad(weight.to(x.dtype), (0, 1), value=1.0)[target.clamp(0, len(weight))]


def _of_target(softmax: Tensor, target: Tensor) -> Tensor:
    p = softmax.gather(1, target.clamp(min=0)[:, None])[:, 0]
    return p.float() if p.dtype.itemsize < 4 else p


def _log(p: Tensor) -> Tensor:
    return p.clamp(min=torch.finfo(torch.float32).tiny).log()

r"""Deformable convolution, with and without modulation, in torch.

    out[o, p] = sum over (c, k) of  w[o, c, k] m[k, p] input[c, p s - pad + k dilation + offset[k, p]]

with bilinear samples, 0 outside. Layout: offset (B, G * K * 2, Ho, Wo), pairs as (y, x); mask (B, G * K, Ho, Wo);
G deformable groups of channels, K = kernel height times width.

Source: Deformable ConvNets (arXiv 1703.06211) and v2 (arXiv 1811.11168).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .peer import torchvision_ops

Pair = tuple[int, int]


def deform_conv(
    x: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """Convolve samples at a regular grid plus offsets. One image is sampled at a time.

    Args:
        x: ``(B, C, H, W)``, floating point.
        offset: ``(B, G * K * 2, Ho, Wo)``, in pixels.
        mask: Factors of the samples, ``(B, G * K, Ho, Wo)``, or None for 1.
        weight: ``(O, C / groups, kernel height, kernel width)``.
        bias: ``(O,)`` or None.
        stride: Of rows and columns, as the next two.
        padding: Zeros around the image.
        dilation: Distance of the kernel's samples.

    Returns:
        ``(B, O, Ho, Wo)``.
    """
    if (peer := torchvision_ops(x)) is not None:
        return peer.deform_conv2d(x, offset, weight, bias, stride, padding, dilation, mask)
    kernel = weight.shape[2:]
    outputs = []
    for i in range(len(x)):
        columns = _columns(x[i], offset[i], None if mask is None else mask[i], kernel, stride, padding, dilation)
        groups = x.shape[1] // weight.shape[1]
        by_group = weight.reshape(groups, len(weight) // groups, -1) @ columns.reshape(groups, -1, columns.shape[-1])
        outputs.append(by_group.reshape(len(weight), *offset.shape[2:]))
    output = torch.stack(outputs) if outputs else x.new_zeros(0, len(weight), *offset.shape[2:])
    return output if bias is None else output + bias[:, None, None]


def gradients(
    grad: Tensor,
    inputs: tuple[Tensor, Tensor, Tensor | None, Tensor],
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    *,
    of: Sequence[int] = (0, 1, 2, 3),
) -> tuple[Tensor, ...]:
    """Return gradients of map, offset, mask and weight, or of some of these, from the output's gradient."""
    x, offset, weight = (inputs[i].detach() for i in (0, 1, 3))  # type: ignore[union-attr]
    mask = None if inputs[2] is None else inputs[2].detach()
    leaves = [leaf.requires_grad_() for i, leaf in enumerate((x, offset, mask, weight)) if i in of and leaf is not None]
    with torch.enable_grad():
        output = deform_conv(x, offset, mask, weight, None, stride, padding, dilation)
    return torch.autograd.grad(output, leaves, grad)


def _columns(
    image: Tensor,
    offset: Tensor,
    mask: Tensor | None,
    kernel: torch.Size,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
) -> Tensor:
    """Return the samples of one image as columns ``(C, K, Ho * Wo)``."""
    channels, height, width = image.shape
    compute = torch.promote_types(offset.dtype, torch.float32)
    shift = offset.to(compute).view(-1, kernel.numel(), 2, *offset.shape[1:])  # (G, K, 2, Ho, Wo)
    of_row, of_column = (
        torch.arange(kernel[axis], device=image.device)[:, None] * dilation[axis]
        + torch.arange(offset.shape[1 + axis], device=image.device) * stride[axis]
        - padding[axis]
        for axis in (0, 1)
    )
    y = of_row.repeat_interleave(kernel[1], 0)[:, :, None] + shift[:, :, 0]  # (G, K, Ho, Wo)
    x = of_column.repeat(kernel[0], 1)[:, None] + shift[:, :, 1]
    # As in mmcv a sample a pixel outside has no gradient, which without offsets is the case along padded borders.
    inside = (y > -1) & (y < height) & (x > -1) & (x < width)
    y = torch.where(inside, y, -2.0)
    x = torch.where(inside, x, -2.0)
    top = y.detach().floor()
    left = x.detach().floor()
    pixels = image.reshape(len(shift), -1, height * width)
    columns = image.new_zeros((), dtype=compute)
    for row, share_y in ((top, top + 1 - y), (top + 1, y - top)):
        for column, share_x in ((left, left + 1 - x), (left + 1, x - left)):
            there = (row >= 0) & (row < height) & (column >= 0) & (column < width)
            index = torch.where(there, row.long() * width + column.long(), 0)
            share = share_y * share_x * there
            if mask is not None:
                share = share * mask.view_as(share)
            read = pixels.gather(2, index.view(len(shift), 1, -1).expand(-1, pixels.shape[1], -1))
            columns = columns + read * share.view(len(shift), 1, -1)
    return columns.to(image.dtype).reshape(channels, kernel.numel(), -1)

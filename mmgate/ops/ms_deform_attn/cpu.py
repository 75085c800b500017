r"""CPU backend of deformable attention in torch: one ``embedding_bag`` sums weighted rows of the values.

    out[b, q, h] = sum over (corner c, level l, point p) of  bilinear_c a_lp  value[index_clp]

Layout: value as rows (B * S * H, D); one bag of 4 * L * P rows per (b, q, h); output (B * Q * H, D), which already is
(B, Q, H * D). torch's ``embedding_bag`` does that sum at memory speed, so what remains is to compute indices and
weights, on the fly and for a chunk of queries at a time: nothing larger than a chunk is kept for the backward pass.

The backward pass turns the same sum around. ``embedding_bag`` itself gives the gradients of the weights. The gradient
of the values is again an ``embedding_bag``, now with a bag per value row, over the output gradients sorted by row: no
atomics, so the result does not depend on the number of threads.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .reference import corners, near, pixels
from .registered import sampling_operator

CHUNK = 1 << 20  # sampled corners at a time: 8 to 40 bytes each


def why_not(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    return None if value.device.type == 'cpu' else f'it is for CPU tensors, value is on {value.device}'


def sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, sampling_locations: Tensor, weights: Tensor
) -> Tensor:
    """Sample the values and sum them by weights, like :func:`.reference.sample`; 16 bits are summed in float32.

    Raises:
        UnsupportedCall: More value rows than 32-bit indices reach.
    """
    if value.shape[:3].numel() > torch.iinfo(torch.int32).max:
        raise UnsupportedCall(
            f"ms_deform_attn: 'cpu' takes fewer than 2^31 rows of values, value is {tuple(value.shape)}; use a smaller "
            'batch or backend="torch".'
        )
    compute = torch.promote_types(weights.dtype, torch.float32)
    locations = near(sampling_locations.to(compute))
    output = _operator(value.to(compute), spatial_shapes, level_start_index, locations, weights.to(compute))
    return output.to(value.dtype)


def _corners(
    locations: Tensor, weights: Tensor, spatial_shapes: Tensor, first_row: Tensor, heads: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return value rows, bilinear weights and full weights of all samples' corners, ``(n, H, 4, L, P)`` each."""
    rows = []
    shares = []
    # 32-bit indices halve the traffic and the time for sorting.
    for index, share in corners(spatial_shapes, locations, torch.int32):
        rows.append(first_row + index * heads)
        shares.append(share)
    bilinear = torch.stack(shares, 2)
    return torch.stack(rows, 2), bilinear, bilinear * weights[:, :, None]


def _coordinate_gradients(
    dots: Tensor, bilinear: Tensor, locations: Tensor, weights: Tensor, spatial_shapes: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the gradients of locations ``(n, H, L, P, 2)`` and weights.

    ``dots`` are the scalar products of value rows and output gradients.
    """
    width, height, x0, y0, fx, fy = pixels(spatial_shapes, locations)
    left = (x0 >= 0) & (x0 < width)
    right = (x0 + 1 >= 0) & (x0 + 1 < width)
    top = (y0 >= 0) & (y0 < height)
    bottom = (y0 + 1 >= 0) & (y0 + 1 < height)
    d00 = torch.where(left & top, dots[:, :, 0], 0)
    d10 = torch.where(right & top, dots[:, :, 1], 0)
    d01 = torch.where(left & bottom, dots[:, :, 2], 0)
    d11 = torch.where(right & bottom, dots[:, :, 3], 0)
    grad_x = ((d10 - d00) * (1 - fy) + (d11 - d01) * fy) * weights * width
    grad_y = ((d01 - d00) * (1 - fx) + (d11 - d10) * fx) * weights * height
    return torch.stack([grad_x, grad_y], -1), (dots * bilinear).sum(2)


def _chunks(value: Tensor, level_start_index: Tensor, weights: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Yield chunks of the B * Q queries as slices, with the first value row of each image, head and level.

    Its shape is ``(n, H, L, 1)``.
    """
    batch, tokens, heads, _ = value.shape
    queries = weights.shape[1]
    per_query = weights.shape[2:].numel()
    image = torch.arange(batch).repeat_interleave(queries)
    head = torch.arange(heads).view(1, -1, 1, 1)
    # A last level that is empty starts after the last token.
    starts = level_start_index.clamp(max=tokens - 1)
    step = max(1, CHUNK // max(1, per_query * 4))
    for start in range(0, batch * queries, step):
        part = slice(start, start + step)
        first = (image[part].view(-1, 1, 1, 1) * tokens + starts.view(1, 1, -1, 1)) * heads + head
        yield part, first.to(torch.int32)


def _sample(
    value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
) -> Tensor:
    heads, dim = value.shape[2:]
    batch, queries = weights.shape[:2]
    output = value.new_empty(batch * queries, heads, dim)
    rows = value.reshape(-1, dim)
    all_locations = locations.flatten(0, 1)
    all_weights = weights.flatten(0, 1)
    for part, first in _chunks(value, level_start_index, weights):
        index, _, full = _corners(all_locations[part], all_weights[part], spatial_shapes, first, heads)
        bags = index.flatten(2).flatten(0, 1)
        shares = full.flatten(2).flatten(0, 1)
        output[part] = F.embedding_bag(bags, rows, per_sample_weights=shares, mode='sum').view_as(output[part])
    return output.view(batch, queries, heads * dim)


def _sample_backward(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    locations: Tensor,
    weights: Tensor,
    value_needs_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    heads, dim = value.shape[2:]
    rows = value.reshape(-1, dim)
    grad_rows = torch.zeros_like(rows)
    grad_bags = grad.reshape(-1, heads, dim)
    all_locations = locations.flatten(0, 1)
    all_weights = weights.flatten(0, 1)
    grad_locations = torch.empty_like(all_locations)
    grad_weights = torch.empty_like(all_weights)
    for part, first in _chunks(value, level_start_index, weights):
        chunk = all_locations[part], all_weights[part]
        index, bilinear, full = _corners(*chunk, spatial_shapes, first, heads)
        index = index.flatten(2).flatten(0, 1)  # (n * H, 4 * L * P)
        grad_part = grad_bags[part].flatten(0, 1)
        dots = _dots(rows, index, grad_part).view(full.shape)
        grad_locations[part], grad_weights[part] = _coordinate_gradients(dots, bilinear, *chunk, spatial_shapes)
        if value_needs_grad:
            del dots, bilinear
            add_by_row(grad_rows, index, full.flatten(), grad_part)
    return grad_rows.view(value.shape), grad_locations.view(locations.shape), grad_weights.view(weights.shape)


def _dots(rows: Tensor, index: Tensor, grad_bags: Tensor) -> Tensor:
    """Return the gradient of ``embedding_bag``'s weights: scalar products of the rows read with output gradients."""
    bags, size = index.shape  # rows of a bag
    offsets = torch.arange(0, bags * size, max(size, 1), dtype=index.dtype)[:bags]
    bag_of = torch.arange(bags, dtype=index.dtype).repeat_interleave(size)
    # Called by its name because autograd is off inside a registered op.
    return torch.ops.aten._embedding_bag_per_sample_weights_backward(
        grad_bags, rows, index.flatten(), offsets, bag_of, mode=0
    )


def add_by_row(grad_rows: Tensor, index: Tensor, weights: Tensor, grad_bags: Tensor) -> None:
    """Add the gradient of each sample, ``weights * grad_bags``, to the value row from which it was read."""
    order = index.flatten().sort()
    counts = torch.bincount(order.values, minlength=len(grad_rows))
    offsets = counts.cumsum(0) - counts
    bag = order.indices // index.shape[1]
    grad_rows += F.embedding_bag(bag, grad_bags, offsets, per_sample_weights=weights[order.indices], mode='sum')


_operator = sampling_operator('ms_deform_sample', _sample, _sample_backward)

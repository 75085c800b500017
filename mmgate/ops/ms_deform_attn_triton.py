"""Multi-scale deformable attention by Triton kernels, as one registered torch op with its gradient.

Unlike the other backends it takes logits, gate and, if wanted, offsets as they are: neither locations nor weights are
written to memory. On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``), for tests.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
from torch import Tensor

from .triton_backend import interpreted, padded, why_not

# GPUs (a part of torch.cuda.get_device_name) on which KERNEL.md's table shows this backend ahead of mmcv's operator;
# only there does 'auto' take it.
AHEAD_OF_MMCV: tuple[str, ...] = ()
# Queries of a program, by padded channels: what fits into registers without spilling, see KERNEL.md.
BLOCK_Q = {
    'forward_kernel': {16: 32, 32: 16, 64: 8, 128: 4},
    'backward_kernel': {16: 16, 32: 8, 64: 8, 128: 4},
}
NUM_WARPS = 4
TUNED = ((8, 1), (8, 2), (16, 2), (16, 4), (32, 4), (32, 8))  # BLOCK_Q and warps that MMGATE_TRITON_AUTOTUNE=1 tries


def preferred(value: Tensor) -> bool:
    """Return whether ``auto`` takes this backend for ``value``."""
    if value.device.type != 'cuda' or not AHEAD_OF_MMCV or why_not(value) is not None:
        return False
    name = torch.cuda.get_device_name(value.device)
    return any(part in name for part in AHEAD_OF_MMCV)


def attend(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    position: str,
    reference_points: Tensor | None,
) -> Tensor:
    """Attend from logits; arguments and return value as :func:`mmgate.ops.ms_deform_attn`."""
    reference = None if reference_points is None else reference_points.contiguous()
    return torch.ops.mmgate.ms_deform_attn_fused(
        value.contiguous(),
        spatial_shapes.contiguous(),
        level_start_index.contiguous(),
        points.contiguous(),
        reference,
        logits.contiguous(),
        gate,
        residual,
        position == 'post_softmax',
    )


def _launch(backward: bool, tensors: list[Tensor], sizes: dict[str, Any], gate: Tensor | None) -> None:
    value, logits = sizes.pop('value'), sizes.pop('logits')
    batch, tokens, heads, dim = value.shape
    _, queries, _, levels, points = logits.shape
    strides = (0,) * 5 if gate is None else gate.expand(logits.shape).stride()
    if not value.numel() or not queries:
        return
    import triton

    block_d = padded(dim)
    constants = dict(
        LEVELS=levels,
        POINTS=points,
        PADDED=triton.next_power_of_2(levels * points),
        D=dim,
        BLOCK_D=block_d,
        GATED=gate is not None,
        **sizes,
    )
    kernel = _kernel(backward, os.environ.get('MMGATE_TRITON_AUTOTUNE') == '1' and not interpreted())
    blocks = BLOCK_Q['backward_kernel' if backward else 'forward_kernel']
    fixed = {} if hasattr(kernel, 'configs') else dict(BLOCK_Q=blocks[block_d], num_warps=NUM_WARPS)

    def grid(meta: dict[str, Any]) -> tuple[int, int]:
        return triton.cdiv(queries, meta['BLOCK_Q']), batch * heads

    kernel[grid](*tensors, tokens, queries, heads, *strides, **constants, **fixed)


@functools.cache
def _kernel(backward: bool, tuned: bool) -> Any:
    import triton

    from . import ms_deform_attn_kernels as kernels

    kernel = kernels.backward_kernel if backward else kernels.forward_kernel
    if not tuned:
        return kernel
    configs = [triton.Config(dict(BLOCK_Q=block), num_warps=warps) for block, warps in TUNED]
    # gathers depend on sizes, not on values, and on the dtype, which Triton adds to the key
    key = ['queries', 'heads', 'LEVELS', 'POINTS', 'D', 'GATED', 'REFERENCE']
    return triton.autotune(configs, key=key, reset_to_zero=['grad_value_ptr'] if backward else None)(kernel)


@torch.library.custom_op('mmgate::ms_deform_attn_fused', mutates_args=())
def _fused(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> Tensor:
    output = value.new_empty(logits.shape[0], logits.shape[1], value.shape[2] * value.shape[3])
    unused = points if reference_points is None else reference_points
    tensors = [
        value,
        spatial_shapes,
        level_start_index,
        points,
        unused,
        logits,
        logits if gate is None else gate,
        output,
    ]
    width = 0 if reference_points is None else reference_points.shape[-1]
    sizes = dict(value=value, logits=logits, REFERENCE=width, RESIDUAL=residual, POST=post_softmax)
    _launch(False, tensors, sizes, gate)
    return output


@_fused.register_fake
def _(
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> Tensor:
    return value.new_empty(logits.shape[0], logits.shape[1], value.shape[2] * value.shape[3])


@torch.library.custom_op('mmgate::ms_deform_attn_fused_backward', mutates_args=())
def _fused_backward(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of values, locations, logits and the gate at the size of the logits, in float32."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    grad_value = torch.zeros_like(value, dtype=torch.float32)
    grad_location = torch.empty_like(points, dtype=torch.float32)
    grad_logits = torch.empty_like(logits, dtype=torch.float32)
    grad_gate = torch.empty_like(logits if gate is not None else logits[:0], dtype=torch.float32)
    unused = points if reference_points is None else reference_points
    tensors = [grad.contiguous(), value, spatial_shapes, level_start_index, points, unused, logits]
    tensors += [logits if gate is None else gate, grad_value, grad_location, grad_logits, grad_gate]
    width = 0 if reference_points is None else reference_points.shape[-1]
    sizes = dict(
        value=value, logits=logits, REFERENCE=width, RESIDUAL=residual, POST=post_softmax, SCATTER=not deterministic
    )
    _launch(True, tensors, sizes, gate)
    if deterministic:
        grad_value = _sorted_value_gradient(
            grad,
            value,
            spatial_shapes,
            level_start_index,
            points,
            reference_points,
            logits,
            gate,
            residual,
            post_softmax,
        )
    return grad_value, grad_location, grad_logits, grad_gate


@_fused_backward.register_fake
def _(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    shaped = logits if gate is not None else logits[:0]
    return tuple(torch.empty_like(x, dtype=torch.float32) for x in (value, points, logits, shaped))  # type: ignore[return-value]


def _sorted_value_gradient(
    grad: Tensor,
    value: Tensor,
    spatial_shapes: Tensor,
    level_start_index: Tensor,
    points: Tensor,
    reference_points: Tensor | None,
    logits: Tensor,
    gate: Tensor | None,
    residual: bool,
    post_softmax: bool,
) -> Tensor:
    """The values' gradient without atomics: ``index_put_`` sorts its indices under deterministic algorithms."""
    from .ms_deform_attn import attention_weights, offset_locations

    batch, _, heads, dim = value.shape
    position = 'post_softmax' if post_softmax else 'pre_softmax'
    weights = attention_weights(logits.float(), gate, residual=residual, position=position)  # (B, Q, H, L, P)
    locations = points.float()
    if reference_points is not None:
        locations = offset_locations(locations, reference_points.float(), spatial_shapes)
    size = spatial_shapes.flip(-1)[:, None]  # (L, 1, 2) as (width, height)
    xy = locations * size - 0.5
    corner = xy.floor()
    fraction = xy - corner
    image = torch.arange(batch, device=value.device).view(-1, 1, 1, 1, 1)
    head = torch.arange(heads, device=value.device).view(-1, 1, 1)
    rows = grad.float().view(batch, -1, heads, 1, 1, dim)
    total = torch.zeros(value.shape, dtype=torch.float32, device=value.device)
    for dx, dy in ((0, 0), (1, 0), (0, 1), (1, 1)):
        x, y = corner[..., 0] + dx, corner[..., 1] + dy
        on_map = (x >= 0) & (x < size[..., 0]) & (y >= 0) & (y < size[..., 1])
        token = level_start_index[:, None] + torch.where(on_map, y * size[..., 0] + x, 0).long()
        across = fraction[..., 0] if dx else 1 - fraction[..., 0]
        down = fraction[..., 1] if dy else 1 - fraction[..., 1]
        share = torch.where(on_map, across * down, 0) * weights
        index = torch.broadcast_tensors(image, token, head)
        total.index_put_(tuple(index), share[..., None] * rows, accumulate=True)
    return total


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.residual, ctx.post_softmax = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    value, shapes, starts, points, reference, logits, gate = ctx.saved_tensors
    grad_value, grad_location, grad_logits, grad_gate = torch.ops.mmgate.ms_deform_attn_fused_backward(
        grad, value, shapes, starts, points, reference, logits, gate, ctx.residual, ctx.post_softmax
    )
    grad_points, grad_reference = grad_location, None
    if reference is not None:
        at = reference[:, :, None, :, None].float()  # (B, Q, 1, L, 1, R)
        if reference.shape[-1] == 4:
            share = 0.5 / points.shape[-2]
            grad_points = grad_location * at[..., 2:] * share
            of_box = (grad_location * points * share).sum((2, 4))
            grad_reference = torch.cat([grad_location.sum((2, 4)), of_box], -1).to(reference.dtype)
        else:
            grad_points = grad_location / shapes.flip(-1)[:, None]
            grad_reference = grad_location.sum((2, 4)).to(reference.dtype)
    return (
        grad_value.to(value.dtype),
        None,
        None,
        grad_points.to(points.dtype),
        grad_reference,
        grad_logits.to(logits.dtype),
        None if gate is None else grad_gate.sum_to_size(gate.shape).to(gate.dtype),
        None,
        None,
    )


_fused.register_autograd(_backward, setup_context=_setup_context)

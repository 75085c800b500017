"""GPU backend of deformable attention by mmgate's Triton kernels, as one custom operator with its gradient.

Like the C++ kernel, and unlike the other backends, it takes logits, gate and, if wanted, offsets as they are: neither
locations nor weights are written to memory. On the CPU it runs only in Triton's interpreter (``TRITON_INTERPRET=1``),
for tests.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from mmgate.errors import UnsupportedCall

from .. import triton_backend
from ..backend import Place, arguments_of, operator, save_fields, saved_fields
from ..triton_backend import compile_only, interpreted, launch, needs_backward, power_of_two, target_of
from .samples import Samples, counts_like, gradients_of_fields, in_memory, reference_of
from .uneven import spread

MOST_NUMBERS = 2**31  # an image, for 32-bit offsets
MOST_HEADS = 65_535  # the second axis of a grid
ORDER_BLOCK = 512
# Block sizes, chosen by compiler listings (times: KERNELS.md).
LANE_BYTES = 16  # loaded or added by a lane at once; the values' gradient is always float32
PIECES = 2  # pieces of a row of channels
SCALAR_PIECES = 4  # the most pieces if a lane adds one float at a time; a piece has at least eight lanes, 32 bytes
INTERPRETED_QUERIES = 4  # queries of a program in the interpreter, so that small shapes have several programs


class Cut(NamedTuple):
    """Division of a Triton kernel's work: queries for each program, channels for each lane, number of warps.

    Attributes:
        backward: True for the backward kernel.
        tiled: True if queries go down the columns of bands of their map; they have to be the tokens.
        pieces: Pieces of a row of channels: 2, or 4 in the backward kernel.
        lane: A lane's channels of a piece.
        times: Queries, or pairs, of a lane.
        warps: Warps of a program.
        paired: True if a lane of the backward kernel has two queries at a time.
    """

    backward: bool
    tiled: bool
    pieces: int
    lane: int
    times: int = 1
    warps: int = 4
    paired: bool = True

    def constants(self, dim: int) -> dict[str, int]:
        """Return the compile-time constants for a launch on heads with ``dim`` channels."""
        piece = power_of_two(dim) // self.pieces
        rows = max(1, 32 * self.lane // piece) * self.times * self.warps
        constants = dict(PIECE=piece, PIECES=self.pieces, BLOCK_Q=rows, num_warps=self.warps)
        if self.backward:
            constants |= dict(BLOCK_Q=rows * (1 + self.paired), PAIRED=self.paired)
        return constants


def cut_for(value: Tensor, logits: Tensor, backward: bool) -> Cut:
    """Choose block sizes for the forward or the backward kernel on these tensors.

    A lane has 16 bytes of every piece, of values or, in the backward pass, of float32 sums. It has one channel if the
    GPU adds one float at a time.
    """
    # In an encoder the queries are the tokens, whose neighbours in the map are known.
    tiled = logits.shape[1] == value.shape[1]
    if backward and scalar_reductions(value):
        return Cut(backward, tiled, min(SCALAR_PIECES, power_of_two(value.shape[-1]) // 8), 1)
    return Cut(backward, tiled, PIECES, LANE_BYTES // (4 if backward else value.element_size()))


def scalar_reductions(value: Tensor) -> bool:
    """Return True if the GPU's atomic additions take one float at a time, as before sm_90.

    Neighbouring channels then belong into different lanes.
    """
    if interpreted():
        return False
    target = target_of(value.device)
    return target.backend == 'cuda' and target.arch < 90


def why_not_triton_deformable(value: Tensor) -> str | None:
    """Return the reason why this backend cannot run on ``value``, or None if it can."""
    if torch.are_deterministic_algorithms_enabled():
        return 'it adds up the gradients of the values in no fixed order, and torch.use_deterministic_algorithms is on'
    return triton_backend.why_not_triton(value)


def place_of_triton(value: Tensor) -> Place:
    """Return where ``auto`` looks at this backend: first on GPUs like the one that it was timed on.

    On others for which our checks compile the kernels mmcv's operator comes first: it has run there, our kernels not.
    """
    if triton_backend.is_measured(value):
        return 'first'
    return 'in order' if triton_backend.is_compiled(value) else 'by name'


def advice_for_triton(value: Tensor) -> str | None:
    """Return what to try on a GPU on which nobody has timed this backend, or None."""
    return triton_backend.advice(value, why_not_triton_deformable(value))


def attend(samples: Samples) -> Tensor:
    """Compute deformable attention by the Triton kernels: ``(B, Q, H * D)``.

    Raises:
        UnsupportedCall: Too many values, points or outputs an image for 32-bit offsets, too many heads for a grid, or
            a kernel does not compile.
    """
    samples = _one_point_levels(samples)
    _check_sizes(samples)
    samples = in_memory(samples)
    if needs_backward(samples):
        _compile_backward(samples)
    output, _ = _operator(*samples)
    return output


def _compile_backward(samples: Samples) -> None:
    """Compile the backward kernel for a call, by the dtypes of the tensors that are not there yet.

    Raises:
        UnsupportedCall: It does not compile.
    """
    reference_points = samples.reference_points
    inputs = (samples.value.dtype, torch.float32)
    outputs = (torch.float32, samples.points.dtype, torch.float32, samples.logits.dtype, torch.float32)
    needs_grad = reference_points is not None and reference_points.requires_grad
    _launch(True, inputs, outputs, samples, only_compile=True, GRAD_REFERENCE=needs_grad)


def _one_point_levels(samples: Samples) -> Samples:
    """Give each sample a level with this one point, if levels have different numbers of points.

    The kernels then skip what is not there.
    """
    num_points = samples.num_points
    if num_points is None:
        return samples
    reference_points = reference_of(samples)
    if reference_points is not None:
        reference_points = spread(reference_points.float(), num_points, 2)  # (B, Q, N, R)
        if reference_points.shape[-1] == 4:  # the kernels divide the sizes of boxes by one point
            centres, sizes = reference_points.split(2, -1)
            reference_points = torch.cat([centres, sizes / counts_like(sizes, num_points)], -1)
    return Samples(
        value=samples.value,
        spatial_shapes=spread(samples.spatial_shapes, num_points, 0),
        level_start_index=spread(samples.level_start_index, num_points, 0),
        points=samples.points[..., None, :],  # (B, Q, H, N, 1, 2)
        logits=samples.logits[..., None],
        gate=None if samples.gate is None else samples.gate[..., None],
        residual=samples.residual,
        position=samples.position,
        reference_points=reference_points,
    )


def _check_sizes(samples: Samples) -> None:
    batch, _, heads, dim = samples.value.shape
    sizes = {
        'values': samples.value.shape[1:].numel(),
        'points': samples.points.shape[1:].numel(),
        'outputs': samples.points.shape[1] * heads * dim,
    }
    if samples.reference_points is not None:  # whose gradient is a head's
        sizes['reference points'] = samples.logits.shape[1:4].numel() * samples.reference_points.shape[-1]
    takes = "ms_deform_attn: 'triton' takes"
    for name, size in sizes.items():
        if size >= MOST_NUMBERS:
            raise UnsupportedCall(
                f"{takes} fewer than 2^31 numbers an image, the {name} are {size}; use 'mmcv' or 'torch'."
            )
    if batch * heads > MOST_HEADS:
        raise UnsupportedCall(
            f'{takes} up to {MOST_HEADS} heads of all images, got {batch} x {heads}; use a smaller batch.'
        )


def _launch(
    backward: bool,
    inputs: tuple[Tensor | torch.dtype, ...],
    outputs: tuple[Tensor | torch.dtype, ...],
    samples: Samples,
    *,
    only_compile: bool = False,
    **switches: bool,
) -> None:
    """Launch the forward or the backward kernel with its block sizes.

    Args:
        backward: The kernel of the backward pass.
        inputs: The tensors that this pass alone reads, which come before the samples' in the kernel's signature.
        outputs: The tensors that it writes, which come last.
        samples: Contiguous, but for the gate, with the same number of points for each level.
        only_compile: Compile the kernel, with dtypes of the tensors of this pass, and do not run it.
        **switches: Constants that this pass alone has.
    """
    import triton

    from .deformable_backward import backward_kernel
    from .deformable_kernels import forward_kernel

    value = samples.value
    points = samples.points
    logits = samples.logits
    gate = samples.gate
    reference_points = samples.reference_points
    batch, tokens, heads, dim = value.shape
    _, queries, _, levels, count = logits.shape
    cut = cut_for(value, logits, backward)
    constants: dict[str, Any] = dict(
        LEVELS=levels,
        POINTS=count,
        PADDED=triton.next_power_of_2(levels * count),
        D=dim,
        GATED=gate is not None,
        RESIDUAL=samples.residual,
        POST=samples.position == 'post_softmax',
        TILED=cut.tiled,
        REFERENCE=0 if reference_points is None else reference_points.shape[-1],
        **switches,
        **cut.constants(dim),
    )
    if interpreted():
        constants['BLOCK_Q'] = INTERPRETED_QUERIES
    order: Tensor | torch.dtype = points
    if cut.tiled and only_compile:
        order = torch.int32
    elif cut.tiled:
        order = _tile_order(samples.spatial_shapes, samples.level_start_index, tokens)
    strides: tuple[int, ...] = (0,) * 5
    if gate is not None:
        gate = _within_reach(gate, logits)
        strides = gate.expand(logits.shape).stride()
    tensors = [
        *inputs,
        value,
        samples.spatial_shapes,
        samples.level_start_index,
        order,
        points,
        # A kernel does not read the placeholders of missing tensors.
        points if reference_points is None else reference_points,
        logits,
        logits if gate is None else gate,
        *outputs,
    ]
    grid = (triton.cdiv(queries, constants['BLOCK_Q']), batch * heads)
    kernel = backward_kernel if backward else forward_kernel
    start = compile_only if only_compile else launch
    start(kernel, grid, value.device, *tensors, tokens, queries, heads, *strides, **constants)


def _within_reach(gate: Tensor, logits: Tensor) -> Tensor:
    """Return the gate, or a copy of it if 32-bit offsets do not reach its last number by its strides."""
    strides = gate.expand(logits.shape).stride()
    last = sum((n - 1) * stride for n, stride in zip(logits.shape[1:], strides[1:], strict=True))
    return gate if last < MOST_NUMBERS else gate.contiguous()


def _tile_order(spatial_shapes: Tensor, level_start_index: Tensor, tokens: int) -> Tensor:
    """Return the numbers of all tokens in the order in which the kernels' programs take them as queries."""
    import triton

    from .deformable_kernels import order_kernel

    order = torch.empty(tokens, dtype=torch.int32, device=spatial_shapes.device)
    grid = (triton.cdiv(tokens, ORDER_BLOCK),)
    levels = spatial_shapes.shape[0]
    tensors = (spatial_shapes, level_start_index, order)
    launch(order_kernel, grid, order.device, *tensors, tokens, LEVELS=levels, BLOCK=ORDER_BLOCK)
    return order


def _empty_outputs(*fields: Any) -> tuple[Tensor, Tensor]:
    """Allocate the results of :func:`_operator`, whose arguments this takes."""
    samples = Samples(*fields)
    batch, queries, heads = samples.logits.shape[:3]
    output = samples.value.new_empty(batch, queries, heads * samples.value.shape[3])
    return output, samples.logits.new_empty(batch, queries, heads, dtype=torch.float32)


@operator('ms_deform_attn_fused', _empty_outputs, f'({arguments_of(Samples)}) -> (Tensor, Tensor)')
def _operator(*fields: Any) -> tuple[Tensor, Tensor]:
    """Run the forward kernel on the fields of Samples.

    Returns the output, and log2 of each softmax's sum, ``(B, Q, H)`` in float32.
    """
    samples = Samples(*fields)
    outputs = _empty_outputs(*fields)
    if samples.logits.numel():
        _launch(False, (), outputs, samples)
    return outputs


def _empty_gradients(
    grad: Tensor, lse: Tensor, reference_needs_grad: bool, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Allocate the results of :func:`_gradients`; a tensor is empty if there is no such gradient."""
    samples = Samples(*fields)
    logits = samples.logits
    of_reference = [0]
    if reference_needs_grad and samples.reference_points is not None:
        of_reference = [*logits.shape[:4], samples.reference_points.shape[-1]]
    return (
        torch.empty_like(samples.value, dtype=torch.float32),
        torch.empty_like(samples.points),
        samples.points.new_empty(of_reference, dtype=torch.float32),
        torch.empty_like(logits),
        torch.empty_like(logits[:0] if samples.gate is None else logits, dtype=torch.float32),
    )


@operator(
    'ms_deform_attn_fused_backward',
    _empty_gradients,
    f'(Tensor grad, Tensor lse, bool reference_needs_grad, {arguments_of(Samples)}) '
    '-> (Tensor, Tensor, Tensor, Tensor, Tensor)',
)
def _gradients(
    grad: Tensor, lse: Tensor, reference_needs_grad: bool, *fields: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Run the backward kernel; return the gradients of values, points, reference, logits and gate.

    Those of the reference are by head, and those of the gate by logit, in float32; the caller sums them.
    """
    samples = Samples(*fields)
    gradients = _empty_gradients(grad, lse, reference_needs_grad, *fields)
    of_value = gradients[0]
    of_value.zero_()
    if samples.logits.numel():
        _launch(True, (grad.contiguous(), lse), gradients, samples, GRAD_REFERENCE=reference_needs_grad)
    return gradients


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    _, lse = output
    save_fields(ctx, Samples(*inputs), lse)
    ctx.mark_non_differentiable(lse)


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    samples, (lse,) = saved_fields(ctx, Samples)
    reference_needs_grad = bool(Samples(*ctx.needs_input_grad).reference_points)
    of_value, of_points, of_reference, of_logits, of_gate = _gradients(grad, lse, reference_needs_grad, *samples)
    return gradients_of_fields(
        samples,
        of_value=of_value,
        of_points=of_points,
        of_logits=of_logits,
        of_gate=of_gate,
        of_reference=of_reference if reference_needs_grad else None,
    )


_operator.differentiate(_backward, _setup_context)

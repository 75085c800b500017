"""Registers a sampler of finished locations and weights, the CPU's or mmcv's, as an operator with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..library import Operator

ARGUMENTS = 'Tensor value, Tensor spatial_shapes, Tensor level_start_index, Tensor locations, Tensor weights'


def sampling_operator(name: str, sample: Callable[..., Tensor], gradients: Callable[..., Any]) -> Operator:
    """Return the operator ``mmgate::<name>``.

    Args:
        name: Of the operator; its gradient's ends in ``_backward``.
        sample: ``(value, spatial_shapes, level_start_index, locations, weights) -> (B, Q, H * D)``, weights as logits
            in :func:`mmgate.ops.ms_deform_attn`.
        gradients: ``(grad, *arguments, value_needs_grad)`` to the gradients of value, locations and weights.
    """

    def fake(value: Tensor, shapes: Tensor, starts: Tensor, locations: Tensor, weights: Tensor) -> Tensor:
        return value.new_empty(*weights.shape[:2], value.shape[2] * value.shape[3])

    def fake_gradients(grad: Tensor, value: Tensor, *others: Any) -> tuple[Tensor, ...]:
        return tuple(x.new_empty(x.shape) for x in (value, *others[2:4]))

    schema = f'(Tensor grad, {ARGUMENTS}, bool value_needs_grad) -> (Tensor, Tensor, Tensor)'
    of_inputs = Operator(f'{name}_backward', gradients, fake_gradients, schema)
    operator = Operator(name, sample, fake, f'({ARGUMENTS}) -> Tensor')

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, locations, weights = of_inputs(grad, *ctx.saved_tensors, ctx.needs_input_grad[0])
        return value, None, None, locations, weights

    operator.differentiate(backward, setup_context)
    return operator

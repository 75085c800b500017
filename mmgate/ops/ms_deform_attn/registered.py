"""Register a backend that samples with given locations and weights as a custom operator with its gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from ..custom_op import Operator
from .uneven import Sampler


def sampling_operator(name: str, sample: Sampler, gradients: Callable[..., tuple[Tensor, Tensor, Tensor]]) -> Operator:
    """Make the custom operator ``mmgate::<name>`` from a sampling function and the function of its gradients.

    Args:
        name: Name of the operator; that of its gradient ends in ``_backward``.
        sample: ``(value, spatial_shapes, level_start_index, locations, weights) -> (B, Q, H * D)``, see
            :func:`.reference.sample`; annotated, as the operator's types are read from it.
        gradients: Takes the output's gradient, the arguments of ``sample`` and whether the values need a gradient, and
            returns the gradients of values, locations and weights; annotated as well.
    """

    def fake(
        value: Tensor, spatial_shapes: Tensor, level_start_index: Tensor, locations: Tensor, weights: Tensor
    ) -> Tensor:
        return value.new_empty(*weights.shape[:2], value.shape[2] * value.shape[3])

    def fake_gradients(
        grad: Tensor,
        value: Tensor,
        spatial_shapes: Tensor,
        level_start_index: Tensor,
        locations: Tensor,
        weights: Tensor,
        value_needs_grad: bool,
    ) -> tuple[Tensor, Tensor, Tensor]:
        return value.new_empty(value.shape), locations.new_empty(locations.shape), weights.new_empty(weights.shape)

    gradients_operator = Operator(f'{name}_backward', gradients, fake_gradients)
    operator = Operator(name, sample, fake)

    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        value, locations, weights = gradients_operator(grad, *ctx.saved_tensors, ctx.needs_input_grad[0])
        return value, None, None, locations, weights

    operator.differentiate(backward, setup_context)
    return operator

"""Gates in transformers' models: loaded with them, and our sampler as one of its kernels.

:func:`mmgate.swap_attention` and what follows from it (gates trained alone, saved alone, taken off) work on any model
of transformers' as they do on mm models. This module has what transformers does in a way of its own.
"""

from __future__ import annotations

import os
from typing import Any

from torch import Tensor, nn

from mmgate.layers.base.init import GateInit
from mmgate.ops.ms_deform_attn import cpu
from mmgate.swap import Rules, swap_attention
from mmgate.weight_init import init_gate, standing_swaps


def from_pretrained(model_class: type[nn.Module], path: str | os.PathLike[str], rules: Rules, **options: Any) -> Any:
    """Load a model of transformers' with gates in it, from a vanilla checkpoint or from one that has the gates.

    Args:
        model_class: The model's own class, such as ``transformers.DeformableDetrForObjectDetection``.
        path: What ``model_class.from_pretrained`` takes.
        rules: Of :func:`mmgate.swap_attention`.
        **options: Of ``model_class.from_pretrained``; with ``output_loading_info=True`` its report comes second.

    Returns:
        The model, an instance of ``model_class``. Gates that the checkpoint lacks start as ``init`` of their rule says.

    Raises:
        TypeError: A class that stands for several (``AutoModel...``), or a malformed rule.
        ValueError: The rules do not fit the model, see :func:`mmgate.swap_attention`.
    """
    if not issubclass(model_class, nn.Module):
        raise TypeError(f'{model_class.__name__} is no model; name the class that it stands for.')

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        swap_attention(self, rules)

    wanted = options.pop('output_loading_info', False)
    gated = type(model_class.__name__, (model_class,), dict(__init__=build, __module__=model_class.__module__))
    model, info = gated.from_pretrained(path, output_loading_info=True, **options)  # type: ignore[attr-defined]
    model.__class__ = model_class
    _start_gates(model, set(info['missing_keys']))
    return (model, info) if wanted else model


def _start_gates(model: nn.Module, missing: set[str]) -> None:
    """Start the gates that a checkpoint left out, which a loaded model has as the memory was."""
    for name, module in model.named_modules():
        own = {f'{name}.{key}' for key, _ in module.named_parameters()}
        if isinstance(module, GateInit):
            module.gate_loaded = not missing & own
    for swap in standing_swaps(model):
        init_gate(swap.name, swap.gate)


class MultiScaleDeformableAttention(nn.Module):
    """transformers' kernel of this name, computed by mmgate's CPU operator; see :func:`register_kernel`."""

    can_torch_compile = True
    has_backward = True

    def forward(
        self,
        value: Tensor,
        value_spatial_shapes: Tensor,
        value_spatial_shapes_list: list[tuple[int, int]],
        level_start_index: Tensor,
        sampling_locations: Tensor,
        attention_weights: Tensor,
        im2col_step: int,
    ) -> Tensor:
        """Return ``(B, Q, H d)``; the arguments are transformers'.

        Value ``(B, S, H, d)``, shapes ``(L, 2)`` as (height, width), starts ``(L,)``, locations ``(B, Q, H, L, P, 2)``
        as (x, y) in 0 to 1, weights ``(B, Q, H, L, P)``; the list and the step of the CUDA kernel are not used.
        """
        return cpu.sample(value, value_spatial_shapes, level_start_index, sampling_locations, attention_weights)


def register_kernel() -> None:
    """Let ``kernelize`` of the package ``kernels`` put our sampler into transformers' detectors on a CPU.

    It replaces the sampling in every deformable attention that asks for the kernel ``MultiScaleDeformableAttention``,
    and leaves weights and projections as they are. A swap does more: it forms weights and samples at once.

    Raises:
        ImportError: ``kernels`` is not installed.
    """
    from kernels import Mode, register_kernel_mapping

    register_kernel_mapping({'MultiScaleDeformableAttention': {'cpu': {Mode.FALLBACK: _Here()}}})


class _Here:
    """What ``kernels`` asks for a layer: this one is no download."""

    layer_name = 'MultiScaleDeformableAttention'

    def load(self) -> type[nn.Module]:
        return MultiScaleDeformableAttention

    def __hash__(self) -> int:
        return hash(self.layer_name)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Here)

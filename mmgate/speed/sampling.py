"""Let deformable attention without a gate sample by mmgate's operator, where that was measured faster than mmcv's."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.gates.base.deformable import DeformableAttentionAdapter, DeformableGate
from mmgate.gates.base.mmcv_or_torch import MMCVMultiScaleDeformableAttention
from mmgate.hosts import adapts
from mmgate.ops import ms_deform_attn
from mmgate.ops.backend import candidates
from mmgate.ops.native import advice_for_native


class OperatorAttention(MMCVMultiScaleDeformableAttention):
    """mmcv's ``MultiScaleDeformableAttention`` on mmgate's operator, with the same parameters and results."""

    forward: Any = DeformableAttentionAdapter.forward

    def sample(self, query: Tensor, *inputs: Tensor) -> Tensor:
        """Sample the values at each query's points, weighted by the softmax of the logits: ``(B, Q, H d)``.

        The arguments are those of :meth:`.DeformableAdapter.sample`.
        """
        *given, reference_points = inputs
        return ms_deform_attn(*given, reference_points=reference_points)


# So that it can be recorded and gated.
adapts(DeformableGate, OperatorAttention, like=MMCVMultiScaleDeformableAttention)


def sample_by_operator(model: nn.Module, device: torch.device) -> str:
    """Change the class of mmcv's deformable attention without a gate to :class:`OperatorAttention`, in place.

    Subclasses of mmcv's, which may compute something else, stay as they are.

    Args:
        model: The model.
        device: Where it runs.

    Returns:
        A line for the log: how many modules changed, or why none.
    """
    vanilla = [module for module in model.modules() if type(module) is MMCVMultiScaleDeformableAttention]
    if not vanilla:
        return 'the model has no deformable attention of mmcv without a gate.'
    value = torch.empty(1, 1, 1, 1, device=device)
    first = candidates('ms_deform_attn', value)[0][0]
    if first.name != 'native' and not (first.name == 'triton' and first.place(value) == 'first'):
        reason = advice_for_native(value) or f"on {device} mmgate's operator was not measured faster"
        return f"deformable attention without a gate stays mmcv's: {reason}."
    for module in vanilla:
        module.__class__ = OperatorAttention
    return f"deformable attention without a gate runs on mmgate's operator ({first.name!r}): {len(vanilla)} modules."

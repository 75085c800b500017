"""Convert timm's built-in attention gates into mmgate's, and back.

timm builds an attention with ``gated=True`` from scratch. Its gate is ``sigmoid(x W + b)`` on every channel of the
heads, which is :class:`~mmgate.layers.sdpa_gate.SDPAGate` at G1. Made into ours it can be trained alone, saved
alone, switched off and removed. Made into timm's, the model runs and loads where there is no mmgate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from mmgate.layers.base.gated import gated_modules, is_on, remove_gate
from mmgate.layers.sdpa_gate import SDPAGate
from mmgate.swap import swap_attention

__all__ = ['gates_from_timm', 'gates_to_timm']

TYPE = 'SDPAGatedMultiheadAttention'


def gates_from_timm(model: nn.Module) -> list[str]:
    """Convert the gates that timm has built into a model into mmgate's, in place.

    The model computes what it computed. A gate of timm's without a bias gets one of zeros.

    Args:
        model: A model with attentions of timm's, some of which have their own gate.

    Returns:
        The names of the attentions.

    Raises:
        ValueError: There is no such gate; or one acts after a norm of the heads (``scale_norm``), before which ours is.
            Nothing is changed then.
    """
    own = {
        name: module
        for name, module in model.named_modules()
        if type(module).__module__.startswith('timm.') and isinstance(getattr(module, 'gate', None), nn.Linear)
    }
    if not own:
        raise ValueError(f'{type(model).__name__} has no attention of timm that was built with gated=True.')
    for name, module in own.items():
        _refuse_norm(name, module)
    gates: dict[str, Any] = {name: module._modules.pop('gate') for name, module in own.items()}
    for module in own.values():
        # As timm's attentions have it that are built without a gate.
        module.gate = None
    try:
        swap_attention(model, dict(path=list(own), type=TYPE))
    except ValueError:
        for name, module in own.items():
            del module.gate
            module.gate = gates[name]
        raise
    for name, module in own.items():
        theirs, ours = gates[name], module.gate
        with torch.no_grad():
            ours.gate_weight.copy_(theirs.weight)
            ours.gate_bias.zero_() if theirs.bias is None else ours.gate_bias.copy_(theirs.bias)
        ours.gate_weight.requires_grad_(theirs.weight.requires_grad)
        ours.gate_bias.requires_grad_(theirs.weight.requires_grad)
        ours.loaded = True
    return list(own)


def gates_to_timm(model: nn.Module) -> list[str]:
    """Convert mmgate's gates in a timm model into timm's, in place, so that the model runs without mmgate.

    The model computes what it computed, and its state dict is that of a model built with ``gated=True``, but that a
    projection without a bias has a gate with one where ours is not zero.

    Args:
        model: A model that :func:`gates_from_timm` or :func:`mmgate.swap_attention` has gated.

    Returns:
        The names of the attentions.

    Raises:
        ValueError: A gate that timm's forward does not compute: it is no sigmoid of every channel at G1, or its heads
            are normalised after it (``scale_norm``). Nothing is changed then.
    """
    gated = {name: module for name, module in gated_modules(model) if module.gating.adapter.own_gates}
    if not gated:
        raise ValueError(f'{type(model).__name__} has no gate of mmgate in an attention of timm.')
    for name, module in gated.items():
        gate = module.gate if is_on(module) else module.gating.gate
        reason = _differs(gate)
        if reason:
            raise ValueError(f'the gate of {name} is not one of timm: {reason}.')
        _refuse_norm(name, module)
    for module in gated.values():
        gate = module.gate if is_on(module) else module.gating.gate
        remove_gate(module)
        del module.gate
        module.gate = _linear(gate, has_bias=_projections_have_bias(module))
        for child in ('proj', 'proj_drop'):  # which follow the gate in timm, where optimizers count parameters
            module._modules[child] = module._modules.pop(child)
    return list(gated)


def _linear(gate: SDPAGate, *, has_bias: bool) -> nn.Linear:
    """Return a gate's weights as the linear layer that timm has for a gate, with their device and dtype."""
    weight, bias = gate.gate_weight, gate.gate_bias
    has_bias = has_bias or bool(bias.any())
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=has_bias, device='meta')
    made.weight = weight
    if has_bias:
        made.bias = bias
    return made.train(gate.training)


def _projections_have_bias(module: Any) -> bool:
    joint = getattr(module, 'qkv', None)
    if getattr(module, 'q_bias', None) is not None:  # EVA's, beside a projection without
        return True
    return (module.q_proj if joint is None else joint).bias is not None


def _differs(gate: Any) -> str | None:
    if not isinstance(gate, SDPAGate):
        return f'it is a {type(gate).__name__}'
    wanted = dict(position='G1', form='multiplicative', act='sigmoid', scale=1.0, head_shared=False)
    for name, value in wanted.items():
        if getattr(gate, name) != value:
            return f'{name}={getattr(gate, name)!r}'
    if gate.gate_shape != (gate.num_heads, gate.head_dim):
        return "granularity='headwise'"
    if gate.gate_channels != gate.qdim:
        return f'gate_channels={gate.gate_channels}'
    return None


def _refuse_norm(name: str, module: Any) -> None:
    if not isinstance(getattr(module, 'norm', nn.Identity()), nn.Identity):
        raise ValueError(
            f'{name} normalises its heads (scale_norm); a gate of timm acts after that norm, and one of mmgate before '
            'it.'
        )

"""What tests of gated modules share: torch's attention with a gate, and all that a module holds."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmgate import gate_parameters
from mmgate.gates.base.dense import DenseGate, make_gated

OF_TORCH = ('bias', 'add_bias_kv', 'add_zero_attn', 'kdim', 'vdim', 'batch_first', 'device', 'dtype')


def gated_attention(gate: type[DenseGate], channels: int, heads: int, dropout: float = 0.0, /, **options: Any) -> Any:
    """Return ``torch.nn.MultiheadAttention`` with a gate; options are torch's and the gate's."""
    of_torch = {name: options.pop(name) for name in OF_TORCH if name in options}
    return make_gated(nn.MultiheadAttention(channels, heads, dropout, **of_torch), gate, **options)


def anatomy(model: nn.Module) -> dict[str, Any]:
    """Return by place, in order, what a module and those inside it are and hold: classes, tensors, children, hooks."""
    found: dict[str, Any] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        found[name] = module
        found[f'{name}|class'] = type(module)
        for attribute, value in sorted(vars(module).items()):
            found[f'{name}|{attribute}'] = type(value) if isinstance(value, Tensor) else value
            if isinstance(value, dict):
                found.update({f'{name}|{attribute}|{key}': one for key, one in value.items()})
    return found


def assert_same_anatomy(actual: dict[str, Any], expected: dict[str, Any]) -> None:
    """Compare what :func:`anatomy` returned, object by object."""
    assert list(actual) == list(expected)
    assert not [place for place, one in expected.items() if actual[place] is not one]


def learning(model: nn.Module) -> list[str]:
    """Return the names of the gates' parameters that have a gradient."""
    return [name for name, p in gate_parameters(model).items() if p.grad is not None and p.grad.abs().sum() > 0]

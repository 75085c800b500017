"""A gate held by a copy of its host, for hosts whose constructors keep too little of what they were given."""

from __future__ import annotations

from copy import deepcopy
from typing import Any, TypeVar

from torch import nn

from mmgate.hosts.core import gate_alone
from mmgate.layers.base.dense import GatedMultiheadAttention

Kind = TypeVar('Kind', bound=nn.Module)


def held_by(
    kind: type[Kind],
    host: nn.Module,
    gate: type[GatedMultiheadAttention],
    channels: int,
    heads: int,
    dropout: float,
    /,
    *,
    width: int | None = None,
    **options: Any,
) -> Kind:
    """Return a copy of ``host`` as its subclass ``kind``, which finds the gate's core as ``gate``.

    Args:
        kind: Subclass of the host's class that attends with a gate between the host's projections.
        host: The module to be replaced.
        gate: The gate.
        channels: Of the heads together.
        heads: Of the attention.
        dropout: Probability of dropping an attention weight.
        width: Channels of the inputs and the output, where they are not those of the heads.
        **options: Of the gate.

    Raises:
        ValueError: The gate acts behind the output projection, which is not as wide as the heads.
    """
    if width in (None, channels):
        core = gate.core(channels, heads, dropout, batch_first=True, **options)
    else:
        inputs: dict[str, Any] = dict(qdim=width, kdim=width, vdim=width)
        core = gate.core(channels, heads, dropout, batch_first=True, **inputs, **options)
        if core.finishes:
            raise ValueError(
                f'{gate.__name__} acts behind an output projection as wide as the heads, but that of this '
                f'{type(host).__name__} goes from {channels} to {width} channels.'
            )
    held: Any = deepcopy(host)
    held.__class__ = kind
    held.gate = gate_alone(core)
    return held

"""The arguments of PLuG attention, which the operator checks once and every backend gets."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from ..layout import POSITIONS, check_layout

Modulation = Callable[[Tensor], Tensor]


class Pairs(NamedTuple):
    """Arguments of PLuG attention; see :func:`mmgate.ops.plug_attention` for their meanings.

    Attributes:
        query: ``(B, H, N, d)``.
        key: ``(B, H, M, d)``.
        value: ``(B, H, M, e)``.
        gate_query: ``(B, H|1, N, g)``.
        gate_key: ``(B, H|1, M, g)``.
        modulation: Elementwise function from raw gates to gates.
        bias: Four axes that broadcast to ``(B, H, N, M)``, or None.
        residual: True for the factor ``1 + G``, False for ``G``.
        position: One of :data:`POSITIONS`.
        dropout: Probability of dropping an attention weight.
    """

    query: Tensor
    key: Tensor
    value: Tensor
    gate_query: Tensor
    gate_key: Tensor
    modulation: Modulation
    bias: Tensor | None = None
    residual: bool = True
    position: str = 'pre_softmax'
    dropout: float = 0.0


def check(pairs: Pairs) -> None:
    """Check that pairs are such as a backend can take; each backend checks what it alone does not support.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: See :func:`mmgate.ops.plug_attention`.
    """
    if pairs.position not in POSITIONS:
        raise ValueError(f'position={pairs.position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    check_layout(
        ('query', pairs.query, 'B H N d'),
        ('key', pairs.key, 'B H M d'),
        ('value', pairs.value, 'B H M e'),
        ('gate_query', pairs.gate_query, 'B G N g'),
        ('gate_key', pairs.gate_key, 'B G M g'),
        filled='d g',
    )
    # A bias may have another dtype.
    check_layout(
        ('query', pairs.query, 'B H N d'),
        ('key', pairs.key, 'B H M d'),
        ('bias', pairs.bias, 'B|1 H|1 N|1 M|1'),
        one_dtype=False,
    )
    heads = pairs.query.shape[1]
    if pairs.gate_query.shape[1] not in (1, heads):
        raise ValueError(f'gate_query must have 1 head or the {heads} of query, got {pairs.gate_query.shape[1]}.')

r"""The operator PLuG attention: softmax attention whose logits are multiplied by a gate for each pair.

Layout: query (B, H, N, d); key (B, H, M, d); value (B, H, M, e); gate_query (B, H|1, N, g); gate_key (B, H|1, M, g);
mask bias broadcastable to (B, H, N, M); output (B, H, N, e).
"""

from __future__ import annotations

from torch import Tensor

from ..backend import OPERATORS, Backend, check_backend, outside_graphs, run_operator
from ..native import advice_for_native, why_not_native
from . import chunked, reference, triton_dense
from .reference import Modulation, Pairs, attention_map, check, raw_gates

__all__ = ['attention_map', 'check_gate_backend', 'plug_attention', 'raw_gates']


@outside_graphs
def plug_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    gate_query: Tensor,
    gate_key: Tensor,
    modulation: Modulation,
    bias: Tensor | None = None,
    *,
    residual: bool = True,
    position: str = 'pre_softmax',
    dropout: float = 0.0,
    backend: str | None = None,
) -> Tensor:
    r"""Compute PLuG attention, with logits :math:`A \odot (1 + G)`, :math:`A = QK^T/\sqrt d`, and a gate G.

    The gate of each pair is :math:`G = m(Q_g K_g^T/\sqrt g)`, with the modulation m.

    The bias (masks) is added after the gate, so that a masked pair stays masked.

    Args:
        query: Queries ``(B, H, N, d)``, floating point.
        key: Keys ``(B, H, M, d)``.
        value: Values ``(B, H, M, e)``, most often e = d.
        gate_query: The gate's queries Qg, ``(B, 1, N, g)`` if the heads share the gate, or ``(B, H, N, g)``.
        gate_key: The gate's keys Kg, ``(B, 1, M, g)`` or ``(B, H, M, g)``.
        modulation: Elementwise function m from raw gates to gates G.
        bias: Bias of the gated logits, broadcastable to ``(B, H, N, M)``. No row may be -inf throughout. No other
            argument broadcasts.
        residual: True multiplies by ``1 + G``, False by ``G``.
        position: ``'pre_softmax'`` gates the logits, ``'post_softmax'`` the attention weights.
        dropout: Probability of dropping an attention weight.
        backend: ``'torch'`` (the reference, with all N x M maps in memory), ``'chunked'`` (rows in chunks, recomputed
            in the backward pass), ``'native'`` (chunks whose softmax is a C++ loop, CPU), ``'triton'`` (without a map
            in memory, CUDA) or ``'auto'``, see :mod:`mmgate.ops.backend`.

    Returns:
        ``(B, H, N, e)``.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices do not go together, there are no channels, or the backend is unknown or
            cannot run here.

    Source: PLuG attention, Eq. 2 to 7, Eq. 17 for ``'post_softmax'``.
    """
    if isinstance(bias, Tensor):
        bias = bias[(None,) * (4 - bias.dim())]
    pairs = Pairs(
        query=query,
        key=key,
        value=value,
        gate_query=gate_query,
        gate_key=gate_key,
        modulation=modulation,
        bias=bias,
        residual=residual,
        position=position,
        dropout=dropout,
    )
    check(pairs)
    return run_operator('plug_attention', query, backend, pairs)


def check_gate_backend(name: str, modulation: Modulation, gate_width: int, residual: bool, position: str) -> None:
    """Raise ConfigError for an unknown backend, and for a gate that the backend cannot compute.

    Args:
        name: Name of the backend, or ``'auto'``.
        modulation: Elementwise function from raw gates to gates.
        gate_width: Channels g of the gate's queries and keys.
        residual: See :func:`plug_attention`.
        position: See :func:`plug_attention`.

    Raises:
        ConfigError: The message has the reason.
    """
    check_backend('plug_attention', name)
    if name == 'triton':
        triton_dense.check_gate(modulation, gate_width, residual, position)


OPERATORS['plug_attention'] = (
    Backend(
        'native',
        chunked.attend_native,
        why_not_native,
        traceable=False,
        description="rows in chunks, by mmgate's own C++ loop",
        advice=advice_for_native,
    ),
    Backend('chunked', chunked.attend, description='rows in chunks'),
    Backend('torch', reference.attend, exportable=True, description='the reference, with whole maps'),
    Backend(
        'triton',
        triton_dense.attend,
        triton_dense.why_not_triton_dense,
        place=triton_dense.place_of_triton,
        description='Triton kernels without a map',
        advice=triton_dense.advice_for_triton,
    ),
)

r"""PLuG attention: softmax attention whose logits are gated pair by pair.

Layout: query (B, H, N, d); key, value (B, H, M, d); gate_query (B, H|1, N, g); gate_key (B, H|1, M, g);
mask bias broadcastable to (B, H, N, M); output (B, H, N, d).
"""

from __future__ import annotations

from torch import Tensor

from ..dispatch import Backend, find, select
from ..library import outside_graphs
from . import chunked, reference, triton
from .reference import Modulation, attention_map

__all__ = ['BACKENDS', 'attention_map', 'check_backend', 'plug_attention']


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
    r"""Attend with logits :math:`A \odot (1 + G)`, :math:`A = QK^T/\sqrt d`, :math:`G = m(Q_g K_g^T/\sqrt g)`.

    The bias (masks) is added after the gate, so that a masked pair stays masked.

    Args:
        query: ``(B, H, N, d)``, floating point.
        key: ``(B, H, M, d)``.
        value: ``(B, H, M, d)``.
        gate_query: ``(B, 1, N, g)``, shared by the heads, or ``(B, H, N, g)``.
        gate_key: ``(B, 1, M, g)`` or ``(B, H, M, g)``.
        modulation: Elementwise map from raw gate logits to the gate G.
        bias: Added to the gated logits; broadcasts to ``(B, H, N, M)``. No row may be -inf throughout.
        residual: Multiply by ``1 + G``, else by ``G``.
        position: Gate the logits (``'pre_softmax'``) or the attention weights (``'post_softmax'``).
        dropout: Probability of dropping an attention weight.
        backend: ``'torch'`` (reference, holds all N x M maps), ``'chunked'`` (rows in chunks, recomputed in the
            backward pass), ``'triton'`` (no map at all, CUDA) or ``'auto'``. ``MMGATE_PLUG_ATTENTION`` has the last
            word.

    Returns:
        ``(B, H, N, d)``.

    Raises:
        ValueError: An unknown backend.

    Source: PLuG attention, Eq. 2 to 7, Eq. 17 for ``'post_softmax'``.
    """
    run = select('plug_attention', BACKENDS, query, backend).run
    return run(
        query, key, value, gate_query, gate_key, modulation, bias, residual=residual, position=position, dropout=dropout
    )


def check_backend(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``'auto'`` nor the name of a backend."""
    if name != 'auto':
        find('plug_attention', BACKENDS, name)


BACKENDS = (
    Backend('chunked', lambda query: None, chunked.attend),
    Backend('torch', lambda query: None, reference.attend),
    # Not in 'auto', which never passes the reference, until a GPU has measured it.
    Backend('triton', triton.why_not, triton.attend),
)

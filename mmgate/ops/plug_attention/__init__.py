r"""PLuG attention: softmax attention whose logits are gated pair by pair.

Layout: query (B, H, N, d); key (B, H, M, d); value (B, H, M, e); gate_query (B, H|1, N, g); gate_key (B, H|1, M, g);
mask bias broadcastable to (B, H, N, M); output (B, H, N, e).
"""

from __future__ import annotations

from torch import Tensor

from ..backend import Backend, find, register, run
from ..layout import broadcasts_to, check_kinds
from ..library import outside_graphs
from . import chunked, reference, triton
from .reference import Modulation, attention_map

POSITIONS = ('pre_softmax', 'post_softmax')
SIZES = (1 << 20, 1 << 26)  # pairs of a small and a medium call: of 256 and 2048 tokens, 8 heads, 2 images

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
        value: ``(B, H, M, e)``, most often e = d.
        gate_query: ``(B, 1, N, g)``, shared by the heads, or ``(B, H, N, g)``.
        gate_key: ``(B, 1, M, g)`` or ``(B, H, M, g)``.
        modulation: Elementwise map from raw gate logits to the gate G.
        bias: Added to the gated logits; broadcasts to ``(B, H, N, M)``. No row may be -inf throughout. Nothing else
            broadcasts.
        residual: Multiply by ``1 + G``, else by ``G``.
        position: Gate the logits (``'pre_softmax'``) or the attention weights (``'post_softmax'``).
        dropout: Probability of dropping an attention weight.
        backend: ``'torch'`` (reference, holds all N x M maps), ``'chunked'`` (rows in chunks, recomputed in the
            backward pass), ``'triton'`` (no map at all, CUDA) or ``'auto'``. ``MMGATE_PLUG_ATTENTION`` has the last
            word.

    Returns:
        ``(B, H, N, e)``.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: Shapes, dtypes or devices that do not go together, no channels, or a backend that is unknown or
            cannot run here.

    Source: PLuG attention, Eq. 2 to 7, Eq. 17 for ``'post_softmax'``.
    """
    _check(query, key, value, gate_query, gate_key, bias, position)
    if bias is not None:
        bias = bias[(None,) * (4 - bias.dim())]
    arguments = (query, key, value, gate_query, gate_key, modulation, bias, residual, position, dropout)
    batch, heads, rows, _ = query.shape
    work = (batch * heads * rows * key.shape[2], *SIZES)
    return run('plug_attention', BACKENDS, arguments, backend, work)


def _check(
    query: Tensor, key: Tensor, value: Tensor, gate_query: Tensor, gate_key: Tensor, bias: Tensor | None, position: str
) -> None:
    if position not in POSITIONS:
        raise ValueError(f'position={position!r} is unknown; choose one of {", ".join(POSITIONS)}.')
    check_kinds(dict(query=query, key=key, value=value, gate_query=gate_query, gate_key=gate_key))
    check_kinds(dict(query=query, bias=bias), one_dtype=False)
    if query.dim() != 4 or key.dim() != 4 or gate_query.dim() != 4:
        raise ValueError(
            'query must be (B, H, N, d), key (B, H, M, d) and gate_query (B, H or 1, N, g), '
            f'got {tuple(query.shape)}, {tuple(key.shape)} and {tuple(gate_query.shape)}.'
        )
    batch, heads, rows, dim = query.shape
    columns = key.shape[2]
    gate_heads, width = gate_query.shape[1], gate_query.shape[3]
    if gate_heads not in (1, heads):
        raise ValueError(f'gate_query must have 1 head or the {heads} of query, got {gate_heads}.')
    for name, x, expected in (
        ('key', key, (batch, heads, columns, dim)),
        ('value', value, (batch, heads, columns, *value.shape[-1:])),
        ('gate_query', gate_query, (batch, gate_heads, rows, width)),
        ('gate_key', gate_key, (batch, gate_heads, columns, width)),
    ):
        if tuple(x.shape) != expected:
            raise ValueError(
                f'{name} must be {expected} beside query {tuple(query.shape)}, key {tuple(key.shape)} and gate_query '
                f'{tuple(gate_query.shape)}, got {tuple(x.shape)}. Expand what is to be shared; only bias broadcasts.'
            )
    if not dim or not width:
        raise ValueError(
            f'query and gate_query need a channel, got {tuple(query.shape)} and {tuple(gate_query.shape)}.'
        )
    full = (batch, heads, rows, columns)
    if bias is not None and not broadcasts_to(bias.shape, full):
        raise ValueError(f'bias {tuple(bias.shape)} does not broadcast to (B, H, N, M) = {full}.')


def check_backend(name: str) -> None:
    """Raise ValueError if ``name`` is neither ``'auto'`` nor the name of a backend."""
    if name != 'auto':
        find('plug_attention', BACKENDS, name)


BACKENDS = register(
    'plug_attention',
    Backend('chunked', lambda query: None, chunked.attend, words='rows in chunks'),
    Backend('torch', lambda query: None, reference.attend, plain=True, words='the reference, with whole maps'),
    # No GPU has run it yet: 'auto' takes it where a calibration says so.
    Backend('triton', triton.why_not, triton.attend, in_order=False, words='Triton kernels without a map'),
)

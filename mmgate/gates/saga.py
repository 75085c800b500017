"""SAGA (selective adaptive gating): linear attention whose keys, values and output are gated."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.linear import LinearGate
from mmgate.gates.base.map import HeightWidth, map_attention
from mmgate.notes import note
from mmgate.ops.gated_linear import gated_linear_attention
from mmgate.ops.linear_attention import key_value_map

from .parts.options import check_option

GATES = ('gate_k', 'gate_v', 'gate_out')


class SAGAGate(LinearGate):
    """SAGA's linear attention over an H x W map, with gates A, B, G: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``.

    ``A = sigmoid(x Wa)`` and ``B = sigmoid(x Wb)`` gate keys and values in :meth:`attend`, whose product is
    ``mmgate/ops/gated_linear.py``. ``mix`` of the base class adds DWC(V), a depthwise convolution, and multiplies by
    ``G = x Wg``. The host's layers compute Q, K, V and project the result.

    The paper leaves the scale open. Here K^T V is scaled by 1 / N, as 1 / sqrt(N) on each factor, and Q by 1 / sqrt(d),
    so that the output does not grow with the number of tokens. Two more points fit the paper's
    parameter counts, which leave their details open. A learnt position encoding is added to K; it is resized bilinearly
    for a map of another size than in pre-training. The 5 x 5 depthwise convolution has d channels, which the heads
    share.

    Args:
        sizes: Sizes of the host's attention.
        gate: True gates keys and values (Table 4, Gate_Aug).
        dwc: True adds the convolved values (Table 4, DWC).
        output_augmentation: True multiplies by G (Table 4, Output_Aug).
        scale_by_tokens: True (default) scales K^T V by 1 / N and Q by 1 / sqrt(d). False scales neither, as
            in Eq. 10 as printed; the output then grows with the number of tokens and soon leaves half precision.
        **kwargs: Arguments of :class:`~mmgate.gates.base.linear.LinearGate`.

    Raises:
        ConfigError: ``qk_scale`` is given together with ``scale_by_tokens=False``.

    Source: SAGA, Eq. 9 and 10, Table 4.
    """

    gate_layers = GATES
    has_positions = True
    shares_dwc = True

    def __init__(
        self,
        sizes: Sizes,
        *,
        gate: bool = True,
        dwc: bool = True,
        output_augmentation: bool = True,
        scale_by_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        super().__init__(sizes, dwc=5 if dwc else 0, **kwargs)
        check_option('scale_by_tokens', scale_by_tokens, (True, False))
        if not scale_by_tokens and self.scale != self.head_dim**-0.5:
            raise ConfigError(
                f'scale_by_tokens=False is Eq. 10 as printed, which scales nothing, but qk_scale={self.scale}; leave '
                'one of the two out.'
            )
        self.scale_by_tokens = scale_by_tokens
        if not gate:
            self.gate_k = self.gate_v = None
        if not output_augmentation:
            self.gate_out = None

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Compute linear attention with gated keys and values, and return the tokens ``(B, N, C)``."""
        gate_k = self._gate_of('gate_k', x)
        gate_v = self._gate_of('gate_v', x)
        q, k, v = (self.split_heads(t) for t in (q, k, v))

        def gated_map() -> Tensor:
            return key_value_map(k if gate_k is None else k * gate_k, v if gate_v is None else v * gate_v)

        note(self, 'kv', gated_map)
        scale = self.scale if self.scale_by_tokens else 1.0
        out = gated_linear_attention(q, k, v, gate_k, gate_v, scale=scale, scale_by_tokens=self.scale_by_tokens)
        return self.merge_heads(out)

    def _gate_of(self, name: str, x: Tensor) -> Tensor | None:
        """Compute the gate of keys or of values, ``(B, H, N, d)``, or None without it."""
        layer = getattr(self, name)
        if layer is None:
            return None
        gate = layer(x).sigmoid()
        note(self, name, gate, 'channels', unchanged=1)
        return self.split_heads(gate)


SAGAAttention = map_attention('SAGAAttention', SAGAGate)

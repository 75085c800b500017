"""SAGA: selective adaptive gating for linear attention."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.gated_linear_attention import gated_linear_attention
from mmgate.registry import MODELS

from .gml import check_option
from .linear.base import LinearGate

GATES = ('gate_k', 'gate_v', 'gate_out')


class SAGAGate(LinearGate):
    """Gated linear attention over an H x W map: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``.

    ``A = sigmoid(x Wa)`` and ``B = sigmoid(x Wb)`` gate keys and values, ``G = x Wg`` the output. K^T V is scaled by
    1 / N, as 1 / sqrt(N) on each factor, and Q by 1 / sqrt(d), so that the output does not grow with the image; the
    paper leaves that open. What else it leaves open follows from its parameter counts: a learnt position encoding is
    added to K, resized bilinearly where the map is not the one of pre-training, and the 5 x 5 depthwise convolution has
    d channels, shared by the heads.

    Args:
        map_size: Height and width of the map in pre-training.
        gate: Gate keys and values (Table 4, Gate_Aug).
        dwc: Add the convolved values (Table 4, DWC).
        output_augmentation: Multiply by G (Table 4, Output_Aug).
        position_encoding: Add the learnt position encoding to K.
        scale_by_tokens: Scale K^T V by 1 / N and Q by 1 / sqrt(d), as above (default). False: by neither, which is
            Eq. 10 as printed. The output then grows with the number of tokens, and leaves half precision early.
        **kwargs: Those of :class:`~mmgate.layers.linear.base.LinearGate`.

    Raises:
        ValueError: A ``qk_scale`` beside ``scale_by_tokens=False``.

    Source: SAGA, Eq. 9 and 10, Table 4.
    """

    gates = GATES

    def __init__(
        self,
        sizes: Sizes,
        *,
        map_size: tuple[int, int],
        gate: bool = True,
        dwc: bool = True,
        output_augmentation: bool = True,
        position_encoding: bool = True,
        scale_by_tokens: bool = True,
        **kwargs: Any,
    ) -> None:
        size = map_size if position_encoding else None
        super().__init__(sizes, dwc=5 if dwc else 0, dwc_shared=True, map_size=size, **kwargs)
        check_option('scale_by_tokens', scale_by_tokens, (True, False))
        if not scale_by_tokens and self.scale != self.head_dim**-0.5:
            raise ValueError(
                f'scale_by_tokens=False is Eq. 10 as printed, which scales nothing, but qk_scale={self.scale}; leave '
                'one of the two out.'
            )
        self.scale_by_tokens = scale_by_tokens
        if not gate:
            self.gate_k = self.gate_v = None
        if not output_augmentation:
            self.gate_out = None
        self.gate_readings = {name: 'channels' for name in GATES if getattr(self, name) is not None}

    def read_gate(self, name: str, *inputs: Tensor) -> Tensor:
        """Return one of the three gates ``(B, N, C)``, those of keys and values behind their sigmoid."""
        gate = super().read_gate(name, *inputs)
        return gate if name == 'gate_out' else gate.sigmoid()

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend linearly with gated keys and values."""
        gate_k = None if self.gate_k is None else self.split_heads(self.gate_k(x).sigmoid())
        gate_v = None if self.gate_v is None else self.split_heads(self.gate_v(x).sigmoid())
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        scale = self.scale if self.scale_by_tokens else 1.0
        out = gated_linear_attention(q, k, v, gate_k, gate_v, scale=scale, scale_by_tokens=self.scale_by_tokens)
        return self.merge_heads(out)

    def key_features(self, q: Tensor, k: Tensor, hw_shape: Size) -> Tensor:
        """Return the features of the keys ``(B, H, N, d)``."""
        return self.split_heads(k)


@MODELS.register_module()
class SAGAAttention(GatedMapAttention):
    """Projections with :class:`SAGAGate`, whose options it takes."""

    gate_type = SAGAGate

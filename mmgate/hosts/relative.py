"""Attentions with decomposed relative positions as hosts; ViTDet and mmpretrain's SAM have the same attributes."""

from __future__ import annotations

from typing import Any

from mmgate.hosts.core import gate_alone
from mmgate.hosts.relative_positions import GatedRelativeAttention
from mmgate.hosts.table import Host, adapts
from mmgate.layers.base.dense import GatedMultiheadAttention


def adapt_relative(*hosts: Host) -> None:
    """Let dense gates replace ``hosts``."""

    @adapts(GatedMultiheadAttention, *hosts)
    def relative_attention(gate: type[GatedMultiheadAttention], host: Any, /, **options: Any) -> GatedRelativeAttention:
        """Hold the gate's parameters beside the host's own."""
        core = gate.core(host.qkv.in_features, host.num_heads, batch_first=True, **options)
        tables = (host.rel_pos_h, host.rel_pos_w) if host.use_rel_pos else ()
        return GatedRelativeAttention(gate_alone(core), host.qkv, host.proj, *tables)

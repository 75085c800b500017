"""Which gate can replace which host class, and how it takes over the host's sizes.

A downstream project adds its own pair by decorating a function with :func:`adapts`.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from typing import Any

from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones import pvt
from mmdet.models.backbones import swin as mmdet_swin
from mmseg.models.backbones import swin as mmseg_swin
from torch import nn

from mmgate.layers import (
    AgentAttention,
    DifferentialGatedMultiheadAttention,
    PLuGMultiheadAttention,
    PLuGMultiScaleDeformableAttention,
    SAGAAttention,
    SDPAGatedMultiheadAttention,
)
from mmgate.layers.dense import GatedMultiheadAttention
from mmgate.layers.map_attention import MapAttention
from mmgate.layers.window import GatedWindowMSA

Adapter = Callable[..., nn.Module]
_ADAPTERS: dict[tuple[type, type], Adapter] = {}


def adapts(gate: type[nn.Module], *hosts: type[nn.Module]) -> Callable[[Adapter], Adapter]:
    """Register a function ``(host module, **options) -> gate module`` for every class in ``hosts``.

    The gate has to keep the host's parameter names; the swap fills them with the host's values.
    """

    def register(adapter: Adapter) -> Adapter:
        for host in hosts:
            _ADAPTERS[gate, host] = adapter
        return adapter

    return register


def adapter_for(gate: type, host: nn.Module) -> Adapter | None:
    """Return the adapter that replaces ``host`` by a ``gate``, or None.

    The class has to match exactly: a subclass may compute something else, which a swap would lose in silence.
    """
    return _ADAPTERS.get((gate, type(host)))


def gates_for(host: nn.Module) -> list[type]:
    """Return the gates that can replace ``host``."""
    return [gate for gate, host_class in _ADAPTERS if host_class is type(host)]


def hosts_of(gate: type) -> list[type]:
    """Return the host classes that ``gate`` can replace; empty if it is no gate."""
    return [host_class for candidate, host_class in _ADAPTERS if candidate is gate]


@adapts(PLuGMultiScaleDeformableAttention, MultiScaleDeformableAttention)
def _plug_deformable(host: MultiScaleDeformableAttention, **options: Any) -> PLuGMultiScaleDeformableAttention:
    return PLuGMultiScaleDeformableAttention(
        host.embed_dims,
        host.num_heads,
        host.num_levels,
        host.num_points,
        im2col_step=host.im2col_step,
        dropout=host.dropout.p,
        batch_first=host.batch_first,
        norm_cfg=host.norm_cfg,
        init_cfg=host.init_cfg,
        value_proj_ratio=host.value_proj.out_features / host.embed_dims,
        **options,
    )


def _adapt_dense(gate: type[GatedMultiheadAttention]) -> None:
    """Let ``gate`` replace mmcv's MultiheadAttention, and its core torch's, under the gate's one name."""

    @adapts(gate, nn.MultiheadAttention)
    def torch_host(host: nn.MultiheadAttention, **options: Any) -> nn.Module:
        extras = dict(
            add_bias_kv=host.bias_k is not None,
            add_zero_attn=host.add_zero_attn,
            kdim_or_vdim=not host._qkv_same_embed_dim,
        )
        refused = [name for name, used in extras.items() if used]
        if refused:
            raise ValueError(f'{gate.__name__} does not replace a MultiheadAttention with {", ".join(refused)}.')
        has_bias = host.in_proj_bias is not None
        sizes = (host.embed_dim, host.num_heads, host.dropout)
        return gate.core(*sizes, bias=has_bias, batch_first=host.batch_first, **options)

    @adapts(gate, MultiheadAttention)
    def mmcv_host(host: MultiheadAttention, **options: Any) -> nn.Module:
        torch_host(host.attn, **options)  # refuses what the core does not have
        gated = gate(
            host.embed_dims,
            host.num_heads,
            host.attn.dropout,
            host.proj_drop.p,
            init_cfg=host.init_cfg,
            batch_first=host.batch_first,
            bias=host.attn.in_proj_bias is not None,
            **options,
        )
        gated.dropout_layer = host.dropout_layer
        return gated

    @adapts(gate, pvt.SpatialReductionAttention)
    def pvt_host(host: pvt.SpatialReductionAttention, **options: Any) -> nn.Module:
        gated = deepcopy(host)
        gated.attn = torch_host(host.attn, **options)
        return gated

    @adapts(gate, mmdet_swin.WindowMSA, mmseg_swin.WindowMSA)
    def window_host(host: mmdet_swin.WindowMSA, **options: Any) -> nn.Module:
        if host.scale != (host.embed_dims // host.num_heads) ** -0.5:
            raise ValueError(f'{gate.__name__} does not replace a WindowMSA with a qk_scale of its own.')
        sizes = (host.embed_dims, host.num_heads, host.attn_drop.p)
        core = gate.core(*sizes, bias=host.qkv.bias is not None, batch_first=True, **options)
        return GatedWindowMSA(core, host.window_size, host.proj_drop.p)


def adapt_map(gate: type[MapAttention]) -> None:
    """Let ``gate`` replace PVT's attention without spatial reduction, and Swin's windows by the whole map."""

    @adapts(gate, pvt.SpatialReductionAttention)
    def pvt_host(host: pvt.SpatialReductionAttention, **options: Any) -> nn.Module:
        if host.sr_ratio != 1:
            raise ValueError(
                f'{gate.__name__} reduces no map, but this attention has sr_ratio={host.sr_ratio}; '
                'set sr_ratios=(1, 1, 1, 1) in the backbone.'
            )
        module = gate(
            host.embed_dims,
            host.num_heads,
            qkv_bias=host.attn.in_proj_bias is not None,
            attn_drop=host.attn.dropout,
            proj_drop=host.proj_drop.p,
            **options,
        )
        module.dropout_layer = host.dropout_layer
        return module

    @adapts(gate, mmdet_swin.ShiftWindowMSA, mmseg_swin.ShiftWindowMSA)
    def swin_host(host: mmdet_swin.ShiftWindowMSA, **options: Any) -> nn.Module:
        windows = host.w_msa
        module = gate(
            windows.embed_dims,
            windows.num_heads,
            qkv_bias=windows.qkv.bias is not None,
            qk_scale=windows.scale,
            attn_drop=windows.attn_drop.p,
            proj_drop=windows.proj_drop.p,
            **options,
        )
        module.dropout_layer = host.drop
        return module


for _gate in (PLuGMultiheadAttention, SDPAGatedMultiheadAttention, DifferentialGatedMultiheadAttention):
    _adapt_dense(_gate)
for _map_gate in (AgentAttention, SAGAAttention):
    adapt_map(_map_gate)

"""Adapters of torch's MultiheadAttention, and of attention over a reduced map that holds one (PVT, MiT, Twins)."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor, nn

from mmgate.hosts.table import adapts, adapts_inside
from mmgate.layers.base.dense import DenseGate, DenseHost, GatedTorchAttention
from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import MapGate, MapHost, Size

# The attribute of torch's TransformerEncoder that keeps its ``use_nested_tensor`` while it is gated.
VANILLA_CHOICE = 'use_nested_tensor_without_gates'

adapts(DenseGate, nn.MultiheadAttention)(GatedTorchAttention)
# PEFT's layer around torch's module adds its updates to the weights before it calls it.
adapts_inside(DenseGate, 'base_layer', 'peft.tuners.lora.layer.MultiheadAttention')


class ReducedAttention(Protocol):
    """Attributes of an attention over a reduced map that give its sizes."""

    embed_dims: int
    num_heads: int
    attn: nn.MultiheadAttention


class GatedReducedAttention(MapHost):
    """Adapter of PVT's, MiT's and Twins' attention over a reduced map, for gates that need no reduced one."""

    leaves_out = ('sr', 'norm')
    old_names = {
        'qkv.weight': 'attn.in_proj_weight',
        'qkv.bias': 'attn.in_proj_bias',
        'proj.': 'attn.out_proj.',
    }

    attn: nn.MultiheadAttention
    proj_drop: nn.Module
    dropout_layer: nn.Module

    @classmethod
    def sizes(cls, host: ReducedAttention) -> Sizes:
        """Return the sizes of a host, by the module of torch's in it."""
        bias = host.attn.in_proj_bias is not None
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn.dropout, bias=bias)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project by the weights of torch's module in the host."""
        q, k, v = nn.functional.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, -1)
        return q, k, v

    def finish(self, x: Tensor) -> Tensor:
        """Project the output and apply the host's dropout."""
        return self.dropout_layer(self.proj_drop(self.attn.out_proj(x)))

    def forward(self, x: Tensor, hw_shape: Size, identity: Tensor | None = None) -> Tensor:
        """Attend over ``(B, N, C)`` tokens of a map of ``hw_shape``, and add ``identity`` if it is given."""
        return self.attend(x, hw_shape, identity)


def switch_nested_tensors(model: nn.Module) -> None:
    """Let torch's encoders hand on nested tensors where none of their attentions is gated, as it was before.

    ``TransformerEncoder`` packs padded sequences into nested tensors, which gated attention does not take. It decides
    so when it is built.

    Args:
        model: A model whose gates have been switched on or off.
    """
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if any(isinstance(part, DenseHost) for part in encoder.modules()):
            vars(encoder).setdefault(VANILLA_CHOICE, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False
        elif VANILLA_CHOICE in vars(encoder):
            encoder.use_nested_tensor = vars(encoder).pop(VANILLA_CHOICE)


def adapt_reduced(*hosts: type[nn.Module]) -> None:
    """Let dense gates into the attention that ``hosts`` hold, and gates over the whole map into ``hosts``."""
    adapts_inside(DenseGate, 'attn', *hosts)
    adapts(MapGate, *hosts)(GatedReducedAttention)

"""Adapters for ``torch.nn.MultiheadAttention``, and for the attention of PVT, MiT and Twins, which contains one."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter, DenseGate, TorchAttentionAdapter
from mmgate.gates.base.map import HeightWidth, MapAdapter, MapAttention, MapAttentionAdapter, MapGate
from mmgate.hosts.from_model import backbone_and_stage, sizes_of_stage
from mmgate.hosts.table import adapts, adapts_inside

# The attribute of torch's TransformerEncoder that keeps its ``use_nested_tensor`` while it is gated.
VANILLA_CHOICE = 'use_nested_tensor_without_gates'

adapts(DenseGate, nn.MultiheadAttention)(TorchAttentionAdapter)
adapts(MapGate, MapAttention)(MapAttentionAdapter)
# PEFT's layer around torch's module adds its updates to the weights before it calls it.
adapts_inside(DenseGate, 'base_layer', 'peft.tuners.lora.layer.MultiheadAttention')


class ReducedAttentionAdapter(MapAdapter):
    """Adapter that lets attention over the whole map replace the spatial-reduction attention of PVT, MiT and Twins."""

    unused = ('sr', 'norm')

    attn: nn.MultiheadAttention
    proj_drop: nn.Module
    dropout_layer: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels and heads off torch's MultiheadAttention inside the host, for the gate."""
        bias = host.attn.in_proj_bias is not None
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn.dropout, bias=bias)

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the stride of the stage, and of the first PVT, whose positions have its shape, the map."""
        told = sizes_of_pyramid(model, path)
        backbone, stage = backbone_and_stage(model, path, 'layers')
        for part in backbone.layers[stage].modules() if told else ():
            if hasattr(part, 'pos_shape'):
                height, width = part.pos_shape
                told['host_map'] = (int(height), int(width))
        return told

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values with the weights of torch's MultiheadAttention inside the host."""
        q, k, v = nn.functional.linear(x, self.attn.in_proj_weight, self.attn.in_proj_bias).chunk(3, -1)
        return q, k, v

    def finish(self, x: Tensor) -> Tensor:
        """Project the mixed tokens to the output and apply the host's dropout."""
        return self.dropout_layer(self.proj_drop(self.attn.out_proj(x)))

    def forward(self, x: Tensor, hw_shape: HeightWidth, identity: Tensor | None = None) -> Tensor:
        """Attend over all tokens ``(B, N, C)`` of a map with the gate, and add ``identity`` if it is given."""
        return self.attend_gated(x, hw_shape, identity)


def sizes_of_pyramid(model: nn.Module, path: str) -> dict[str, Any]:
    """Return the sizes that a PVT, MiT or Twins tells of the stage around an attention, see :func:`.sizes_of_stage`."""
    backbone, stage = backbone_and_stage(model, path, 'layers')
    if backbone is None:
        return {}
    if hasattr(backbone, 'patch_embeds'):  # Twins
        return sizes_of_stage(backbone, backbone.patch_embeds[: stage + 1])
    stages = backbone.layers[: stage + 1]
    return sizes_of_stage(backbone, [one[0] if isinstance(one, nn.ModuleList) else one for one in stages])


def switch_nested_tensors(model: nn.Module) -> None:
    """Set torch's transformer encoders to pack no nested tensors if an attention in them is gated, else as they were.

    ``TransformerEncoder`` packs padded sequences into nested tensors, which gated attention does not take. It decides
    so when it is built.

    Args:
        model: A model that has received gates, or whose gates were removed.
    """
    for encoder in model.modules():
        if not isinstance(encoder, nn.TransformerEncoder):
            continue
        if any(isinstance(part, DenseAdapter) for part in encoder.modules()):
            vars(encoder).setdefault(VANILLA_CHOICE, encoder.use_nested_tensor)
            encoder.use_nested_tensor = False
        elif VANILLA_CHOICE in vars(encoder):
            encoder.use_nested_tensor = vars(encoder).pop(VANILLA_CHOICE)


def adapt_reduced(*hosts: type[nn.Module]) -> None:
    """Register spatial-reduction attentions as hosts: of gates over the map and, inside, of dense gates."""
    adapts_inside(DenseGate, 'attn', *hosts)
    adapts(MapGate, *hosts)(ReducedAttentionAdapter)

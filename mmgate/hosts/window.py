"""Adapters for Swin's attention in windows: gates inside the windows, or attention over the whole map instead."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.gates.base.map import HeightWidth, MapAdapter, MapGate
from mmgate.hosts.from_model import backbone_and_stage, sizes_of_stage
from mmgate.hosts.table import adapts

# By the class that shifts windows, the class of the attention in them, an entry a package.
WINDOWS: dict[type[nn.Module], type[nn.Module]] = {}


class WindowMSAAdapter(DenseAdapter):
    """Adapter that lets dense gates into ``WindowMSA``, Swin's attention inside windows, of all mm packages.

    The relative position bias and the mask ``(nW, N, N)`` of shifted windows are added to the logits after the gate.
    """

    num_heads: int
    qkv: nn.Module
    proj: nn.Module
    proj_drop: nn.Module
    relative_position_bias_table: Tensor
    relative_position_index: Tensor

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attend inside each of nW windows of an image, with the gate; ``x`` is ``(B nW, N, C)``, image by image."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)  # (B nW, H, N, d)
        tokens = x.shape[1]
        table = self.relative_position_bias_table[self.relative_position_index.flatten()]
        bias = table.view(tokens, tokens, -1).permute(2, 0, 1)[None]  # (1, H, N, N)
        if mask is not None:
            bias = (bias + mask[:, None]).repeat(x.shape[0] // mask.shape[0], 1, 1, 1)
        bias = bias.to(query.dtype)
        out = self.attend_gated((query, key, value), (x, x, x), self.proj, bias)
        return self.proj_drop(out)


class ShiftWindowMSAAdapter(MapAdapter):
    """Adapter that lets attention over the whole map replace Swin's ``ShiftWindowMSA``."""

    unused = ('w_msa.relative_position_bias_table', 'w_msa.relative_position_index')

    w_msa: Any
    drop: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels and heads off the windows' attention inside the host, for the gate."""
        windows = host.w_msa
        return Sizes(
            windows.embed_dims,
            windows.num_heads,
            dropout=windows.attn_drop.p,
            scale=windows.scale,
            bias=windows.qkv.bias is not None,
            shifted=host.shift_size > 0,
        )

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the stride of the stage, and of mmpretrain's Swin the map."""
        backbone, stage = backbone_and_stage(model, path, 'stages')
        merges = [getattr(before, 'downsample', None) for before in getattr(backbone, 'stages', [])[:stage]]
        return sizes_of_stage(backbone, [getattr(backbone, 'patch_embed', None), *merges])

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for windows of another class than the package's own."""
        held = type(host.w_msa)
        plain = next(window for shifted, window in WINDOWS.items() if isinstance(host, shifted))
        if held is not plain:
            raise ConfigError(f'it would lose what the {held.__name__} in it computes beyond a {plain.__name__}.')

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values with the layer ``qkv`` of the windows' attention."""
        q, k, v = self.w_msa.qkv(x).chunk(3, -1)
        return q, k, v

    def finish(self, x: Tensor) -> Tensor:
        """Project the mixed tokens to the output and apply the host's dropout."""
        return self.drop(self.w_msa.proj_drop(self.w_msa.proj(x)))

    def forward(self, query: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend over all tokens ``(B, N, C)`` of a map of height and width ``hw_shape``, with the gate."""
        return self.attend_gated(query, hw_shape)


def adapt_swin(window_msa: type[nn.Module], shift_window_msa: type[nn.Module]) -> None:
    """Register a package's two Swin classes as hosts: of dense gates inside windows, and of gates over the map."""
    adapts(DenseGate, window_msa)(WindowMSAAdapter)
    adapts(MapGate, shift_window_msa)(ShiftWindowMSAAdapter)
    WINDOWS[shift_window_msa] = window_msa

"""Base class of linear attention over a map: it adds convolved values, encodes key positions and gates the output."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes, StateDict, start_linear
from mmgate.gates.base.map import HeightWidth, MapGate, pretraining_map
from mmgate.gates.parts.options import integer
from mmgate.gates.parts.resizing import resize_grid
from mmgate.notes import note
from mmgate.ops.linear_attention import key_value_map


class LinearGate(MapGate):
    """Base class of linear attentions over an H x W map; a subclass computes the attention in :meth:`attend`.

    Args:
        sizes: Sizes of the host's attention.
        dwc: Side of the kernel of a depthwise convolution, whose output is added to the heads; 0 for no convolution. By
            default ``default_dwc`` of the class.
        position_encoding: True adds a learnt position encoding to the keys, resized bilinearly for another map. By
            default the class's ``has_positions`` says it, and a ``map_size`` or ``image_size`` that is given.
        map_size: Height and width of the map in pre-training, the shape of the encoding; by default that of
            ``image_size``.
        image_size: Side, or height and width, of the images in pre-training; by default those of the map that the model
            around the host keeps.

    A class token attends, but has no position and is not convolved.

    Raises:
        ConfigError: Sizes do not divide, an option is no size, or ``attn_drop`` is not 0: there are no attention
            weights to drop.
        OptionError: The position encoding needs the map, and neither the rule nor the model around the host tells it.

    The convolution starts as torch's, the position encoding at 0 and the gates as PVT's linear layers.

    Attributes:
        gate_layers: Names of the linear layers that compute gates from the tokens; ``gate_out`` multiplies the output.
        default_dwc: Side of the convolution's kernel where ``dwc`` is not given.
        shares_dwc: True for d kernels, which the heads share; False for C kernels.
        has_positions: True if the keys get a position encoding where ``position_encoding`` is not given.
    """

    undecayed: tuple[str, ...] = ('position_encoding',)
    gate_layers: tuple[str, ...] = ()
    default_dwc = 0
    shares_dwc = False
    has_positions = False

    def __init__(
        self,
        sizes: Sizes,
        *,
        dwc: int | None = None,
        position_encoding: bool | None = None,
        map_size: tuple[int, int] | None = None,
        image_size: int | tuple[int, int] | None = None,
    ) -> None:
        super().__init__(sizes)
        if self.dropout:
            raise ConfigError(
                f'attn_drop={self.dropout}: {type(self).__name__} has no attention weights to drop; leave it at 0, '
                "in a backbone attn_drop_rate, and use proj_drop, a backbone's drop_rate."
            )
        dwc = self.default_dwc if dwc is None else dwc
        meaning = ': the odd side of a kernel, or 0 for no convolution'
        if integer('dwc', dwc, least=0, meaning=meaning) and dwc % 2 == 0:
            raise ConfigError(f'dwc={dwc} must be odd{meaning}.')
        channels = self.head_dim if self.shares_dwc else self.embed_dims
        self.dwc: Any = nn.Conv2d(channels, channels, dwc, padding=dwc // 2, groups=channels) if dwc else None
        self.position_encoding: Any = None
        if position_encoding is None:
            position_encoding = self.has_positions or map_size is not None or image_size is not None
        if position_encoding:
            self.map_size = pretraining_map(sizes, map_size, image_size)
            self.position_encoding = nn.Parameter(torch.zeros(1, prod(self.map_size), self.embed_dims))
        for name in self.gate_layers:
            self.add_module(name, nn.Linear(self.embed_dims, self.embed_dims, bias=sizes.bias))

    def reset(self) -> None:
        """Initialise the convolution, the position encoding and the gates' linear layers."""
        if self.dwc is not None:
            self.dwc.reset_parameters()
        if self.position_encoding is not None:
            nn.init.zeros_(self.position_encoding)
        start_linear(*(getattr(self, name) for name in self.gate_layers))

    def attend(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Compute linear attention without the convolution, ``(B, N, C)``; the arguments are those of :meth:`mix`.

        It notes what it multiplies by :meth:`note_map`, or itself.
        """
        raise TypeError(f'{type(self).__name__} mixes no tokens; use a subclass.')

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend, add the convolved values, and multiply the sum by the output gate if there is one."""
        out = self.attend(x, q, self._with_positions(k, hw_shape), v, hw_shape)
        if self.dwc is not None:
            out = out + self.convolve(v, hw_shape)
        layer: Any = getattr(self, 'gate_out', None)
        if layer is None:
            return out
        gate = layer(x)
        note(self, 'gate_out', gate, 'channels', unchanged=1)
        return out * gate

    def note_map(self, k: Tensor, v: Tensor) -> None:
        """Note for figures the map ``K^T V / N`` ``(B, H, d, d)`` of features of the keys and of values, by heads."""
        # Features that are powers are in 32 bits where the values have 16.
        note(self, 'kv', lambda: key_value_map(k, v.to(k.dtype)))

    def convolve(self, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Convolve the values ``(B, N, C)`` over the map; the class token gets zeros."""
        repeats = self.embed_dims // self.dwc.weight.shape[0]
        weight = self.dwc.weight.repeat(repeats, 1, 1, 1)
        bias = self.dwc.bias.repeat(repeats)
        values = v[:, self.class_tokens :].transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w), channels last
        out = F.conv2d(values, weight, bias, padding=self.dwc.padding, groups=self.embed_dims)
        return self.after_class_token(out.flatten(2).transpose(1, 2))

    def resize_loaded(self, state_dict: StateDict, prefix: str) -> list[str]:
        """Resize the position encoding in a state dict to this gate's shape, too; return the names of those resized."""
        resized = super().resize_loaded(state_dict, prefix)
        key = f'{prefix}position_encoding'
        if self.map_size is not None and key in state_dict:
            before = state_dict[key]
            state_dict[key] = resize_grid(before, self.map_size)
            if state_dict[key] is not before:
                resized.append('position_encoding')
        return resized

    def _with_positions(self, k: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Add the position encoding, if there is one, to the keys ``(B, N, C)``."""
        if self.position_encoding is None:
            return k
        return k + self.after_class_token(self._resized_encoding(hw_shape))

    def _resized_encoding(self, hw_shape: HeightWidth) -> Tensor:
        if hw_shape == self.map_size:
            return self.position_encoding
        grid = self.position_encoding.transpose(1, 2).unflatten(-1, self.map_size)
        return F.interpolate(grid, size=hw_shape, mode='bilinear').flatten(2).transpose(1, 2)

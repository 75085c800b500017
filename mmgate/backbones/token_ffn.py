"""PVT's feed-forward network on tokens."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.ops.library import is_exporting

CHUNK = 1 << 21  # hidden numbers that exist at a time in inference


class TokenFFN(nn.Module):
    """What mmdet's ``MixFFN`` without its depthwise convolution computes, under the same parameter names.

    ``MixFFN`` turns tokens into a map for its 1 x 1 convolutions and back; here they are linear layers on the tokens,
    and without gradients the hidden layer exists in pieces that stay in the cache. Where numbers are dropped, a
    ``MixFFN`` drops the same ones.

    Args:
        host: The ``MixFFN`` to replace; its layers are taken over.

    Raises:
        ValueError: ``host`` mixes neighbouring tokens (``use_conv=True``).

    Source: Pyramid vision transformer (Wang et al., 2021), the authors' code.
    """

    def __init__(self, host: Any) -> None:
        super().__init__()
        if len(host.layers) != 5:
            raise ConfigError('TokenFFN replaces a MixFFN without a depthwise convolution.')
        self.layers, self.dropout_layer = host.layers, host.dropout_layer

    def forward(self, x: Tensor, hw_shape: tuple[int, int], identity: Tensor | None = None) -> Tensor:
        """Return ``identity`` (``x`` by default) plus the network's output for ``(B, N, C)`` tokens."""
        if torch.is_grad_enabled() or is_exporting():  # a graph of chunks is one of a single size
            out = self._network(x)
        else:
            rows = max(1, CHUNK // self.layers[0].out_channels)
            tokens = x.flatten(0, 1)
            out = torch.cat([self._network(tokens[i : i + rows]) for i in range(0, len(tokens), rows)]).view_as(x)
        return (x if identity is None else identity) + self.dropout_layer(out)

    def _network(self, x: Tensor) -> Tensor:
        first, activation, drop, second, _ = self.layers
        hidden = drop(activation(F.linear(x, first.weight.flatten(1), first.bias)))
        return drop(F.linear(hidden, second.weight.flatten(1), second.bias))

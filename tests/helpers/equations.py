"""Calls of mmcv's attention, dense and deformable, with positions and masks, to write equations out."""

from __future__ import annotations

import math
from typing import Any

import torch
from conftest import filled
from torch import Tensor, nn

B, N, M, C, H = 2, 5, 7, 16, 4
D = C // H


def opened(module: nn.Module) -> Any:
    """Give every parameter, the gate's included, a value of its own."""
    return filled(module, 0.4).double()


def random(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


class Call:
    """The inputs of a call of mmcv's attention with a position embedding and both masks, and its projections."""

    def __init__(self, layer: Any) -> None:
        self.query, self.key, self.value = random(B, N, C), random(B, M, C), random(B, M, C)
        self.query_pos, self.key_pos, self.identity = random(B, N, C), random(B, M, C), random(B, N, C)
        padding = torch.zeros(B, M, dtype=torch.bool)
        padding[1, -3:] = True
        self.options = dict(query_pos=self.query_pos, key_pos=self.key_pos, identity=self.identity)
        self.options.update(key_padding_mask=padding, attn_mask=random(N, M))
        self.bias = self.options['attn_mask'] + torch.zeros(B, 1, 1, M).masked_fill(padding[:, None, None], -math.inf)
        # positions belong to queries and keys, not to values
        self.inputs = (self.query + self.query_pos, self.key + self.key_pos, self.value)
        weights, biases = layer.attn.in_proj_weight.chunk(3), layer.attn.in_proj_bias.chunk(3)
        parts = zip(self.inputs, weights, biases, strict=True)
        self.q, self.k, self.v = (split(x @ w.T + b) for x, w, b in parts)

    def run(self, layer: nn.Module) -> Tensor:
        return layer(self.query, self.key, self.value, **self.options)

    def finish(self, layer: Any, heads: Tensor) -> Tensor:
        """The output projection, without the identity."""
        out = layer.attn.out_proj
        return heads.transpose(1, 2).flatten(2) @ out.weight.T + out.bias


def split(x: Tensor, heads: int = H) -> Tensor:
    return x.view(len(x), -1, heads, x.shape[-1] // heads).transpose(1, 2)


def linear(module: nn.Linear, x: Tensor) -> Tensor:
    return x @ module.weight.T + module.bias


def normed(heads: Tensor, weight: Tensor) -> Tensor:
    return heads / (heads.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


SIZES = dict(embed_dims=16, num_heads=4, num_levels=2, num_points=3)


def make_call(columns: int = 2, batch_first: bool = True) -> dict[str, Tensor]:
    tokens = dict(query=5, value=30, query_pos=5, identity=5)
    call = {name: torch.randn(2, count, 16) for name, count in tokens.items()}
    return dict(
        **{name: x if batch_first else x.transpose(0, 1) for name, x in call.items()},
        key_padding_mask=torch.arange(30) >= torch.tensor([[30], [26]]),
        reference_points=torch.rand(2, 5, 2, columns),
        spatial_shapes=torch.tensor([(4, 6), (2, 3)]),
        level_start_index=torch.tensor([0, 24]),
    )

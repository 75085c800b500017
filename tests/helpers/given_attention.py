"""Models whose attention weights are given, so that what is read of them is known by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mmgate import note

SIDE = 3
TOKENS = 1 + SIDE**2


class GivenAttention(nn.Module):
    """A stranger's attention, whose weights ``(images, B, H, N, M)`` are given, and where its windows lie."""

    def __init__(self, weights: Tensor, geometry: tuple[int, ...] = ()) -> None:
        super().__init__()
        self.weights, self.geometry = weights, geometry

    def forward(self, image: int) -> None:
        note(self, 'attention', lambda: self.weights[image])
        if self.geometry:
            note(self, 'geometry', torch.tensor(self.geometry))


class Layer(nn.Module):
    """An attention; the hidden states after it are ``states``."""

    def __init__(self, attn: nn.Module, states: Tensor) -> None:
        super().__init__()
        self.attn, self.states = attn, states

    def forward(self, image: int) -> Tensor:
        self.attn(image)
        return self.states


class Model(nn.Module):
    """Layers of given attention, with a class token or without."""

    def __init__(self, *layers: nn.Module, class_token: bool = True) -> None:
        super().__init__()
        self.layers, self.cls_token = nn.ModuleList(layers), nn.Parameter(torch.zeros(1)) if class_token else None

    def test_step(self, batch: dict[str, int]) -> list[Any]:
        for layer in self.layers:
            layer(batch['image'])
        return [SimpleNamespace(get=dict(img_shape=(9, 9)).get, img_shape=(9, 9))]


def batches(count: int) -> list[dict[str, int]]:
    return [dict(image=image) for image in range(count)]


def attention(*shape: int) -> Tensor:
    return torch.randn(*shape).softmax(-1)

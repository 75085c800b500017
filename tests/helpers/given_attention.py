"""Models whose attention weights are given, so that what is read of them is known by hand."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.hosts.readings import reads

SIDE = 3
TOKENS = 1 + SIDE**2


class Given(nn.Module):
    """An attention whose weights ``(images, B, H, N, M)`` are given."""

    def __init__(self, weights: Tensor, geometry: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.weights, self.geometry = weights, geometry

    def forward(self, image: int) -> None:
        """Attend to nothing."""


class Placed(Given):
    """The same, with the place where its windows lie."""


class Valued(Given):
    """The same, with values ``(images, B, H|h, M, d)``."""

    def __init__(self, weights: Tensor, values: Tensor) -> None:
        super().__init__(weights)
        self.values = values


def given_weights(module: Given, given: dict[str, int]) -> Tensor:
    return module.weights[given['image']]


reads(Given, attention=given_weights)
reads(Placed, attention=given_weights, geometry=lambda module, given: torch.tensor(module.geometry))
reads(Valued, attention=given_weights, values=lambda module, given: module.values[given['image']])


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

"""Models that initialise their layers as the hosts do."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

from mmgate import swap_attention

C, H = 64, 4


def of_two_dimensions(draw: Callable[[Tensor], Any]) -> Callable[[nn.Module], None]:
    def initialise(model: nn.Module) -> None:
        for parameter in model.parameters():
            if parameter.dim() > 1:
                draw(parameter)

    return initialise


def by_module(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Conv2d):
            nn.init.normal_(module.weight, std=5.0)
            nn.init.zeros_(module.bias)


def and_deformable(model: nn.Module) -> None:
    of_two_dimensions(nn.init.xavier_uniform_)(model)
    for module in model.modules():
        if isinstance(module, MultiScaleDeformableAttention):
            module.init_weights()


HOSTS = {
    'deformable_detr': and_deformable,
    'mask2former': of_two_dimensions(nn.init.xavier_normal_),
    'pvt': by_module,
}


class Host(nn.Module):
    """A model that initialises its layers last, as mmdet's do."""

    def __init__(self, host: str, *layers: nn.Module) -> None:
        super().__init__()
        self.host, self.layers = host, nn.ModuleList(layers)

    def init_weights(self) -> None:
        HOSTS[self.host](self)


dense = partial(nn.MultiheadAttention, C, H, batch_first=True)
deformable = partial(MultiScaleDeformableAttention, C, H, num_levels=4, num_points=4)


def gated(host: str, *pairs: tuple[Callable[[], nn.Module], dict[str, Any]]) -> Host:
    """A host whose layers are swapped by the rules beside them."""
    model = Host(host, *[vanilla() for vanilla, _ in pairs])
    swap_attention(model, [dict(path=f'layers.{i}', **rule) for i, (_, rule) in enumerate(pairs)])
    return model


def initialised(host: str, *pairs: tuple[Callable[[], nn.Module], dict[str, Any]]) -> Host:
    model = gated(host, *pairs)
    model.init_weights()
    return model


def assert_uniform(x: Tensor, bound: float) -> None:
    """No number beyond the bound, and as far from 0 on average as a uniform distribution's."""
    assert x.abs().max() <= bound
    if x.numel() > 200:
        torch.testing.assert_close(x.std().item(), bound / 3**0.5, rtol=0.1, atol=0)

"""A gate of its own: every channel of an attention's output times a learnt temperature of its token."""

import torch
from mmdet.registry import MODELS
from torch import nn

import mmgate

from .host import Pooling


@MODELS.register_module()
class Tempered(mmgate.Gate):
    identity_start = True

    def __init__(self, sizes, *, strength=1.0):
        super().__init__(sizes)
        self.temperature = nn.Linear(sizes.channels, 1)
        self.strength = strength

    def reset(self):
        nn.init.zeros_(self.temperature.weight)
        nn.init.zeros_(self.temperature.bias)

    def factor(self, pooled):
        return 1 + self.strength * torch.tanh(self.temperature(pooled))


@mmgate.adapts(Tempered, Pooling)
class TemperedPooling(mmgate.Adapter):
    @classmethod
    def sizes(cls, host):
        return mmgate.Sizes(host.mix.in_features, heads=1)

    def forward(self, x):
        pooled = self.mix(x.mean((2, 3)))  # (B, C)
        return x + (self.gate.factor(pooled) * pooled)[..., None, None]

"""A gate of its own: every channel of an attention's output times a learnt temperature of its token."""

import torch
from mmdet.registry import MODELS
from torch import nn

import mmgate

from .host import Pooling


@MODELS.register_module()
class Tempered(nn.Module):
    def __init__(self, channels, strength=1.0):
        super().__init__()
        self.mix = nn.Linear(channels, channels)
        self.temperature = nn.Linear(channels, 1)
        self.strength = strength

    def forward(self, x):
        pooled = self.mix(x.mean((2, 3)))  # (B, C)
        factor = 1 + self.strength * torch.tanh(self.temperature(pooled))
        return x + (factor * pooled)[..., None, None]


@mmgate.adapts(Tempered, Pooling)
def tempered(gate, host, **options):
    return gate(host.mix.in_features, **options)

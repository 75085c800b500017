"""A host of its own: a neck with an attention that pools the map, and mmcv's under a name of its own."""

from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.necks import ChannelMapper
from mmdet.registry import MODELS
from torch import nn

import mmgate


class Pooling(nn.Module):
    def __init__(self, channels):
        super().__init__()
        self.mix = nn.Linear(channels, channels)

    def forward(self, x):
        return x + self.mix(x.mean((2, 3)))[..., None, None]


@MODELS.register_module()
class PoolingMapper(ChannelMapper):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.pooling = Pooling(kwargs['out_channels'])

    def forward(self, inputs):
        return tuple(self.pooling(x) for x in super().forward(inputs))


class Renamed(MultiScaleDeformableAttention):
    """Computes what mmcv's does."""


mmgate.adapts(mmgate.gates.PLuGMultiScaleDeformableAttention, Renamed, like=MultiScaleDeformableAttention)

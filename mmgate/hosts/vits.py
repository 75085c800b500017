"""Recognise whether a module is part of a vision transformer, on which the initial values of gates depend."""

from __future__ import annotations

import re

from torch import nn

from mmgate.hosts.table import full_name

# Packages and files of vision transformers: mm backbones, classifiers, and models of torchvision, transformers and of
# projects.
_VITS = re.compile(
    r'(^|\.)(backbones|mmpretrain|timm|vision_transformer|swin_transformer|vit|deit|dinov2\w*|dinov3_vit|swin|segformer)\.'
    r'|RfDetrDinov2'
)


def is_in_vit(model: nn.Module, name: str) -> bool:
    """Return True if a module is part of a vision transformer, by its class or the class of a module around it.

    DeiT, GCViT, Swin, PVT and others draw every linear layer from a normal distribution of deviation 0.02. Detectors
    have torch's and mmcv's attention, too. It is part of a vision transformer if it lies in a backbone.
    """
    parts = name.split('.')
    around = ('.'.join(parts[:count]) for count in range(len(parts) + 1))
    return any(_VITS.search(full_name(type(model.get_submodule(path)))) for path in around)

"""Which attentions are those of vision transformers, whose linear layers start otherwise than those of detectors."""

from __future__ import annotations

import re

from torch import nn

from mmgate.hosts.table import full_name

# packages and files of vision transformers: mm backbones, classifiers, and models of transformers and of projects
_VITS = re.compile(
    r'(^|\.)(backbones|mmpretrain|timm|vision_transformer|swin_transformer|vit|deit|dinov2\w*|dinov3_vit|swin|segformer)\.'
    r'|RfDetrDinov2'
)


def is_in_vit(model: nn.Module, name: str) -> bool:
    """Return whether the module called ``name`` lies in a vision transformer, by its class or one around it.

    DeiT, GCViT, Swin, PVT and their like draw every linear layer from a normal distribution of deviation 0.02. torch's
    and mmcv's attention stand in detectors, too, so that there the classes around tell: a backbone of mmdet or mmseg.
    """
    parts = name.split('.')
    around = ('.'.join(parts[:count]) for count in range(len(parts) + 1))
    return any(_VITS.search(full_name(type(model.get_submodule(path)))) for path in around)

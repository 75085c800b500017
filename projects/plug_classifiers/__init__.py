"""The backbones LV-ViT and ViTAE, which PLuG's Table 1 needs beside mmpretrain's; importing this registers them."""

from .lvvit import LVViT, TokenLabelHead
from .vitae import ViTAE

__all__ = ['LVViT', 'TokenLabelHead', 'ViTAE']

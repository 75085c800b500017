"""Small models of timm's with random weights."""

from __future__ import annotations

from typing import Any

import timm
import torch
from torch import Tensor

C, HEADS = 32, 4
SMALL = dict(embed_dim=C, depth=2, num_heads=HEADS, num_classes=5)
PLUG = dict(type='PLuGMultiheadAttention')
SDPA = dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu')
SWIN = dict(img_size=64, embed_dim=16, depths=(2, 2), num_heads=(2, 4), window_size=4, num_classes=5)
# by name, a model of timm's, its options, and the side of its images
MODELS: dict[str, tuple[str, dict[str, Any], int]] = {
    'vit': ('vit_tiny_patch16_224', dict(SMALL, img_size=64), 64),
    'deit': ('deit_tiny_distilled_patch16_224', dict(SMALL, img_size=64), 64),
    'dinov2': ('vit_small_patch14_reg4_dinov2', dict(SMALL, img_size=56), 56),
    'siglip': ('vit_base_patch16_siglip_224', dict(SMALL, img_size=64), 64),
    'dinov3': ('vit_small_patch16_dinov3', dict(SMALL, img_size=64), 64),
    'eva02': ('eva02_tiny_patch14_224', dict(SMALL, img_size=56), 56),
    'swin': ('swin_tiny_patch4_window7_224', SWIN, 64),
}
PATHS = dict.fromkeys(MODELS, 'blocks.*.attn') | dict(swin='layers.*.blocks.*.attn')


def build(name: str, **options: Any) -> tuple[Any, Tensor]:
    """Return a small model, moved off its start, and two images."""
    torch.manual_seed(0)
    called, small, side = MODELS[name]
    model = timm.create_model(called, **{**small, **options}).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
        for key, parameter in model.named_parameters():
            if 'gamma' in key:  # the scale of a layer, which starts near 0
                parameter.fill_(1.0)
    return model, torch.randn(2, 3, side, side)

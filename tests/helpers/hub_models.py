"""Small models of transformers' with random weights, and what they are fed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmgate import gate_parameters

HEADS = 4
VIT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS)
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
SEGFORMER = dict(hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 4, 4], depths=[1, 1, 1, 1])
RESNET = dict(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type='basic')
STAGES = ['stage2', 'stage3', 'stage4']
HGNET: dict[str, Any] = dict(
    hidden_sizes=[16, 16, 16, 32],
    embedding_size=16,
    stem_channels=[3, 8, 16],
    stage_out_channels=[16, 16, 16, 32],
    stage_downsample=[False, True, True, True],
    out_features=STAGES,
)
SAME = dict(in_channels=16, mid_channels=8, num_blocks=1, numb_of_layers=1, light_block=False, kernel_size=3)
HGNET.update({f'stage_{name}': [value] * 4 for name, value in SAME.items()})
DETECTOR = dict(d_model=32, num_queries=10, decoder_layers=2, decoder_ffn_dim=32, num_labels=3)
DETR = dict(
    DETECTOR, encoder_layers=2, encoder_ffn_dim=32, encoder_attention_heads=HEADS, decoder_attention_heads=HEADS
)


def _detr() -> dict[str, Any]:
    return dict(DETR, backbone_config=transformers.ResNetConfig(**RESNET, out_features=['stage4']))


def _deformable_detr() -> dict[str, Any]:
    backbone = transformers.ResNetConfig(**RESNET, out_features=STAGES)
    return dict(DETR, backbone_config=backbone, num_feature_levels=4, with_box_refine=True)


def _d_fine() -> dict[str, Any]:
    widths = dict(encoder_hidden_dim=32, encoder_in_channels=[16, 16, 32], decoder_in_channels=[32, 32, 32])
    sizes = dict(DETR, **widths, encoder_layers=1, num_denoising=0)
    return dict(sizes, backbone_config=transformers.HGNetV2Config(**HGNET))


def _mask2former() -> dict[str, Any]:
    sizes = dict(dict.fromkeys(('hidden_dim', 'encoder_feedforward_dim', 'dim_feedforward', 'feature_size'), 32))
    sizes.update(mask_feature_size=32, num_queries=8, num_labels=3, num_attention_heads=HEADS)
    swin = dict(image_size=64, window_size=7, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2])
    backbone = transformers.SwinConfig(**swin, out_features=['stage1', *STAGES])
    return dict(sizes, encoder_layers=2, decoder_layers=3, backbone_config=backbone)


def _rf_detr() -> dict[str, Any]:
    from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config

    backbone = RfDetrDinov2Config(**VIT, image_size=56, patch_size=14, num_windows=2, out_indices=[1, 2])
    heads = dict(decoder_self_attention_heads=HEADS, decoder_cross_attention_heads=HEADS)
    return dict(DETECTOR, **heads, backbone_config=backbone, group_detr=1)


# by name, a model of transformers', its config's options, and the size of its images
MODELS: dict[str, tuple[str, Callable[[], dict[str, Any]], tuple[int, int]]] = {
    'vit': ('ViT Model', lambda: dict(VIT, image_size=32, patch_size=8, intermediate_size=32), (32, 32)),
    'swin': ('Swin Model', lambda: SWIN, (32, 32)),
    'segformer': ('Segformer Model', lambda: SEGFORMER, (64, 64)),
    'detr': ('Detr ForObjectDetection', _detr, (64, 96)),
    'mask2former': ('Mask2Former ForUniversalSegmentation', _mask2former, (64, 96)),
    'deformable_detr': ('DeformableDetr ForObjectDetection', _deformable_detr, (64, 96)),
    'd_fine': ('DFine ForObjectDetection', _d_fine, (64, 64)),
    'rf_detr': ('RfDetr ForObjectDetection', _rf_detr, (56, 56)),
}


def build(name: str, **options: Any) -> nn.Module:
    """Return the model called so, in evaluation.

    Its outputs depend on its image, and it chooses queries by scores that are apart.
    """
    called, sizes, _ = MODELS[name]
    family, task = called.split()
    config = getattr(transformers, f'{family}Config')(**{**sizes(), **options})
    model = getattr(transformers, family + task)(config).eval()
    torch.manual_seed(2)
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if parameter.dim() > 1 and 'embed' not in part.rpartition('.')[0].rpartition('.')[2]:
                parameter.normal_(std=parameter[0].numel() ** -0.5)
            if 'bbox_embed' in part and parameter.dim() > 1:
                parameter.normal_(std=0.05)
    return model


def feed(name: str, padded: bool = False) -> dict[str, Tensor]:
    """Return what the model called so takes, of two images of which one may be padded."""
    height, width = MODELS[name][2]
    generator = torch.Generator().manual_seed(0)
    fed: dict[str, Tensor] = dict(pixel_values=torch.rand(2, 3, height, width, generator=generator))
    if padded:
        mask = torch.ones(2, height, width, dtype=torch.long)
        mask[1, height // 2 :] = mask[1, :, width // 2 :] = 0
        fed.update(pixel_mask=mask)
    return fed


def moved(model: nn.Module) -> None:
    """Move gates off a start that does nothing."""
    with torch.no_grad():
        for parameter in gate_parameters(model).values():
            parameter.add_(0.5 * torch.randn_like(parameter))


def outputs(model: nn.Module, fed: dict[str, Tensor]) -> list[Tensor]:
    """Return every floating tensor of the model's output."""
    with torch.no_grad():
        found = model(**fed).to_tuple()
    flat: list[Tensor] = []
    for part in found:
        parts = part if isinstance(part, (tuple, list)) else [part]
        flat += [x for x in parts if isinstance(x, Tensor) and x.is_floating_point()]
    return flat


def largest_difference(first: list[Tensor], second: list[Tensor]) -> float:
    """Return the largest difference of two models' outputs; masked logits are infinite in both."""
    assert len(first) == len(second) and first
    return max((a - b).masked_fill(a == b, 0.0).abs().max().item() for a, b in zip(first, second, strict=True))

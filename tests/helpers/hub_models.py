"""Small models of transformers' with random weights, and what they are fed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from mmgate import gate_parameters

HEADS = 4
STAGES = dict(embedding_size=8, hidden_sizes=[8, 16, 16, 32], depths=[1, 1, 1, 1], layer_type='basic')
VIT = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=HEADS, intermediate_size=32)
DETECTOR = dict(d_model=32, num_queries=10, decoder_layers=2, decoder_ffn_dim=32, num_labels=3)
HGNET = dict(
    hidden_sizes=[16, 16, 16, 32],
    embedding_size=16,
    stem_channels=[3, 8, 16],
    stage_out_channels=[16, 16, 16, 32],
    stage_downsample=[False, True, True, True],
)
SAME = dict(in_channels=16, mid_channels=8, num_blocks=1, numb_of_layers=1, light_block=False, kernel_size=3)
HGNET.update({f'stage_{name}': [value] * 4 for name, value in SAME.items()})
MASKS = dict(hidden_dim=32, encoder_feedforward_dim=32, dim_feedforward=32, num_queries=8)
MASKS.update(encoder_layers=2, decoder_layers=3)
ENCODER = dict(width=32, context_length=8, num_layers=1, vocab_size=64, proj_layers=1)
TEXT = dict(task_seq_len=8, **{f'text_encoder_{name}': value for name, value in ENCODER.items()})


def _build(kind: str, task: str = 'ObjectDetection', **options: Any) -> nn.Module:
    config = getattr(transformers, f'{kind}Config')(**options)
    return getattr(transformers, f'{kind}For{task}' if task else f'{kind}Model')(config)


def _heads(*parts: str) -> dict[str, int]:
    return {f'{part}_attention_heads': HEADS for part in parts}


def _resnet(*stages: str, kind: Any = transformers.ResNetConfig) -> Any:
    return kind(**STAGES, out_features=list(stages))


def _swin(first: int) -> Any:
    stages = [f'stage{i}' for i in range(first, 5)]
    sizes = dict(window_size=7, image_size=64, embed_dim=8, depths=[1] * 4, num_heads=[1, 1, 2, 2])
    return transformers.SwinConfig(**sizes, out_features=stages)


def _detr(kind: str, *stages: str, **options: Any) -> nn.Module:
    sizes = dict(DETECTOR, encoder_layers=2, encoder_ffn_dim=32, backbone_config=_resnet(*stages))
    return _build(kind, **sizes, **_heads('encoder', 'decoder'), **options)


def _real_time(name: str, **options: Any) -> nn.Module:
    stages = ['stage2', 'stage3', 'stage4']
    if name.startswith('RT'):
        backbone: Any = _resnet(*stages, kind=transformers.RTDetrResNetConfig)
    else:
        backbone = transformers.HGNetV2Config(**HGNET, out_features=stages)
    widths = dict(encoder_hidden_dim=32, encoder_in_channels=[16, 16, 32], decoder_in_channels=[32, 32, 32])
    sizes = dict(DETECTOR, backbone_config=backbone, encoder_ffn_dim=32, num_denoising=0, **widths)
    return _build(name, **{**sizes, **_heads('encoder', 'decoder'), **options})


def _grounding(name: str, **options: Any) -> nn.Module:
    sizes = {key: value for key, value in DETECTOR.items() if key != 'num_labels'}
    text = transformers.BertConfig(**VIT | dict(num_hidden_layers=1), vocab_size=2048)
    parts = dict(backbone_config=_swin(2), text_config=text, max_text_len=16)
    sizes.update(encoder_layers=1, encoder_ffn_dim=32)
    return _build(name, **sizes, **parts, **_heads('encoder', 'decoder'), **options)


def _masks(name: str, **options: Any) -> nn.Module:
    numbers = dict(MASKS, num_attention_heads=HEADS, num_labels=3, backbone_config=_swin(1))
    return _build(name, 'UniversalSegmentation', **numbers, **options)


def _windowed(name: str, backbone: Any, **options: Any) -> nn.Module:
    heads = _heads('decoder_self', 'decoder_cross')
    options = dict(group_detr=1) | options
    vit = {key: value for key, value in VIT.items() if key != 'intermediate_size'}
    return _build(name, **DETECTOR, **heads, backbone_config=backbone(**vit, out_indices=[1, 2]), **options)


def _lw_detr_vit(**options: Any) -> Any:
    sizes = dict(image_size=64, pretrain_image_size=64, patch_size=16, num_windows=4, window_block_indices=[0])
    return transformers.LwDetrViTConfig(**options, **sizes)


def _rf_detr_vit(**options: Any) -> Any:
    from transformers.models.rf_detr.configuration_rf_detr import RfDetrDinov2Config

    return RfDetrDinov2Config(**options, image_size=56, patch_size=14, num_windows=2)


_mask2former = partial(_masks, 'Mask2Former', feature_size=32, mask_feature_size=32)
DEFORMABLE: dict[str, Callable[..., nn.Module]] = {
    'deformable_detr': partial(
        _detr, 'DeformableDetr', 'stage2', 'stage3', 'stage4', num_feature_levels=4, with_box_refine=True
    ),
    'rt_detr': partial(_real_time, 'RTDetr'),
    'rt_detr_v2': partial(_real_time, 'RTDetrV2'),
    'd_fine': partial(_real_time, 'DFine'),
    'deimv2': partial(_real_time, 'Deimv2'),
    'grounding_dino': partial(_grounding, 'GroundingDino'),
    'mm_grounding_dino': partial(_grounding, 'MMGroundingDino'),
    'mask2former': _mask2former,
    'oneformer': partial(_masks, 'OneFormer', conv_dim=32, mask_dim=32, use_task_norm=True, is_training=False, **TEXT),
    'lw_detr': partial(_windowed, 'LwDetr', _lw_detr_vit, projector_scale_factors=[2.0, 0.5]),
    'rf_detr': partial(_windowed, 'RfDetr', _rf_detr_vit),
}
SWIN = dict(image_size=32, patch_size=2, embed_dim=16, depths=[2, 2], num_heads=[2, 4], window_size=4)
SEGFORMER = dict(hidden_sizes=[16, 16, 32, 32], num_attention_heads=[1, 2, 4, 4], depths=[1, 1, 1, 1])
DENSE: dict[str, Callable[..., nn.Module]] = {
    'vit': partial(_build, 'ViT', '', **VIT, image_size=32, patch_size=8),
    'swin': partial(_build, 'Swin', '', **SWIN),
    'segformer': partial(_build, 'Segformer', '', **SEGFORMER),
    'detr': partial(_detr, 'Detr', 'stage4'),
    'mask2former': _mask2former,
}


def build(name: str, **options: Any) -> nn.Module:
    """Return the model called so, in evaluation, its weights moved off the start that makes attentions even."""
    torch.manual_seed(1)
    model = {**DENSE, **DEFORMABLE}[name](**options).eval()
    with torch.no_grad():
        for part, parameter in model.named_parameters():
            if any(name in part for name in ('sampling_offsets', 'attention_weights', 'q_proj', 'k_proj')):
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def feed(name: str, padded: bool = False) -> dict[str, Tensor]:
    """Return what the model called so takes, of two images of which one may be padded."""
    small = dict(rf_detr=(56, 56), deformable_detr=(64, 96), detr=(64, 96), mask2former=(64, 96), oneformer=(64, 96))
    size = {**small, 'vit': (32, 32), 'swin': (32, 32)}.get(name, (64, 64))
    fed: dict[str, Tensor] = dict(pixel_values=torch.rand(2, 3, *size, generator=torch.Generator().manual_seed(0)))
    if 'grounding' in name:
        fed.update(input_ids=torch.tensor([[101, 1037, 1012, 102]]).expand(2, -1))
        fed.update(attention_mask=torch.ones(2, 4, dtype=torch.long))
    if name == 'oneformer':
        fed.update(task_inputs=torch.ones(2, 8, dtype=torch.long))
    if padded:
        mask = torch.ones(2, *size, dtype=torch.long)
        mask[1, size[0] // 2 :] = mask[1, :, size[1] // 2 :] = 0
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

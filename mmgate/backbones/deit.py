"""DeiT in its authors' names, vanilla or with agent attention, as mmpretrain's ViT names it."""

from __future__ import annotations

import re

from mmgate.checkpoints.tensors import State

_RENAMED = (
    (r'patch_embed\.proj\.', 'patch_embed.projection.'),
    (r'blocks\.(\d+)\.norm([12])\.', r'layers.\1.ln\2.'),
    (r'blocks\.(\d+)\.mlp\.fc1\.', r'layers.\1.ffn.layers.0.0.'),
    (r'blocks\.(\d+)\.mlp\.fc2\.', r'layers.\1.ffn.layers.1.'),
    (r'blocks\.(\d+)\.attn\.', r'layers.\1.attn.'),
    (r'norm\.', 'ln1.'),
)
_KEPT = ('cls_token', 'pos_embed')
_NEEDED = (
    *('patch_embed.projection.weight', 'patch_embed.projection.bias', 'ln1.weight', 'ln1.bias', *_KEPT),
    *('layers.0.attn.qkv.weight', 'layers.0.attn.proj.weight'),
)


def is_deit(state: State) -> bool:
    """Return whether the keys are those of DeiT's authors."""
    return 'blocks.0.attn.qkv.weight' in state


def deit_backbone(state: State) -> State:
    """Return the tensors of a backbone, ``mmpretrain.VisionTransformer``, without the head.

    Raises:
        ValueError: A key is unknown or missing, or the model is distilled.
    """
    if 'dist_token' in state:
        raise ValueError('A distilled DeiT predicts from two tokens; take the one without distillation.')
    converted = {}
    for key, value in state.items():
        if key.startswith('head.'):
            continue
        new = next((re.sub(f'^{old}', name, key) for old, name in _RENAMED if re.match(old, key)), None)
        if new is None and key not in _KEPT:
            raise ValueError(f"The checkpoint does not convert (keys as DeiT's authors name them): unknown: {key}")
        converted[new or key] = value
    missing = [key for key in _NEEDED if key not in converted]
    if missing:
        raise ValueError(f'The checkpoint does not convert (keys as mmpretrain names them): missing: {missing}')
    return converted

"""Every attention of transformers that mmgate's table has, small, and its call."""

from __future__ import annotations

import inspect
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers import PretrainedConfig

from mmgate.hosts.interface import FORMS, Form, fingerprint
from mmgate.hosts.interface_classes import CLASSES

C, HEADS, SIDE = 32, 4, 4
TOKENS = SIDE * SIDE
MODELS = Path(transformers.__file__).parent / 'models'
FOLDERS = {path.stem: '.'.join(path.parent.relative_to(MODELS).parts) for path in MODELS.glob('**/modeling_*.py')}
# The classes with adapters of their own beside those of the table, which take what a form says, too.
OWN = {
    'modeling_segformer.SegformerAttention': Form(),
    'modeling_lw_detr.LwDetrAttention': FORMS['positioned_self'].form,
    'modeling_rf_detr.RfDetrAttention': FORMS['positioned_self'].form,
}
# Rates of dropout.
RATES = (
    *('attention_dropout', 'attention_probs_dropout_prob', 'dropout_prob', 'dropout_rate'),
    *('memory_attention_rope_dropout', 'perceiver_resampler_attention_dropout'),
)
CONFIG: dict[str, Any] = dict(
    **dict.fromkeys(('hidden_size', 'd_model', 'memory_attention_hidden_size', 'perceiver_resampler_hidden_size'), C),
    **dict.fromkeys(('d_kv', 'head_dim', 'perceiver_resampler_attention_head_dim'), C // HEADS),
    **dict.fromkeys(('num_attention_heads', 'attention_heads', 'decoder_self_attention_heads'), HEADS),
    **dict.fromkeys(('num_key_value_heads', 'memory_attention_num_attention_heads'), HEADS),
    **dict.fromkeys(('num_hidden_layers', 'num_key_value_groups', 'memory_attention_downsample_rate'), 1),
    **dict.fromkeys(('patch_size', 'frames_per_clip', 'tubelet_size'), 1),
    **dict.fromkeys(('group_detr', 'attention_downsample_rate'), 2),
    **dict.fromkeys(RATES, 0.0),
    **dict.fromkeys(('qkv_bias', 'qv_bias', 'attention_bias', 'query_bias', 'value_bias', 'proj_bias'), True),
    **dict.fromkeys(('key_bias', 'is_decoder', 'use_clipped_linears'), False),
    **dict.fromkeys(('rms_norm_eps', 'layer_norm_eps'), 1e-5),
    use_qk_norm=True,
    crop_size=SIDE,
    num_key_value_heads_per_layer=[HEADS],
    perceiver_resampler_num_attention_heads=HEADS,
    memory_attention_rope_k_sizes=(1, 2),
    layer_types=['full_attention'],
)
GIVEN = dict(
    **dict.fromkeys(('hidden_size', 'embed_dim', 'dim', 'dim_out', 'kv_in_dim'), C),
    **dict.fromkeys(('num_attention_heads', 'num_heads'), HEADS),
    window_size=SIDE,
    sequence_reduction_ratio=2,
    layer_idx=0,
)
MAPS = ('modeling_sam2.Sam2MultiScaleAttention', 'modeling_sam3.Sam3ViTRoPEAttention')  # take (B, h, w, C)
POINTS = ('sam', 'edgetam')  # take (B, P, N, C), in modules whose names begin so
# Classes whose rotary positions are not cosines and sines (B, N, d): without the batch, or of half the width.
UNBATCHED = ('dinov3_vit', 'eomt_dinov3', 'sam', 'edgetam', 'mlcd', 'sapiens2', 'pixtral')
NO_MASK = ('swin', 'llama4', 'deepseek', 'vjepa2')  # take masks of another shape, or drop them


def names() -> list[str]:
    """Return the names of all classes that this transformers has, with the source that the table knows."""
    there = [(name, kind_of(name)) for name in (*CLASSES, *OWN)]
    return [name for name, kind in there if kind and (name in OWN or fingerprint(kind) == CLASSES[name][1])]


def form_of(name: str) -> Form:
    return OWN[name] if name in OWN else FORMS[CLASSES[name][0]].form


def kind_of(name: str) -> Any:
    """Return a class by its name, or None if this transformers has none of it."""
    module, _, kind = name.partition('.')
    folder = FOLDERS.get(module)
    return getattr(import_module(f'transformers.models.{folder}.{module}'), kind, None) if folder else None


def build(name: str, config: dict[str, Any] | None = None, **options: Any) -> Any:
    """Return a small attention of a class, its weights moved off their start."""
    torch.manual_seed(0)
    made = PretrainedConfig(**{**CONFIG, **(config or {})})
    made._attn_implementation = 'sdpa'
    given = {**GIVEN, 'config': made, **options}
    kind = kind_of(name)
    taken = inspect.signature(kind).parameters
    module = kind(**{key: value for key, value in given.items() if key in taken})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return nn.ModuleDict(dict(attn=module)).eval()


def feed(name: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    """Return what a class is called with: tokens, a map or points, with positions, and a mask where it takes one."""
    generator = torch.Generator().manual_seed(1)
    form = form_of(name)
    model = name.partition('.')[0].removeprefix('modeling_')
    taken = inspect.signature(inspect.unwrap(kind_of(name).forward)).parameters
    rotated = bool(form.why_whole_heads)

    def states(*shape: int) -> Tensor:
        return torch.randn(2, *shape, C, generator=generator, dtype=dtype)

    points = form.query == 'query' and model.startswith(POINTS) and 'attention_mask' not in taken
    points = points and 'positional_encoding' not in taken
    before = (3,) if points else ()
    counts = (TOKENS, TOKENS if rotated or not form.key else 7)
    fed: dict[str, Any] = {}
    fed[form.query] = states(SIDE, SIDE) if name in MAPS else states(*before, counts[0])
    if form.key:
        fed[form.key] = states(*before, counts[1])
    if form.value:
        fed[form.value] = states(*before, counts[1])
    if form.query_position:
        fed[form.query_position] = states(counts[0])
    if form.key_position and form.key_position != form.query_position:
        fed[form.key_position] = states(counts[1])
    if 'positional_encoding' in taken:
        fed['positional_encoding'] = states(counts[1])
    if 'height' in taken:
        fed.update(height=SIDE, width=SIDE)
    if rotated:
        shape = (TOKENS, C // HEADS) if model.startswith(UNBATCHED) else (2, TOKENS, C // HEADS)
        angles = torch.rand(*shape, generator=generator, dtype=dtype)
        for key in ('position_embeddings', 'position_embeddings_k'):
            if key in taken:
                fed[key] = (angles.cos(), angles.sin())
        if model == 'efficientloftr':  # which rotates all heads as one
            fed['position_embeddings'] = tuple(x.repeat(1, 1, HEADS) for x in fed['position_embeddings'])
        if 'position_ids' in taken:  # in two directions
            fed['position_ids'] = torch.zeros(2, TOKENS, 2, dtype=torch.long)
        if 'rope_k_repeat' in taken:
            fed['rope_k_repeat'] = 1
        if 'freqs_ci' in taken:
            half = angles[0, :, : C // HEADS // 2]
            fed['freqs_ci'] = torch.polar(torch.ones_like(half), half)
    if 'attention_mask' in taken and not model.startswith(NO_MASK):
        keys = counts[1] // 4 if model == 'segformer' else counts[1]
        mask = torch.rand(2, 1, TOKENS, keys, generator=generator) > 0.3
        mask[..., 0] = True
        fed['attention_mask'] = mask
    return fed


def first(output: Any) -> Tensor:
    return output[0] if isinstance(output, tuple) else output

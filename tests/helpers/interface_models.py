"""Every attention of transformers' vision models that goes through its attention interface, small, and its call."""

from __future__ import annotations

import inspect
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

C, HEADS, SIDE = 32, 4, 4
TOKENS = SIDE * SIDE
SIZES = dict(
    hidden_size=C,
    d_model=C,
    num_attention_heads=HEADS,
    decoder_self_attention_heads=HEADS,
    attention_dropout=0.0,
    attention_probs_dropout_prob=0.0,
    dropout_prob=0.0,
    qkv_bias=True,
    attention_bias=True,
    query_bias=True,
    key_bias=False,
    value_bias=True,
    proj_bias=True,
    is_decoder=False,
    group_detr=1,
    attention_downsample_rate=2,
    memory_attention_hidden_size=C,
    memory_attention_downsample_rate=1,
    memory_attention_num_attention_heads=HEADS,
    memory_attention_rope_dropout=0.0,
)
GIVEN = dict(
    hidden_size=C,
    num_attention_heads=HEADS,
    embed_dim=C,
    num_heads=HEADS,
    dim=C,
    dim_out=C,
    window_size=SIDE,
    sequence_reduction_ratio=2,
    layer_idx=0,
)
# by module, its classes
CLASSES = {
    'beit': ['BeitAttention'],
    'clip': ['CLIPAttention'],
    'clipseg': ['CLIPSegAttention'],
    'conditional_detr': [f'ConditionalDetr{part}Attention' for part in ('Self', 'DecoderSelf', 'DecoderCross')],
    'd_fine': ['DFineSelfAttention'],
    'data2vec_audio': ['Data2VecAudioAttention'],
    'data2vec_text': ['Data2VecTextSelfAttention', 'Data2VecTextCrossAttention'],
    'deformable_detr': ['DeformableDetrSelfAttention'],
    'deimv2': ['Deimv2SelfAttention'],
    'deit': ['DeiTAttention'],
    'detr': ['DetrSelfAttention', 'DetrCrossAttention'],
    'dinov2': ['Dinov2Attention'],
    'dinov2_with_registers': ['Dinov2WithRegistersAttention'],
    'dinov3_vit': ['DINOv3ViTAttention'],
    'dpt': ['DPTSelfAttention'],
    'edgetam': ['EdgeTamAttention'],
    'eomt': ['EomtAttention'],
    'eomt_dinov3': ['EomtDinov3Attention'],
    'ijepa': ['IJepaAttention'],
    'lw_detr': ['LwDetrViTAttention', 'LwDetrAttention'],
    'maskformer': ['MaskFormerDetrSelfAttention', 'MaskFormerDetrCrossAttention'],
    'owlv2': ['Owlv2Attention'],
    'owlvit': ['OwlViTAttention'],
    'pixio': ['PixioAttention'],
    'pp_doclayout_v2': ['PPDocLayoutV2SelfAttention', 'PPDocLayoutV2ReadingOrderSelfAttention'],
    'pp_doclayout_v3': ['PPDocLayoutV3SelfAttention'],
    'pp_doclayout_v4': ['PPDocLayoutV4SelfAttention'],
    'rf_detr': ['RfDetrDinov2Attention', 'RfDetrAttention'],
    'rt_detr': ['RTDetrSelfAttention'],
    'rt_detr_v2': ['RTDetrV2SelfAttention'],
    'sam': ['SamAttention'],
    'sam2': ['Sam2Attention', 'Sam2MultiScaleAttention'],
    'sam2_video': ['Sam2VideoAttention', 'Sam2VideoRoPEAttention'],
    'sam3': ['Sam3Attention', 'Sam3ViTRoPEAttention'],
    'sam3_lite_text': ['Sam3LiteTextAttention', 'Sam3LiteTextTextAttention'],
    'sam3_tracker': ['Sam3TrackerAttention'],
    'sam_hq': ['SamHQAttention'],
    'segformer': ['SegformerAttention'],
    'siglip': ['SiglipAttention'],
    'siglip2': ['Siglip2Attention'],
    'swin': ['SwinAttention'],
    'videomt': ['VideomtAttention'],
    'vit': ['ViTAttention'],
    'vit_mae': ['ViTMAEAttention'],
    'vit_msn': ['ViTMSNAttention'],
    'vitpose_backbone': ['VitPoseBackboneSelfAttention'],
    'yolos': ['YolosSelfAttention'],
}
FOLDERS = dict(data2vec_audio='data2vec', data2vec_text='data2vec')
NAMES = {name: module for module, names in CLASSES.items() for name in names}
# what a class is refused for, as the end of a sentence about it
REFUSED = {
    'ConditionalDetrDecoderSelfAttention': 'makes its query from q_content_proj and q_pos_proj together',
    'ConditionalDetrDecoderCrossAttention': (
        'makes its query from q_content_proj and q_pos_proj and q_pos_sine_proj together'
    ),
    'Data2VecTextSelfAttention': 'does not project its heads',
    'Data2VecTextCrossAttention': 'does not project its heads',
    'DPTSelfAttention': 'does not project its heads',
    'PPDocLayoutV2ReadingOrderSelfAttention': 'hands position_bias to its attention function',
    'VitPoseBackboneSelfAttention': 'does not project its heads',
    'YolosSelfAttention': 'does not project its heads',
}
ROTATED = ('DINOv3ViTAttention', 'EomtDinov3Attention', 'Sam2VideoRoPEAttention', 'Sam3ViTRoPEAttention')


def kind_of(name: str) -> type[Any]:
    """Return a class by its name."""
    module = NAMES[name]
    folder = FOLDERS.get(module, module)
    return getattr(import_module(f'transformers.models.{folder}.modeling_{module}'), name)


def build(name: str, **options: Any) -> Any:
    """Return a small attention of a class, its weights moved off their start."""
    torch.manual_seed(0)
    config = PretrainedConfig(**SIZES)
    config._attn_implementation = 'sdpa'
    given = dict(GIVEN, config=config, **options)
    taken = inspect.signature(kind_of(name)).parameters
    module = kind_of(name)(**{key: value for key, value in given.items() if key in taken})
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(0.3 * torch.randn_like(parameter))
    return nn.ModuleDict(dict(attn=module)).eval()


def feed(name: str) -> dict[str, Any]:
    """Return what a class is called with: tokens, a map or points, with a mask where it takes one."""
    generator = torch.Generator().manual_seed(1)

    def states(*shape: int) -> Tensor:
        return torch.randn(2, *shape, C, generator=generator)

    taken = inspect.signature(inspect.unwrap(kind_of(name).forward)).parameters
    fed: dict[str, Any] = {}
    on_map = name in ('Sam2MultiScaleAttention', 'Sam3ViTRoPEAttention')
    points = name.startswith(('Sam', 'EdgeTam')) and not name.startswith('Sam3Lite') and name != 'Sam3Attention'
    if 'hidden_states' in taken:
        fed['hidden_states'] = states(SIDE, SIDE) if on_map else states(TOKENS)
    if 'query' in taken:
        shape = (3, 5) if points else (5,)
        keys = shape if name in ROTATED else (*shape[:-1], 7)
        fed.update(query=states(*shape), key=states(*keys), value=states(*keys))
    for key in ('key_value_states', 'encoder_hidden_states'):
        if key in taken and name != 'Data2VecAudioAttention':
            fed[key] = states(7)
    if 'height' in taken:
        fed.update(height=SIDE, width=SIDE)
    if name in ROTATED:
        angles = torch.rand(5 if 'query' in taken else TOKENS, C // HEADS, generator=generator)
        fed['position_embeddings'] = (angles.cos(), angles.sin())
    elif 'position_embeddings' in taken:
        fed['position_embeddings'] = states(TOKENS)
    if 'attention_mask' in taken and 'hidden_states' in taken and name != 'SwinAttention':
        keys = fed.get('key_value_states', fed['hidden_states']).shape[1]
        keys = keys // 4 if name == 'SegformerAttention' else keys
        mask = torch.rand(2, 1, TOKENS, keys, generator=generator) > 0.3
        mask[..., 0] = True
        fed['attention_mask'] = mask
    return fed


def first(output: Any) -> Tensor:
    """Return the states of an attention's output."""
    return output[0] if isinstance(output, tuple) else output

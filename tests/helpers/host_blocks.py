"""The block of each host that really calls it, small."""

from __future__ import annotations

import copy
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import filled
from torch import Tensor, nn

from helpers.repositories import Attention, deformable_inputs
from mmgate._environment import available
from mmgate.gate import gate_options
from mmgate.hosts.table import PACKAGES as PACKAGES_WITH_ADAPTERS
from mmgate.rules import path_regex

C, H, MAP = 32, 4, (8, 8)
TOKENS = torch.Size([2, 64, C])


class Block:
    """The class whose instances call a host, by name, so that a package that is missing is met in its own tests alone.

    Args:
        name: Of the class.
        *sizes: Its positional arguments.
        call: What an instance is called with; sizes stand for random numbers.
        path: Of the host in it.
        named: What it is called with by name.
        refused: By gate, why the host refuses it with its default options; all other pairs run.
        told: Attributes of the model around, which tells a gate its map.
        **options: Its further arguments.
    """

    def __init__(
        self,
        name: str,
        *sizes: Any,
        call: list[Any],
        path: str = 'attn',
        named: Any = (),
        refused: Any = (),
        told: Any = (),
        **options: Any,
    ) -> None:
        self.name, self.sizes, self.options, self.call, self.path = name, sizes, options, call, path
        self.named, self.refused, self.told = dict(named), dict(refused), dict(told)

    def make(self) -> nn.Module:
        module, _, name = self.name.rpartition('.')
        made = getattr(import_module(module), name)(*copy.deepcopy(self.sizes), **copy.deepcopy(self.options))
        vars(made).update(self.told)
        return made


class Holder(nn.Module):
    def __init__(self, name: str, *sizes: Any, **options: Any) -> None:
        super().__init__()
        self.attn = Block(name, *sizes, call=[], **options).make()

    def forward(self, x: Tensor, **given: Any) -> Tensor:
        return self.attn(x, **given)


LAYERS, DET, SEG = 'mmdet.models.layers.transformer', 'mmdet.models', 'mmseg.models.backbones'
PRE, UTILS = 'mmpretrain.models.backbones', 'mmpretrain.models.utils.attention'
ATTENTION = dict(embed_dims=C, num_heads=H)
FFN = dict(embed_dims=C, feedforward_channels=C, num_fcs=2)
LEVELS = dict(
    spatial_shapes=torch.tensor([[6, 8], [4, 4]]),
    level_start_index=torch.tensor([0, 48]),
    reference_points=torch.full((2, 64, 2, 2), 0.5),
)
CAUSAL = torch.ones(64, 64, dtype=torch.bool).triu(1)
PADDING = torch.arange(64) >= torch.tensor([[64], [40]])
TEXT = torch.arange(5) < torch.tensor([[5], [3]])
TO_KEYS = dict(query_pos=TOKENS, key=TOKENS, key_pos=TOKENS, ref_sine_embed=TOKENS, is_first=True)
# mmcv writes into its own default of the dropout layer, wherever a layer is built with another
UNDROPPED = dict(dropout_layer=dict(type='Dropout', drop_prob=0.0), batch_first=True)
FIRST = dict(self_attn_cfg=dict(ATTENTION, **UNDROPPED), ffn_cfg=FFN)
LEVELLED = dict(self_attn_cfg=dict(ATTENTION, num_levels=2, num_points=3, dropout=0.0, batch_first=True), ffn_cfg=FFN)
CROSSED = dict(self_attn_cfg=ATTENTION, cross_attn_cfg=dict(ATTENTION, cross_attn=True), ffn_cfg=FFN)
SHIFTED = dict(window_size=4, shift=True)
WINDOWS = {'WindowMSA': 'attn.w_msa', 'ShiftWindowMSA': 'attn'}
# the map, as ViTs of mmpretrain and timm keep it, with a class token before it
VIT_OF_MMPRETRAIN = dict(patch_resolution=MAP, num_extra_tokens=1)
VIT_OF_TIMM = dict(patch_embed=SimpleNamespace(grid_size=MAP, img_size=(64, 64)), num_prefix_tokens=1)
WITH_CLASS = torch.Size([2, 65, C])
ON_MAP, IN_MAP = [TOKENS, MAP], [torch.Size([2, 8, 8, C])]
_, POINTS, MEMORY, SHAPES, _, MASK = deformable_inputs()
TIMM_MODELS, TIMM_ATTENTION = 'timm.models', 'timm.layers.attention'
RT_DETR, RT_DETR_V2, D_FINE = 'rtdetr_decoder', 'rtdetrv2_decoder', 'dfine_decoder'
GLOBAL = 'timm.models.gcvit.GlobalContextVitBlock'

STREAMS = 'splits heads in two'
# by type, how a gate acts that needs more than whole heads
TWICE = {
    'DifferentialMultiheadAttention': STREAMS,
    'DifferentialGatedMultiheadAttention': STREAMS,
    'DifferentialV2MultiheadAttention': 'adds a second set of queries',
}


def refused_twice(reason: str) -> dict[str, str]:
    """Return the refusals of the gates that attend twice, which end with a reason."""
    return {kind: f'the gate {how}, but {reason}' for kind, how in TWICE.items()}


def narrows(before: int, after: int) -> dict[str, str]:
    """Return the refusal of the gate that acts after an output projection."""
    said = 'the gate acts after an output projection as wide as the heads, but this one goes from'
    return dict(DifferentialGatedMultiheadAttention=f'{said} {before} to {after} channels.')


# by the name of a host, and what is special about this one, what calls it
BLOCKS: dict[str, Block] = {
    'torch.nn.modules.activation.MultiheadAttention': Block(
        'torch.nn.TransformerEncoderLayer', C, H, C, 0.0, batch_first=True, path='self_attn', call=[TOKENS]
    ),
    'mmcv.cnn.bricks.transformer.MultiheadAttention': Block(
        f'{LAYERS}.DetrTransformerEncoderLayer', path='self_attn', call=[TOKENS, TOKENS, None], **FIRST
    ),
    'mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttention': Block(
        f'{LAYERS}.DeformableDetrTransformerEncoderLayer',
        path='self_attn',
        call=[TOKENS, TOKENS, None],
        named=LEVELS,
        **LEVELLED,
    ),
    **{
        f'{LAYERS}.utils.ConditionalAttention{layer}': Block(
            f'{LAYERS}.ConditionalDetrTransformerDecoderLayer',
            path='*_attn',
            call=[TOKENS],
            named=dict(TO_KEYS, is_first=not layer, **masks),
            refused=refused_twice('those of a conditional cross-attention are content and position already.'),
            **CROSSED,
        )
        for layer, masks in {'': {}, ' later': dict(self_attn_masks=CAUSAL, key_padding_mask=PADDING)}.items()
    },
    # masks as GLIP and as Grounding DINO hand them in
    **{
        f'{DET}.utils.vlfuse_helper.BiMultiHeadAttention {kind}'.strip(): Block(
            f'{DET}.utils.vlfuse_helper.SingleScaleBiAttentionBlock',
            *sizes,
            *(H, 0.0),
            call=[torch.Size([2, 64, sizes[0]]), torch.Size([2, 5, sizes[1]]), *masks],
            refused=narrows(C, C // 2) if sizes[0] < C else {},
        )
        for kind, sizes, masks in (
            ('', (C, C, C), []),
            ('of widths', (C // 2, 24, C), [PADDING, TEXT]),
            ('masked', (C, C, C), [PADDING, TEXT.float()]),
        )
    },
    f'{DET}.backbones.pvt.SpatialReductionAttention': Block(
        f'{DET}.backbones.pvt.PVTEncoderLayer', C, H, C, sr_ratio=2, call=ON_MAP
    ),
    **{
        f'{package}.swin.{name}': Block(f'{package}.swin.SwinBlock', C, H, C, call=ON_MAP, path=path, **SHIFTED)
        for package in (f'{DET}.backbones', SEG)
        for name, path in WINDOWS.items()
    },
    f'{SEG}.mit.EfficientMultiheadAttention': Block(
        f'{SEG}.mit.TransformerEncoderLayer', C, H, C, sr_ratio=2, call=ON_MAP
    ),
    f'{SEG}.twins.GlobalSubsampledAttention': Block(f'{SEG}.twins.GSAEncoderLayer', C, H, C, sr_ratio=2, call=ON_MAP),
    f'{SEG}.twins.LocallyGroupedSelfAttention': Block(
        f'{SEG}.twins.LSAEncoderLayer', C, H, C, window_size=4, call=ON_MAP
    ),
    **{
        f'{SEG}.{name.lower()}.{name}Attention': Block(
            f'{SEG}.{name.lower()}.{name}TransformerEncoderLayer',
            *(C, H, C),
            window_size=MAP,
            init_values=0.1,
            call=[WITH_CLASS],
        )
        for name in ('BEiT', 'MAE')
    },
    **{
        f'{UTILS}.{name}': Block(f'{PRE}.swin_transformer.SwinBlock', C, H, call=ON_MAP, path=path, **SHIFTED)
        for name, path in WINDOWS.items()
    },
    f'{UTILS}.WindowMSAV2': Block(
        f'{PRE}.swin_transformer_v2.SwinBlockV2',
        *(C, H),
        call=ON_MAP,
        path='attn.w_msa',
        refused=refused_twice('a WindowMSAV2 attends by the cosine of whole heads.'),
        **SHIFTED,
    ),
    # T2T-ViT multiplies logits by sqrt(d), where its paper divides them
    **{
        f'{UTILS}.MultiheadAttention {kind}'.strip(): Block(
            f'{PRE}.{layer}', C, H, C, call=[WITH_CLASS], told=VIT_OF_MMPRETRAIN, **options
        )
        for kind, layer, options in (
            ('', 'vision_transformer.TransformerEncoderLayer', {}),
            ('without biases', 'vision_transformer.TransformerEncoderLayer', dict(qkv_bias=False)),
            ('of T2T', 't2t_vit.T2TTransformerLayer', {}),
        )
    },
    f'{PRE}.vit_sam.Attention': Block(
        f'{PRE}.vit_sam.TransformerEncoderLayer', C, H, C, use_rel_pos=True, input_size=MAP, call=IN_MAP
    ),
    f'{UTILS}.LeAttention': Block(f'{PRE}.tinyvit.TinyViTBlock', C, MAP, H, window_size=4, call=[TOKENS]),
    f'{PRE}.xcit.XCA': Block(
        f'{PRE}.xcit.XCABlock',
        *(C, H),
        call=[TOKENS, *MAP],
    ),
    'timm.models.visformer.Attention 1.0': Block(
        'timm.models.visformer.Block', C, H, 1.0, call=[torch.Size([2, C, 8, 8])]
    ),
    'timm.models.visformer.Attention 0.5': Block(
        'timm.models.visformer.Block',
        *(C, H, 0.5),
        call=[torch.Size([2, C, 8, 8])],
        refused=narrows(16, 32),
    ),
    'timm.models.gcvit.WindowAttentionGlobal': Block(
        GLOBAL, C, MAP, H, window_size=(4, 4), use_global=False, call=IN_MAP
    ),
    'timm.models.gcvit.WindowAttentionGlobal global': Block(
        GLOBAL, C, MAP, H, window_size=(4, 4), call=[*IN_MAP, torch.Size([2, 4, 4, C])]
    ),
    **{
        f'timm.models.pvt_v2.Attention {kind}': Block(
            'timm.models.pvt_v2.Block', C, H, call=[TOKENS, [8, 8]], **options
        )
        for kind, options in dict(whole={}, reduced=dict(sr_ratio=2), pooled=dict(linear_attn=True)).items()
    },
    **{
        f'vitdet.vit.Attention {kind}': Block(
            'torch.nn.Sequential', Attention(C, H, relative, (4, 6)), path='0', call=[torch.Size([3, 4, 6, C])]
        )
        for kind, relative in dict(relative=True, plain=False).items()
    },
    **{
        f'{host} {options or ""}'.strip(): Block(
            'helpers.repositories.Layer',
            name,
            call=[torch.Size([2, 5, C]), POINTS[:, :, :levels, :columns], MEMORY, SHAPES, MASK],
            **options,
        )
        for host, name, options, columns, levels in (
            ('ms_deform_attn.MSDeformAttn', 'dino', {}, 2, 2),
            ('ms_deform_attn.MSDeformAttn', 'dino', dict(ratio=0.5), 4, 1),
            ('ms_deform_attn.MultiScaleDeformableAttention', 'grounding_dino', {}, 4, 2),
            ('detrex.layers.multi_scale_deform_attn.MultiScaleDeformableAttention', 'detrex', {}, 2, 2),
            (f'{RT_DETR}.MSDeformableAttention', 'rt_detr', {}, 4, 1),
            (f'{RT_DETR_V2}.MSDeformableAttention', 'rt_detr_v2', {}, 2, 2),
            (f'{RT_DETR_V2}.MSDeformableAttention', 'rt_detr_v2', dict(num_points=[3, 6]), 4, 1),
            (f'{RT_DETR_V2}.MSDeformableAttention', 'rt_detr_v2', dict(offset_scale=1.0), 4, 2),
            (f'{D_FINE}.MSDeformableAttention', 'd_fine', {}, 4, 1),
            (f'{D_FINE}.MSDeformableAttention', 'd_fine', dict(num_points=[3, 6]), 2, 2),
            (f'{D_FINE}.MSDeformableAttention', 'd_fine', dict(num_points=[4, 1], offset_scale=0.25), 4, 2),
            (f'{D_FINE}.MSDeformableAttention', 'd_fine', dict(num_points=[3, 3]), 4, 1),
            ('ultralytics.nn.modules.transformer.MSDeformAttn', 'ultralytics', {}, 4, 1),
        )
    },
    f'{TIMM_ATTENTION}.Attention': Block(
        f'{TIMM_MODELS}.vision_transformer.Block', C, H, qkv_bias=True, call=[WITH_CLASS], told=VIT_OF_TIMM
    ),
    f'{TIMM_ATTENTION}.Attention narrow': Block(
        'helpers.host_blocks.Holder',
        *(f'{TIMM_ATTENTION}.Attention', C, H),
        attn_head_dim=6,
        dim_out=40,
        call=[TOKENS],
        named=dict(is_causal=True),
        refused=dict(
            narrows(24, 40),
            **dict.fromkeys(
                ('AgentAttention', 'SAGAAttention', 'SoftmaxAttention'),
                'an attention over a map needs one width, but Attention has 32 channels, its heads 24 and its output '
                '40.',
            ),
        ),
    ),
    f'{TIMM_ATTENTION}.Attention normed': Block(
        f'{TIMM_MODELS}.vision_transformer.Block',
        *(C, H),
        qk_norm=True,
        scale_attn_norm=True,
        call=[WITH_CLASS],
        told=VIT_OF_TIMM,
        refused=refused_twice('this Attention normalises queries and keys (qk_norm).'),
    ),
    f'{TIMM_ATTENTION}.AttentionRope': Block(
        f'{TIMM_MODELS}.eva.EvaBlock',
        *(C, H),
        attn_type='rope',
        call=[WITH_CLASS, torch.Size([64, 4 * H])],
        refused=refused_twice('AttentionRope rotates channels of both together.'),
    ),
    **{
        f'{TIMM_MODELS}.eva.EvaAttention {kind}': Block(
            f'{TIMM_MODELS}.eva.EvaBlock',
            *(C, H),
            call=[WITH_CLASS, torch.Size([64, 4 * H])],
            refused=refused_twice('EvaAttention rotates channels of both together.'),
            **options,
        )
        for kind, options in dict(
            joint={}, apart=dict(qkv_fused=False), plain=dict(qkv_bias=False), half=dict(rotate_half=True)
        ).items()
    },
    f'{TIMM_MODELS}.swin_transformer.WindowAttention': Block(
        f'{TIMM_MODELS}.swin_transformer.SwinTransformerBlock', C, MAP, H, window_size=4, shift_size=2, call=IN_MAP
    ),
    f'{TIMM_MODELS}.swin_transformer.SwinTransformerBlock': Block(
        f'{TIMM_MODELS}.swin_transformer.SwinTransformerStage',
        *(C, C, MAP, 2),
        downsample=False,
        num_heads=H,
        window_size=4,
        path='blocks.*',
        call=IN_MAP,
    ),
}

PACKAGES = PACKAGES_WITH_ADAPTERS - {'transformers'}  # which has tests of its own


def needs(host: str) -> Any:
    package = host.partition('.')[0]
    missing = package in PACKAGES and not available(package)
    return pytest.param(host, marks=pytest.mark.skipif(missing, reason=f'needs {package}'))


def hosts_in(module: nn.Module, block: Block) -> dict[str, nn.Module]:
    return {name: host for name, host in module.named_modules() if path_regex(block.path).fullmatch(name)}


def randomised(module: nn.Module) -> nn.Module:
    filled(module, 0.2).eval()  # TinyViT's returns nothing
    return module


def some_options(gate: type) -> dict[str, Any]:
    options: dict[str, Any] = dict(agent_num=4) if gate.__name__ == 'AgentAttention' else {}
    return options | (dict(map_size=MAP) if 'map_size' in gate_options(gate) else {})


def inputs(block: Block) -> tuple[list[Any], dict[str, Any]]:
    """Return what a block is called with, by position and by name, the same numbers each time."""
    generator = torch.Generator().manual_seed(0)

    def value(x: Any) -> Any:
        return torch.randn(x, generator=generator) if isinstance(x, torch.Size) else x

    return [value(x) for x in block.call], {name: value(x) for name, x in block.named.items()}


def called(module: nn.Module, block: Block) -> Tensor:
    args, named = inputs(block)
    out = module(*args, **named)
    return torch.cat([x.flatten(1) for x in out], 1) if isinstance(out, tuple) else out

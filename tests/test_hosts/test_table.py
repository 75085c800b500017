"""Every pair of the table in the block of its host that really calls it: a pass, a step's gradient, the attributes."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

import pytest
import torch
from test_project_hosts import Attention, DecoderLayer, deformable_inputs
from torch import Tensor, nn

from mmgate import swap_attention
from mmgate._environment import available
from mmgate.hosts import gates_for
from mmgate.hosts.table import _ADAPTERS, full_name
from mmgate.layers.base.init import gate_parameters

C, H, MAP = 32, 4, (8, 8)
TOKENS = torch.Size([2, 64, C])
IMAGE = torch.Size([2, C, 8, 8])


def made(path: str, /, *args: Any, **kwargs: Any) -> Callable[[], nn.Module]:
    """A class by its name, so that a package that is missing is met in its own tests alone."""
    module, _, name = path.rpartition('.')
    return lambda: getattr(import_module(module), name)(*args, **kwargs)


def deformable_layer() -> nn.Module:
    sizes = dict(embed_dims=C, num_heads=H, num_levels=2, num_points=3, batch_first=True)
    ffn = dict(embed_dims=C, feedforward_channels=C, num_fcs=2)
    return made(f'{DETR}.DeformableDetrTransformerEncoderLayer', self_attn_cfg=sizes, ffn_cfg=ffn)()


def detr_layer() -> nn.Module:
    ffn = dict(embed_dims=C, feedforward_channels=C, num_fcs=2)
    attention = dict(embed_dims=C, num_heads=H, batch_first=True)
    return made(f'{DETR}.DetrTransformerEncoderLayer', self_attn_cfg=attention, ffn_cfg=ffn)()


def conditional_layer() -> nn.Module:
    ffn = dict(embed_dims=C, feedforward_channels=C, num_fcs=2)
    own, cross = dict(embed_dims=C, num_heads=H), dict(embed_dims=C, num_heads=H, cross_attn=True)
    layer = f'{DETR}.ConditionalDetrTransformerDecoderLayer'
    return made(layer, self_attn_cfg=own, cross_attn_cfg=cross, ffn_cfg=ffn)()


DETR = 'mmdet.models.layers.transformer'
SHAPED = dict(
    spatial_shapes=torch.tensor([[6, 8], [4, 4]]),
    level_start_index=torch.tensor([0, 48]),
    reference_points=torch.full((2, 64, 2, 2), 0.5),
)
CONDITIONAL = dict(query_pos=TOKENS, key=TOKENS, key_pos=TOKENS, ref_sine_embed=TOKENS, is_first=True)
MASK_DINO = [torch.Size([5, 2, C]), *(lambda x: (x[1], x[2].transpose(0, 1), x[5]))(deformable_inputs())]
SWIN_OF_MMPRETRAIN = dict(window_size=4, shift=True)
# host: its block, the path of the host in it, and what the block is called with (sizes stand for random numbers)
BLOCKS: dict[str, tuple[Callable[[], nn.Module], str, list[Any], dict[str, Any]]] = {
    'torch.nn.modules.activation.MultiheadAttention': (
        made('torch.nn.TransformerEncoderLayer', C, H, C, batch_first=True),
        'self_attn',
        [TOKENS],
        {},
    ),
    'mmcv.cnn.bricks.transformer.MultiheadAttention': (detr_layer, 'self_attn', [TOKENS, TOKENS, None], {}),
    'mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttention': (
        deformable_layer,
        'self_attn',
        [TOKENS, TOKENS, None],
        SHAPED,
    ),
    **{
        f'{package}.models.backbones.swin.{name}': (
            made(f'{package}.models.backbones.swin.SwinBlock', C, H, C, window_size=4, shift=True),
            path,
            [TOKENS, MAP],
            {},
        )
        for package in ('mmdet', 'mmseg')
        for name, path in (('WindowMSA', 'attn.w_msa'), ('ShiftWindowMSA', 'attn'))
    },
    'mmpretrain.models.utils.attention.WindowMSA': (
        made('mmpretrain.models.backbones.swin_transformer.SwinBlock', C, H, **SWIN_OF_MMPRETRAIN),
        'attn.w_msa',
        [TOKENS, MAP],
        {},
    ),
    'mmpretrain.models.utils.attention.ShiftWindowMSA': (
        made('mmpretrain.models.backbones.swin_transformer.SwinBlock', C, H, **SWIN_OF_MMPRETRAIN),
        'attn',
        [TOKENS, MAP],
        {},
    ),
    'mmpretrain.models.utils.attention.WindowMSAV2': (
        made('mmpretrain.models.backbones.swin_transformer_v2.SwinBlockV2', C, H, **SWIN_OF_MMPRETRAIN),
        'attn.w_msa',
        [TOKENS, MAP],
        {},
    ),
    'mmdet.models.backbones.pvt.SpatialReductionAttention': (
        made('mmdet.models.backbones.pvt.PVTEncoderLayer', C, H, C, sr_ratio=2),
        'attn',
        [TOKENS, MAP],
        {},
    ),
    f'{DETR}.utils.ConditionalAttention': (conditional_layer, '*_attn', [TOKENS], CONDITIONAL),
    'mmdet.models.utils.vlfuse_helper.BiMultiHeadAttention': (
        made('mmdet.models.utils.vlfuse_helper.SingleScaleBiAttentionBlock', C, C, C, H),
        'attn',
        [TOKENS, torch.Size([2, 5, C])],
        {},
    ),
    'mmseg.models.backbones.mit.EfficientMultiheadAttention': (
        made('mmseg.models.backbones.mit.TransformerEncoderLayer', C, H, C, sr_ratio=2),
        'attn',
        [TOKENS, MAP],
        {},
    ),
    'mmseg.models.backbones.twins.GlobalSubsampledAttention': (
        made('mmseg.models.backbones.twins.GSAEncoderLayer', C, H, C, sr_ratio=2),
        'attn',
        [TOKENS, MAP],
        {},
    ),
    'mmseg.models.backbones.twins.LocallyGroupedSelfAttention': (
        made('mmseg.models.backbones.twins.LSAEncoderLayer', C, H, C, window_size=4),
        'attn',
        [TOKENS, MAP],
        {},
    ),
    **{
        f'mmseg.models.backbones.{name.lower()}.{name}Attention': (
            made(
                f'mmseg.models.backbones.{name.lower()}.{name}TransformerEncoderLayer',
                C,
                H,
                C,
                window_size=MAP,
                init_values=0.1,
            ),
            'attn',
            [torch.Size([2, 65, C])],
            {},
        )
        for name in ('BEiT', 'MAE')
    },
    'mmpretrain.models.utils.attention.MultiheadAttention': (
        made('mmpretrain.models.backbones.vision_transformer.TransformerEncoderLayer', C, H, C),
        'attn',
        [TOKENS],
        {},
    ),
    'mmpretrain.models.backbones.vit_sam.Attention': (
        made('mmpretrain.models.backbones.vit_sam.TransformerEncoderLayer', C, H, C, use_rel_pos=True, input_size=MAP),
        'attn',
        [torch.Size([2, 8, 8, C])],
        {},
    ),
    'mmpretrain.models.utils.attention.LeAttention': (
        made('mmpretrain.models.backbones.tinyvit.TinyViTBlock', C, MAP, H, window_size=4),
        'attn',
        [TOKENS],
        {},
    ),
    'mmpretrain.models.backbones.xcit.XCA': (
        made('mmpretrain.models.backbones.xcit.XCABlock', C, H),
        'attn',
        [TOKENS, *MAP],
        {},
    ),
    'timm.models.visformer.Attention': (made('timm.models.visformer.Block', C, H), 'attn', [IMAGE], {}),
    'timm.models.gcvit.WindowAttentionGlobal': (
        made('timm.models.gcvit.GlobalContextVitBlock', C, MAP, H, window_size=(4, 4), use_global=False),
        'attn',
        [torch.Size([2, 8, 8, C])],
        {},
    ),
    'timm.models.pvt_v2.Attention': (made('timm.models.pvt_v2.Block', C, H, sr_ratio=2), 'attn', [TOKENS, [8, 8]], {}),
    'vitdet.vit.Attention': (
        lambda: nn.Sequential(Attention(C, H, True, MAP)),
        '0',
        [torch.Size([2, 8, 8, C])],
        {},
    ),
    'ms_deform_attn.MSDeformAttn': (DecoderLayer, 'cross_attn', MASK_DINO, {}),
}
PACKAGES = ('torch', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'timm')
# attributes whose name means something else in a gate
OWN = {'SDPAGatedMultiheadAttention': {'scale'}}


def needs(host: str) -> Any:
    package = host.partition('.')[0]
    missing = package in PACKAGES and not available(package)
    return pytest.param(host, marks=pytest.mark.skipif(missing, reason=f'needs {package}'))


@pytest.fixture(autouse=True)
def _cloned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Attention, '__module__', 'projects.ViTDet.vitdet.vit')
    monkeypatch.setattr('test_project_hosts.MSDeformAttn.__module__', 'ops.modules.ms_deform_attn')


def randomised(block: nn.Module) -> nn.Module:
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    block.eval()  # TinyViT's returns nothing
    return block


def called(block: nn.Module, args: list[Any], kwargs: dict[str, Any]) -> Tensor:
    generator = torch.Generator().manual_seed(0)

    def value(x: Any) -> Any:
        return torch.randn(x, generator=generator) if isinstance(x, torch.Size) else x

    out = block(*[value(x) for x in args], **{name: value(x) for name, x in kwargs.items()})
    return torch.cat(out, 1) if isinstance(out, tuple) else out


def options_of(gate: type) -> dict[str, Any]:
    options = dict(agent_num=4) if gate.__name__ == 'AgentAttention' else {}
    return options | (dict(map_size=MAP) if 'map_size' in inspect.signature(gate).parameters else {})


def test_every_host_has_its_block() -> None:
    if available('timm'):
        import_module('mmgate.hosts.timm')
    hosts = {host if isinstance(host, str) else full_name(host) for _, host in _ADAPTERS}
    hosts = {host for host in hosts if host.partition('.')[0] in (*PACKAGES, 'vitdet', 'ms_deform_attn')}
    present = {host for host in BLOCKS if host.partition('.')[0] not in PACKAGES or available(host.partition('.')[0])}
    assert hosts == present, 'a new pair needs the block that calls its host'


@pytest.mark.parametrize('host', [needs(host) for host in BLOCKS])
def test_every_gate_runs_in_its_hosts_block(host: str) -> None:
    """Those that start as the identity compute what the block did; all have a gradient and the host's attributes."""
    make, path, args, kwargs = BLOCKS[host]
    vanilla = randomised(make())
    with torch.no_grad():
        expected = called(vanilla, args, kwargs)
    name = next(n for n, _ in vanilla.named_modules() if n == path or (path == '*_attn' and n == 'self_attn'))
    module = vanilla.get_submodule(name)
    assert host in (full_name(type(module)), host if type(module).__name__ == host.rpartition('.')[2] else '')
    fitting = [gate for gate in gates_for(module) if gate.__module__.startswith('mmgate.')]
    assert fitting
    tried = 0
    for gate in fitting:
        block = copy.deepcopy(vanilla)
        try:
            swap_attention(block, dict(type=gate, path=path, **options_of(gate)))
        except ValueError as error:  # this host's widths or scales rule the gate out, and it says so
            assert gate.__name__ in str(error)
            continue
        tried += 1
        actual = called(block, args, kwargs)
        assert actual.shape == expected.shape and actual.isfinite().all(), gate
        if 'PLuG' in gate.__name__ or gate.__name__ == 'MultiScaleDeformableAttention':
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
        block.train()
        called(block, args, kwargs).square().sum().backward()
        added = dict(gate_parameters(block))
        assert not added or any(p.grad is not None and p.grad.abs().sum() > 0 for p in added.values()), gate
        gated = block.get_submodule(name)
        for attribute, value in vars(module).items():
            if (
                attribute.startswith('_')
                or attribute == 'training'
                or callable(value)
                or attribute in getattr(gated, 'without', ())
            ):
                continue
            assert hasattr(gated, attribute), f'{gate.__name__} lacks {attribute} of {host}'
            if isinstance(value, int | float | tuple) and attribute not in OWN.get(gate.__name__, set()):
                assert getattr(gated, attribute) == value, f'{attribute} of {gate.__name__} and {host}'
    assert tried

"""The map that a gate is told: by the model around its host, or by the rule's image size and the model's stride."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from helpers.backbones import PRETRAIN, SVT, SWIN
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmgate import restore_attention, swap_attention
from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Sizes
from mmgate.gates.base.map import MapGate, pretraining_map
from mmgate.gates.saga import SAGAGate

PVT = dict(type='mmdet.PyramidVisionTransformer', num_layers=[1, 1, 1, 1])
MIT = dict(type='mmseg.MixVisionTransformer', embed_dims=8, num_layers=[1] * 4, num_heads=[1, 2, 4, 8], mlp_ratio=1)
ONE_EACH = dict(SWIN, depths=(1, 1, 1, 1))
TWINS = {name: value for name, value in SVT.items() if name != 'windiow_sizes'}
PRETRAINED_SWIN = dict(PRETRAIN, type='mmpretrain.SwinTransformer')
PRETRAINED_SWIN['arch'] = dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8])
ARCH = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=32)
VIT = dict(type='mmpretrain.VisionTransformer', arch=ARCH)
T2T = dict(type='mmpretrain.T2T_ViT', embed_dims=16, num_layers=1, t2t_cfg=dict(token_dims=8, use_performer=False))
T2T['layer_cfgs'] = dict(num_heads=2, feedforward_channels=16)
AGENTS = dict(type='AgentAttention', agent_num=4)


class Seeing(MapGate):
    """A gate of a user that needs the map in pre-training, and keeps each map that it sees."""

    def __init__(self, sizes: Sizes, *, map_size: Any = None, image_size: Any = None) -> None:
        super().__init__(sizes)
        self.map_size = pretraining_map(sizes, map_size, image_size)
        self.stride = sizes.stride
        self.seen: list[tuple[int, int]] = []

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        self.seen.append(hw_shape)
        return v


def seen(host: dict[str, Any], images: Tensor, **options: Any) -> tuple[nn.Module, list[Any]]:
    """Return a model after a pass of images, in which attention over the map is replaced, and its gates."""
    model = MODELS.build(dict(host))
    names = swap_attention(model, dict(path='**', type=Seeing, **options))
    model.eval()  # of some hosts it returns nothing
    with torch.no_grad():
        model(images)
    return model, [model.get_submodule(name).gate for name in names]


def of_mmpretrain(host: dict[str, Any], size: tuple[int, int]) -> Any:
    return pytest.param(host, size, True, marks=needs_mmpretrain)


SMALL = dict(embed_dims=16, num_heads=(1, 2, 4, 8), depths=(1, 1, 1, 1))
CSWIN = dict(type='mmgate.AgentCSwin', depths=(1, 1, 1, 1), embed_dims=16, agent_nums=(None,) * 4)
# A backbone, an image's size, and whether it keeps that itself.
BACKBONES = [
    (PVT, (160, 96), False),
    (dict(PVT, type='mmdet.PyramidVisionTransformerV2', in_channels=4), (224, 224), False),
    (MIT, (160, 96), False),
    (dict(TWINS, type='mmseg.PCPVT', depths=[1] * 4), (224, 224), False),
    (dict(SVT, depths=[1, 1, 1, 2]), (160, 96), False),
    (dict(ONE_EACH, type='mmdet.SwinTransformer', in_channels=4), (160, 96), False),
    (dict(ONE_EACH, type='mmseg.SwinTransformer'), (224, 224), False),
    pytest.param(PRETRAINED_SWIN, (160, 96), False, marks=needs_mmpretrain),
    (dict(type='mmgate.PVT', num_layers=[1] * 4), (160, 96), False),
    (dict(type='mmgate.Swin', **SMALL), (160, 96), False),
    (CSWIN, (160, 96), False),
    (PVT, (224, 224), True),
    (dict(PVT, pretrain_img_size=96, in_channels=4), (96, 96), True),
    of_mmpretrain(dict(PRETRAINED_SWIN, img_size=(128, 96)), (128, 96)),
    (dict(type='mmgate.PVTv2', num_layers=[1] * 4, pretrain_img_size=(128, 96)), (128, 96), True),
    (dict(type='mmgate.Swin', **SMALL, pretrain_img_size=96), (96, 96), True),
    (dict(CSWIN, pretrain_img_size=96), (96, 96), True),
    of_mmpretrain(dict(VIT, img_size=(48, 64), in_channels=4), (48, 64)),
    *(
        of_mmpretrain(dict(VIT, type=f'mmpretrain.{name}', img_size=(48, 64)), (48, 64))
        for name in ('DistilledVisionTransformer', 'DeiT3', 'RevVisionTransformer')
    ),
    of_mmpretrain(dict(T2T, img_size=64), (64, 64)),
]


def type_of(value: Any) -> str:
    return value['type'] if isinstance(value, dict) else ''


@pytest.mark.parametrize('host, size, kept', BACKBONES, ids=type_of)
def test_the_map_is_right_in_all_stages(host: dict[str, Any], size: tuple[int, int], kept: bool) -> None:
    """By the size that the rule says or the model keeps, as a pass of such an image shows it.

    A swap takes no random number to find it.
    """
    images = torch.randn(1, host.get('in_channels', 3), *size)
    rule = {} if kept else dict(image_size=size)
    model, gates = seen(host, images, **rule)
    assert len(gates) >= (1 if 'T2T' in host['type'] else 2 if 'arch' in host else 4)
    assert all(gate.seen == [gate.map_size] for gate in gates)
    assert not kept or all(gate.map_size == gate.host_map for gate in gates)
    if host.get('arch') is ARCH:  # tokens of patches come row by row, after the class tokens
        assert all(gate.class_tokens == model.num_extra_tokens and gate.stride == 16 for gate in gates)
        assert model.patch_embed(images)[1] == gates[0].host_map
    model = MODELS.build(dict(host))
    before = torch.get_rng_state()
    swap_attention(model, dict(path='**', type=Seeing, **rule))
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize('package', ['mmdet', 'mmseg'])
def test_a_model_that_keeps_no_image_size_asks_for_it(package: str) -> None:
    """Unless the gate has no position terms; an attribute of the backbone says it, too.

    The message has the line to write, with the size that the config names.
    """
    host = dict(ONE_EACH, type=f'{package}.SwinTransformer')
    rule = dict(type='SAGAAttention', path='**')
    for without in (dict(rule, position_encoding=False), dict(AGENTS, path='**', bias=False)):
        assert len(swap_attention(MODELS.build(host), without)) == 4
    said = r'attention\[0\]: SAGAAttention in stages.0.blocks.0.attn: it needs the size of the images in pre-training'
    with pytest.raises(OptionError, match=said):
        swap_attention(MODELS.build(host), rule)
    loss = dict(type='mmseg.CrossEntropyLoss')
    head = dict(type='mmseg.FCNHead', in_channels=16, channels=4, num_classes=2, in_index=0, loss_decode=loss)
    model = dict(type='mmgate.Gated', host='mmseg.EncoderDecoder', decode_head=head, attention=rule)
    with pytest.raises(OptionError, match='Write image_size=384 into the rule, .* is image_size / 4'):
        MODELS.build(dict(model, backbone=dict(host, pretrain_img_size=384)))
    with pytest.raises(OptionError, match='Write image_size=224 into the rule'):
        MODELS.build(dict(model, backbone=host))
    gated = MODELS.build(dict(model, backbone=host, attention=dict(rule, image_size=384)))
    told = MODELS.build(host)
    told.pretrain_img_size = 384
    swap_attention(told, rule)
    for one in (gated, told):
        maps = [part.map_size for part in one.modules() if isinstance(part, SAGAGate)]
        assert maps == [(96, 96), (48, 48), (24, 24), (12, 12)]


@needs_mmpretrain
@pytest.mark.parametrize('window', [None, 4], ids=['whole map', 'windows'])
def test_a_vit_takes_images_of_the_size_that_it_was_built_for(window: int | None) -> None:
    """Of another number of patches are refused; no hook stays behind."""
    sizes = dict(img_size=(128, 128), out_type='featmap', with_cls_token=window is None)
    vit: Any = MODELS.build(dict(VIT, **sizes))
    swap_attention(vit, dict(AGENTS, path='layers.*.attn', window=window))
    assert not vit.patch_embed._forward_hooks
    assert vit(torch.randn(1, 3, 128, 128))[0].isfinite().all()
    said = r'AgentGate takes images of that size alone.* Build the model for the size of these images'
    with pytest.raises(ValueError, match=said):
        vit(torch.randn(1, 3, 112, 224))
    restore_attention(vit)
    assert vit(torch.randn(1, 3, 112, 224))[0].isfinite().all()


def test_a_part_of_a_model_and_a_stage_of_unknown_form_tell_nothing() -> None:
    """The message has the option to write."""
    from mmdet.models.backbones.swin import ShiftWindowMSA

    stages = nn.ModuleList([nn.ModuleList([ShiftWindowMSA(8, 2, 4)])])
    for model, path in ((MODELS.build(PVT).layers[0], '1.1.attn'), (nn.ModuleDict(dict(stages=stages)), 'stages.0.0')):
        said = rf'AgentAttention in {path}: .* neither the attention nor the model .* Write map_size=\(14, 14\)'
        with pytest.raises(OptionError, match=said):
            swap_attention(model, dict(AGENTS, path=path))
        assert swap_attention(model, dict(AGENTS, path=path, map_size=(4, 4))) == [path]


@needs_mmpretrain
def test_attention_that_two_models_share_has_one_map() -> None:
    """Its gate has one, too."""
    small, large = (MODELS.build(dict(VIT, img_size=size, patch_size=16)) for size in (64, 96))
    large.layers[0].attn = small.layers[0].attn
    model = nn.ModuleDict(dict(small=small, large=large))
    with pytest.raises(ConfigError, match=r'large.layers.0.attn is shared with small.layers.0.attn, which sees'):
        swap_attention(model, dict(path='*.layers.*.attn', type='SoftmaxAttention'))

"""The map that a gate is told: by the model around its host, or by the rule's image size and the model's stride."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from helpers.backbones import PRETRAIN, SVT, SWIN
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmgate import restore_attention, swap_attention
from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Sizes, gate_of_type, registered_gates
from mmgate.gates import SoftmaxAttention
from mmgate.gates.agent import AgentGate
from mmgate.gates.base.map import MapGate, pretraining_map
from mmgate.gates.saga import SAGAGate

PVT = dict(type='mmdet.PyramidVisionTransformer', num_layers=[1, 1, 1, 1])
PVT_V2 = dict(PVT, type='mmdet.PyramidVisionTransformerV2')
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
PYRAMID = [(56, 56), (28, 28), (14, 14), (7, 7)]


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


@pytest.mark.parametrize('side', [(224, 224), (160, 96)], ids=str)
@pytest.mark.parametrize(
    'host, stages',
    [
        (PVT, 4),
        (PVT_V2, 4),
        (MIT, 4),
        (dict(TWINS, type='mmseg.PCPVT', depths=[1] * 4), 4),
        (dict(SVT, depths=[1, 1, 1, 2]), 5),
        (dict(ONE_EACH, type='mmdet.SwinTransformer'), 4),
        (dict(ONE_EACH, type='mmseg.SwinTransformer'), 4),
        pytest.param(PRETRAINED_SWIN, 4, marks=needs_mmpretrain),
        (dict(type='mmgate.PVT', num_layers=[1] * 4), 4),
        (dict(type='mmgate.PVTv2', num_layers=[1] * 4), 4),
        (dict(type='mmgate.Swin', depths=(1, 1, 1, 1), embed_dims=16, num_heads=(1, 2, 4, 8)), 4),
        (dict(type='mmgate.AgentCSwin', depths=(1, 1, 1, 1), embed_dims=16, agent_nums=(None,) * 4), 4),
    ],
    ids=lambda value: value['type'] if isinstance(value, dict) else '',
)
def test_an_image_size_is_right_for_all_stages(host: dict[str, Any], stages: int, side: tuple[int, int]) -> None:
    """As a pass of images of that size shows it."""
    _, gates = seen(host, torch.randn(1, 3, *side), image_size=side)
    assert len(gates) == stages and all(gate.seen == [gate.map_size] for gate in gates)


@pytest.mark.parametrize(
    'host, size',
    [
        (PVT, (224, 224)),
        (dict(PVT, pretrain_img_size=96), (96, 96)),
        pytest.param(dict(PRETRAINED_SWIN, img_size=(128, 96)), (128, 96), marks=needs_mmpretrain),
        (dict(type='mmgate.PVT', num_layers=[1] * 4, pretrain_img_size=96), (96, 96)),
        (dict(type='mmgate.PVTv2', num_layers=[1] * 4, pretrain_img_size=(128, 96)), (128, 96)),
        (dict(type='mmgate.Swin', **ONE_EACH, pretrain_img_size=96), (96, 96)),
        (
            dict(type='mmgate.AgentCSwin', depths=(1,) * 4, agent_nums=(None,) * 4, pretrain_img_size=96),
            (96, 96),
        ),
        *(
            pytest.param(dict(VIT, type=f'mmpretrain.{name}', img_size=(48, 64)), (48, 64), marks=needs_mmpretrain)
            for name in ('VisionTransformer', 'DistilledVisionTransformer', 'DeiT3', 'RevVisionTransformer')
        ),
        pytest.param(dict(T2T, img_size=64), (64, 64), marks=needs_mmpretrain),
    ],
    ids=lambda value: value['type'] if isinstance(value, dict) else 'x'.join(map(str, value)),
)
def test_a_model_that_keeps_its_map_needs_no_rule(host: dict[str, Any], size: tuple[int, int]) -> None:
    """Its map is the one of a pass of images of that size, and no random number is taken to find it."""
    before = torch.get_rng_state()
    images = torch.randn(1, 3, *size, generator=torch.Generator())
    model, gates = seen(host, images)
    assert gates and all(gate.seen == [gate.map_size] == [gate.host_map] for gate in gates)
    torch.set_rng_state(before)
    model = MODELS.build(dict(host))
    before = torch.get_rng_state()
    swap_attention(model, dict(path='**', type=Seeing))
    assert torch.equal(before, torch.get_rng_state())


@needs_mmpretrain
def test_the_tokens_of_a_vit_are_those_of_its_patches() -> None:
    """Row by row, after the class token; the rule's image size gives position terms their shape alone."""
    model, (gate, _) = seen(dict(VIT, img_size=(48, 64)), torch.randn(1, 3, 48, 64), image_size=224)
    assert (gate.class_tokens, gate.host_map, gate.map_size, gate.stride) == (1, (3, 4), (14, 14), 16)
    assert gate.seen == [(3, 4)] and model.patch_embed(torch.randn(1, 3, 48, 64))[1] == (3, 4)


@pytest.mark.parametrize(
    'host',
    [
        PVT,
        dict(ONE_EACH, type='mmdet.SwinTransformer'),
        MIT,
        pytest.param(dict(VIT, img_size=224), marks=needs_mmpretrain),
    ],
    ids=lambda host: host['type'],
)
def test_images_may_have_any_number_of_channels(host: dict[str, Any]) -> None:
    _, gates = seen(dict(host, in_channels=4), torch.randn(1, 4, 224, 224), image_size=224)
    assert gates and all(gate.seen == [gate.map_size] for gate in gates)


@pytest.mark.parametrize('package', ['mmdet', 'mmseg'])
def test_a_model_that_keeps_no_image_size_asks_for_it(package: str) -> None:
    """By the line to write, with the size that the config names; an attribute of the backbone says it, too."""
    host = dict(ONE_EACH, type=f'{package}.SwinTransformer')
    rule = dict(type='SAGAAttention', path='**')
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


def test_a_gate_behind_kwargs_is_read_as_its_base() -> None:
    class MyGate(AgentGate):
        def __init__(self, sizes: Sizes, *, extra: int, **options: Any) -> None:
            super().__init__(sizes, **options)

    model = MODELS.build(PVT)
    swap_attention(model, dict(type=MyGate, path='layers.0.**', dwc=False, extra=1))
    gate = model.layers[0][1][1].attn.gate
    assert gate.map_size == (56, 56) and gate.dwc is None


@needs_mmpretrain
def test_a_part_of_a_model_does_not_tell_it() -> None:
    """The message has the option to write; a ViT's attention, whose call names no map, is refused."""
    stage = MODELS.build(PVT).layers[0]
    with pytest.raises(OptionError, match=r'AgentAttention in 1.1.attn: it needs the map .*Write map_size=\(14, 14\)'):
        swap_attention(stage, dict(AGENTS, path='1.*.attn'))
    assert swap_attention(stage, dict(AGENTS, path='1.*.attn', map_size=(56, 56))) == ['1.1.attn']
    layers: Any = MODELS.build(dict(VIT, img_size=32)).layers
    with pytest.raises(ConfigError, match='a call of a MultiheadAttention does not name the map, and no ViT around'):
        swap_attention(layers, dict(type='SoftmaxAttention', path='0.attn'))


@needs_mmpretrain
@pytest.mark.parametrize('gate', [gate for gate in registered_gates() if issubclass(gate_of_type(gate), MapGate)])
@pytest.mark.parametrize('host', ['VisionTransformer', 'DistilledVisionTransformer'])
def test_every_gate_of_maps_heeds_class_tokens(host: str, gate: type[nn.Module]) -> None:
    """And a map that is no square."""
    vanilla, gated = (MODELS.build(dict(VIT, type=f'mmpretrain.{host}', img_size=(48, 64))) for _ in range(2))
    gated.load_state_dict(vanilla.state_dict())
    for model in (vanilla, gated):
        model.eval()  # returns nothing
    rule = dict(type=gate, path='layers.*.attn')
    names = swap_attention(gated, rule)
    gates: list[Any] = [gated.get_submodule(name).gate for name in names]
    assert {(gate.class_tokens, gate.host_map) for gate in gates} == {(2 if 'Distilled' in host else 1, (3, 4))}
    x = torch.randn(1, 3, 48, 64)
    assert all(part.isfinite().all() for part in tensors(gated(x)))
    if gate is SoftmaxAttention:
        torch.testing.assert_close(tensors(gated(x)), tensors(vanilla(x)), rtol=1e-4, atol=1e-4)


def tensors(found: Any) -> list[Tensor]:
    return [found] if isinstance(found, Tensor) else [tensor for part in found for tensor in tensors(part)]


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


def test_no_size_is_needed_without_position_terms() -> None:
    """In a model that does not keep its map."""
    model = MODELS.build(dict(ONE_EACH, type='mmdet.SwinTransformer'))
    assert len(swap_attention(model, dict(type='SAGAAttention', path='**', position_encoding=False))) == 4
    model = MODELS.build(dict(ONE_EACH, type='mmdet.SwinTransformer'))
    assert len(swap_attention(model, dict(AGENTS, path='**', bias=False))) == 4


def test_a_stage_of_unknown_form_tells_nothing() -> None:
    """Somebody's backbone of mmdet's attention."""
    from mmdet.models.backbones.pvt import SpatialReductionAttention
    from mmdet.models.backbones.swin import ShiftWindowMSA

    def listed(make: Callable[[], nn.Module]) -> nn.ModuleList:
        return nn.ModuleList([nn.ModuleList([make()])])

    model: Any = nn.Module()
    model.layers = listed(lambda: SpatialReductionAttention(8, 2))
    model.stages = listed(lambda: ShiftWindowMSA(8, 2, 4))
    for path in ('layers.0.0', 'stages.0.0'):
        with pytest.raises(OptionError, match='neither the attention nor the model around it tells its stride'):
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

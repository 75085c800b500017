"""The size of the map in pre-training, read off the host."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from helpers.backbones import PRETRAIN, SVT, SWIN
from mmengine.registry import MODELS
from torch import Tensor, nn

from mmgate import restore_attention, swap_attention
from mmgate.errors import ConfigError
from mmgate.hosts.table import gate_of_type, registered_gates
from mmgate.layers import CrossWindowAttention, SoftmaxAttention
from mmgate.layers.agent import AgentGate
from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import GatedMapAttention, MapGate
from mmgate.layers.saga import SAGAGate

PVT = dict(type='mmdet.PyramidVisionTransformer', num_layers=[1, 1, 1, 1])
VIT = dict(type='mmpretrain.VisionTransformer', arch='deit-tiny')
LARGE_PVT = dict(PVT, type='mmdet.PyramidVisionTransformerV2', pretrain_img_size=384)
LARGE_SWIN = dict(SWIN, depths=(1, 1, 1, 1), pretrain_img_size=384)
PRETRAINED_SWIN = dict(PRETRAIN, type='mmpretrain.SwinTransformer', img_size=(384, 384))
PRETRAINED_SWIN['arch'] = dict(embed_dims=16, depths=[1, 1, 1, 1], num_heads=[1, 2, 4, 8])
PYRAMID = [(56, 56), (28, 28), (14, 14), (7, 7)]
LARGE = [(96, 96), (48, 48), (24, 24), (12, 12)]


def test_no_weight_is_copied_to_find_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pass runs in a copy without values, for which a large model need not fit into memory twice."""
    model = MODELS.build(dict(PVT))
    monkeypatch.setattr(nn.Parameter, '__deepcopy__', lambda *_: pytest.fail('a weight is copied'))
    names = swap_attention(model, dict(type='AgentAttention', path='layers.*.1.*.attn'))
    assert [model.get_submodule(name).gate.map_size for name in names] == PYRAMID
    assert not any(tensor.is_meta for tensor in model.state_dict().values())


@pytest.mark.parametrize('channels', [1, 4])
@pytest.mark.parametrize('host', [PVT, dict(SWIN, type='mmdet.SwinTransformer')], ids=['pvt', 'swin'])
def test_images_may_have_any_number_of_channels(host: dict[str, Any], channels: int) -> None:
    model = MODELS.build(dict(host, in_channels=channels))
    names = swap_attention(model, dict(type='SAGAAttention', path='**'))
    assert {model.get_submodule(name).gate.map_size for name in names} == set(PYRAMID)


@pytest.mark.parametrize('gate', ['AgentAttention', 'FocusedLinearAttention'])
@pytest.mark.parametrize(
    'host, path, sizes, class_tokens',
    [
        (PVT, 'layers.*.1.*.attn', PYRAMID, 0),
        (dict(SVT, depths=[1, 1, 1, 2]), 'layers.*.*.attn', [*PYRAMID, (7, 7)], 0),
        (dict(SWIN, type='mmdet.SwinTransformer', depths=(1, 1, 1, 1)), '**', PYRAMID, 0),
        pytest.param(PRETRAINED_SWIN, '**', LARGE, 0, marks=needs_mmpretrain),
        pytest.param(dict(VIT, img_size=256), 'layers.1.attn', [(16, 16)], 1, marks=needs_mmpretrain),
        pytest.param(dict(VIT, img_size=(64, 96)), 'layers.1.attn', [(4, 6)], 1, marks=needs_mmpretrain),
    ],
    ids=['pvt', 'twins', 'swin', 'swin of mmpretrain', 'vit', 'oblong vit'],
)
def test_a_rule_need_not_name_it(
    host: dict[str, Any], path: str, sizes: list[tuple[int, int]], class_tokens: int, gate: str
) -> None:
    """Of each stage, by a single rule; no random number is taken for it."""
    model = MODELS.build(dict(host))
    before = torch.get_rng_state()
    names = swap_attention(model, dict(type=gate, path=path))
    assert torch.equal(before, torch.get_rng_state())
    gates: list[Any] = [model.get_submodule(name).gate for name in names]
    assert [gate.map_size for gate in gates] == sizes
    assert {gate.class_tokens for gate in gates} == {class_tokens}


@pytest.mark.parametrize(
    'host',
    [LARGE_PVT, dict(LARGE_SWIN, type='mmdet.SwinTransformer'), dict(LARGE_SWIN, type='mmseg.SwinTransformer')],
    ids=['pvt', 'swin of mmdet', 'swin of mmseg'],
)
def test_a_size_that_the_host_forgets_is_the_configs(host: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a config an attribute says it, or a line that it is taken as 224."""
    said: list[str] = []
    monkeypatch.setattr('mmgate.hosts.map_size.log', said.append)
    rule, head = dict(type='SAGAAttention', path='**'), dict(in_channels=16, channels=4, num_classes=2, in_index=0)
    model = dict(host='mmseg.EncoderDecoder', backbone=host, decode_head=dict(head, type='mmseg.FCNHead'))
    gated = MODELS.build(dict(model, type='mmgate.Gated', attention=rule))
    told, forgetful = MODELS.build(host), MODELS.build(host)
    told.pretrain_img_size = [384]
    swap_attention(told, rule)
    assert not said
    swap_attention(forgetful, rule)
    assert (
        len(said) == 1 and 'keeps no pretrain_img_size' in said[0] and 'map_size=(height, width) into a rule' in said[0]
    )
    for model, sizes in ((gated, LARGE), (told, LARGE), (forgetful, PYRAMID)):
        assert [part.map_size for part in model.modules() if isinstance(part, SAGAGate)] == sizes


def test_a_gate_behind_kwargs_is_read_as_its_base() -> None:
    class MyGate(AgentGate):
        def __init__(self, sizes: Sizes, *, extra: int, **options: Any) -> None:
            super().__init__(sizes, **options)

    model = MODELS.build(PVT)
    swap_attention(model, dict(type=MyGate, path='layers.0.**', bias=False, extra=1))
    gate = model.layers[0][1][1].attn.gate
    assert gate.map_size == (56, 56) and gate.an_bias is None


class WithoutClassToken(MapGate):
    """A gate of a user with an option, whose constructor drops that of the class token."""

    def __init__(self, sizes: Sizes, *, strength: float = 1.0) -> None:
        super().__init__(sizes)
        self.strength = strength

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        return self.strength * v


@needs_mmpretrain
def test_a_gate_that_takes_no_class_token_is_refused_where_there_is_one() -> None:
    """At the swap, by the option's name; a ViT without the token takes the gate and tells it its map."""
    sizes = dict(arch=dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16), img_size=(48, 64))
    rule = dict(type=WithoutClassToken, path='layers.*.attn')
    with pytest.raises(ConfigError, match='has no option class_token, and a class token .* of layers.0.attn'):
        swap_attention(MODELS.build(dict(VIT, **sizes)), rule)
    vit: Any = MODELS.build(dict(VIT, **sizes, with_cls_token=False, out_type='featmap'))
    swap_attention(vit, rule)
    assert vit.layers[0].attn.gate.map_size == (3, 4)
    assert vit(torch.randn(1, 3, 48, 64))[0].isfinite().all()


@needs_mmpretrain
@pytest.mark.parametrize('gate', [gate for gate in registered_gates() if issubclass(gate_of_type(gate), MapGate)])
def test_every_gate_of_maps_heeds_a_class_token(gate: type[GatedMapAttention]) -> None:
    """And finds the map, which is no square."""
    arch = dict(embed_dims=32, num_layers=2, num_heads=2, feedforward_channels=32)
    model = MODELS.build(dict(VIT, arch=arch, img_size=(48, 64)))
    model.eval()  # returns nothing
    gated, x = copy.deepcopy(model), torch.randn(1, 3, 48, 64)
    rule = dict(type=gate, path='layers.*.attn')
    if gate is CrossWindowAttention:
        with pytest.raises(ConfigError, match='no class token: it would lie in no stripe'):
            swap_attention(gated, rule)
        return
    names = swap_attention(gated, rule)
    gates: list[Any] = [gated.get_submodule(name).gate for name in names]
    assert {(gate.class_tokens, gate.map_size) for gate in gates} == {(1, (3, 4))}
    assert gated(x)[0].isfinite().all()
    if gate is SoftmaxAttention:
        torch.testing.assert_close(gated(x), model(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('options, size', [({}, (14, 14)), (dict(map_size=(4, 6)), (4, 6))], ids=['read', 'said'])
def test_in_a_model_it_is_that_of_the_backbone_or_what_the_rule_says(options: dict, size: tuple[int, int]) -> None:
    model: Any = nn.ModuleDict(dict(neck=nn.Identity(), backbone=MODELS.build(PVT)))
    swap_attention(model, dict(type='SAGAAttention', path='backbone.layers.2.**', **options))
    assert model['backbone'].layers[2][1][1].attn.gate.map_size == size


@needs_mmpretrain
@pytest.mark.parametrize('gate', ['SAGAAttention', 'SoftmaxAttention'])
def test_a_distillation_token_is_refused(gate: str) -> None:
    distilled = MODELS.build(dict(VIT, type='mmpretrain.DistilledVisionTransformer'))
    with pytest.raises(ConfigError, match=f'{gate}: 2 tokens come before the map of layers.0.attn'):
        swap_attention(distilled, dict(type=gate, path='layers.*.attn'))


@needs_mmpretrain
def test_where_the_host_does_not_tell_the_message_says_what_to_write() -> None:
    """In an attention outside of any backbone."""
    stage = MODELS.build(PVT).layers[0]
    with pytest.raises(ConfigError, match=r'AgentAttention needs map_size, the height .*such as map_size=\(14, 14\)'):
        swap_attention(stage, dict(type='AgentAttention', path='1.*.attn'))
    layers: Any = MODELS.build(VIT).layers
    rule = dict(type='SoftmaxAttention', path='0.attn')
    with pytest.raises(ConfigError, match='SoftmaxAttention needs class_token, .*such as class_token=False'):
        swap_attention(layers, rule)
    assert swap_attention(layers, dict(rule, class_token=True)) == ['0.attn']


@pytest.mark.parametrize('path, warns', [('layers.**', True), ('layers.1.**', False)], ids=['all stages', 'one'])
def test_one_size_for_stages_of_other_maps_is_said(path: str, warns: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    monkeypatch.setattr('mmgate.hosts.map_size.log', lambda line, *level: said.append(line))
    sizes = dict(embed_dims=8, num_layers=[1, 2, 1, 1], num_heads=[1, 2, 5, 8], mlp_ratio=1)
    segformer = MODELS.build(dict(sizes, type='mmseg.MixVisionTransformer'))
    swap_attention(segformer, dict(type='AgentAttention', path=path, agent_num=4, map_size=(28, 28)))
    expected = r'map_size=\(28, 28\) is one .*56 x 56, 28 x 28, 14 x 14, 7 x 7 at .*Leave it out'
    assert any(re.search(expected, line) for line in said) == warns


def test_no_size_is_one_for_all_stages() -> None:
    model = MODELS.build(PVT)
    assert len(swap_attention(model, dict(type='FocusedLinearAttention', path='**', map_size=None))) == 4


@needs_mmpretrain
@pytest.mark.parametrize('window', [None, 4], ids=['whole map', 'windows'])
def test_images_of_another_shape_have_their_own_map(window: int | None) -> None:
    """4 x 16 patches are as many as the 8 x 8 of pre-training, and 7 x 14 are no square."""
    arch = dict(embed_dims=16, num_layers=1, num_heads=2, feedforward_channels=16)
    sizes = dict(arch=arch, img_size=(128, 128), patch_size=16, out_type='featmap', with_cls_token=window is None)
    vit: Any = MODELS.build(dict(VIT, **sizes))
    swap_attention(vit, dict(type='AgentAttention', path='layers.*.attn', agent_num=4, window=window))
    attention = vit.layers[0].attn
    seen: list[tuple[int, int]] = []
    attention.gate.mix = lambda x, q, k, v, hw_shape: seen.append(hw_shape) or v
    for size in ((64, 256), (112, 224), (128, 128)):
        vit(torch.randn(1, 3, *size))
    assert seen == [(4, 16), (7, 14), (8, 8)]
    del attention.gate.mix
    restore_attention(vit)
    assert not vit.patch_embed._forward_hooks


@needs_mmpretrain
def test_a_backbone_that_forgets_its_image_size_may_have_its_class_token() -> None:
    """T2T-ViT knows its patches' map at 64 pixels, but the pass that looks for the token is one of 224."""
    sizes = dict(embed_dims=16, num_layers=1, t2t_cfg=dict(token_dims=8, use_performer=False))
    t2t: Any = MODELS.build(
        dict(type='mmpretrain.T2T_ViT', img_size=64, layer_cfgs=dict(num_heads=2, feedforward_channels=16), **sizes)
    )
    assert swap_attention(t2t, dict(type='SoftmaxAttention', path='encoder.*.attn')) == ['encoder.0.attn']

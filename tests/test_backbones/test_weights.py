"""Checkpoints of another resolution: positions are resized on loading, and sizes are read from the tensors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import filled, needs_mmpretrain
from helpers.backbones import names_of_0_1, vit
from helpers.published import agent_swin, pooled_logits, random_swin
from helpers.published_cswin import SMALL, published_cswin, random_cswin
from mmengine.registry import MODELS
from mmengine.runner import load_checkpoint
from torch import nn

from mmgate.backbones.convert import convert_classifier
from mmgate.layers.parts.resizing import resize_axis, resize_grid
from mmgate.ops.agent_attention import interpolation_matrix

PVT: dict[str, Any] = dict(num_layers=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), embed_dims=16)
SWIN: dict[str, Any] = dict(depths=(1, 1, 1, 1), num_heads=(1, 2, 2, 2), embed_dims=16)
BACKBONES: dict[str, dict[str, Any]] = {
    'agent_pvt': dict(type='mmgate.AgentPVT', **PVT),
    'saga_pvt': dict(type='mmgate.SAGAPVT', **PVT),
    'flatten_pvt': dict(type='mmgate.LinearPVT', attention=dict(type='FocusedLinearAttention'), **PVT),
    'agent_swin': dict(type='mmgate.AgentSwin', blocks=(1, 1, 1, 1), **SWIN),
    'saga_swin': dict(type='mmgate.SAGASwin', blocks=(1, 1, 1, 1), **SWIN),
    'agent_cswin': dict(type='mmgate.AgentCSwin', **SMALL),
}


@pytest.mark.parametrize('way', ['init_cfg', 'init_cfg of 0.1', 'classifier', 'classifier of 0.1'])
@pytest.mark.parametrize('name', BACKBONES)
def test_loading_resizes_as_a_forward_pass_does(name: str, way: str, tmp_path: Path) -> None:
    """What is loaded into the larger model computes what the smaller one does on larger images."""
    small = filled(MODELS.build(dict(BACKBONES[name], pretrain_img_size=64)), 0.1).eval()
    checkpoint = str(tmp_path / 'small.pth')
    starts = way.startswith('init_cfg')
    prefix = '' if starts else 'backbone.'
    state = names_of_0_1(small.state_dict()) if way.endswith('0.1') else small.state_dict()
    torch.save({'state_dict': {f'{prefix}{key}': value for key, value in state.items()}}, checkpoint)
    large = dict(BACKBONES[name], pretrain_img_size=96)
    if starts:
        model = MODELS.build(dict(large, init_cfg=dict(type='Pretrained', checkpoint=checkpoint)))
        model.init_weights()
    else:
        classifier = nn.ModuleDict(dict(backbone=MODELS.build(large)))
        load_checkpoint(classifier, checkpoint, map_location='cpu')  # as tools/test.py does
        model = classifier['backbone']
    assert any(value.shape != small.state_dict()[key].shape for key, value in model.state_dict().items())
    image = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        for actual, expected in zip(model.eval()(image), small(image), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@needs_mmpretrain
@pytest.mark.parametrize('kind', [None, 'AgentAttention', 'SAGAAttention', 'FocusedLinearAttention'])
def test_a_vit_of_another_resolution(kind: str | None, tmp_path: Path) -> None:
    """mmpretrain's hook resizes the position embedding, ours what the attention has."""
    rule = kind and dict(type=kind, **(dict(agent_num=4) if kind == 'AgentAttention' else {}))
    small, large = filled(vit(rule, 64), 0.1).eval(), vit(rule, 96).eval()
    torch.save({'state_dict': small.state_dict()}, tmp_path / 'small.pth')
    load_checkpoint(large, str(tmp_path / 'small.pth'), map_location='cpu')
    image = torch.randn(1, 3, 96, 96)
    with torch.no_grad():
        torch.testing.assert_close(large(image), small(image), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('way', ['init_cfg', 'load_state_dict'])
def test_windows_of_another_size(way: str, tmp_path: Path) -> None:
    """Relative position tables are resized bicubically, as mmdet does, and the index stays the model's own."""
    options = dict(type='mmgate.AgentSwin', blocks=(1, 0, 0, 0), **SWIN)
    small, table = filled(MODELS.build(dict(options)), 0.1), 'stages.1.blocks.0.attn.w_msa.relative_position_bias_table'
    state = {key: value.clone() for key, value in small.state_dict().items()}
    torch.save({'state_dict': state}, tmp_path / 'small.pth')
    init = dict(type='Pretrained', checkpoint=str(tmp_path / 'small.pth')) if way == 'init_cfg' else None
    large = MODELS.build(dict(options, window_size=12, init_cfg=init))
    index = large.state_dict()[table.replace('bias_table', 'index')].clone()
    large.init_weights() if way == 'init_cfg' else large.load_state_dict(small.state_dict())
    grid = small.state_dict()[table].t().view(1, 2, 13, 13)
    expected = F.interpolate(grid, size=(23, 23), mode='bicubic').flatten(2)[0].t()
    torch.testing.assert_close(large.state_dict()[table], expected)
    assert torch.equal(large.state_dict()[table.replace('bias_table', 'index')], index)
    assert all(torch.equal(value, state[key]) for key, value in small.state_dict().items())
    large.eval()(torch.randn(1, 3, 96, 96))


@torch.no_grad()
def test_published_classifiers_of_384_pixels_convert() -> None:
    """Windows of 12 and maps of 96 are read from the tensors; the logits are the published formulation's."""
    image = torch.randn(1, 3, 384, 384)
    state = random_swin([1, 1, 2, 2], (1, 1, 0, 0), (9, 16, 49, 49), image=384, window=12)
    swin = dict(type='mmgate.AgentSwin', depths=(1, 1, 2, 2), blocks=(1, 1, 0, 0), window_size=12, pad_small_map=False)
    cswin = dict(type='mmgate.AgentCSwin', splits=(None, None, 12, None), **SMALL)
    for options, published, logits in (
        (swin, state, pooled_logits(state, agent_swin(state, image, [1, 1, 2, 2], (9, 16, 49, 49), 12, False)[-1])),
        (cswin, cstate := random_cswin(True, image=384), published_cswin(cstate, image, (1, 2, 12, 12))),
    ):
        backbone = dict(options, pretrain_img_size=384, out_indices=(3,))
        built = nn.ModuleDict(dict(backbone=MODELS.build(backbone))).eval()
        keys = built.load_state_dict(convert_classifier({'model': published}), strict=False)
        assert keys.unexpected_keys == ['head.fc.weight', 'head.fc.bias']
        assert all(key.endswith('relative_position_index') for key in keys.missing_keys)
        pooled = built['backbone'](image)[-1].mean((2, 3))
        actual = F.linear(pooled, published['head.weight'], published['head.bias'])
        torch.testing.assert_close(actual, logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    'before, after, resized',
    [
        ((6, 10), (12, 20), True),
        ((12, 20), (25, 41), True),  # maps of strides that do not divide the image
        ((7, 7), (12, 20), True),
        ((4, 9), (6, 6), False),  # as many
        ((8, 18), (16, 36), False),  # or 12 x 12
        ((4, 6), (6, 7), False),
    ],
    ids=str,
)
def test_maps_that_are_not_square(before: tuple[int, int], after: tuple[int, int], resized: bool) -> None:
    """What may have two shapes, or is of neither, is not guessed at: loading it names its shape."""
    x = torch.randn(1, before[0] * before[1], 8)
    expected = F.interpolate(x.transpose(1, 2).unflatten(-1, before), size=after, mode='bilinear')
    actual = resize_grid(x, after)
    if resized:
        torch.testing.assert_close(actual, expected.flatten(2).transpose(1, 2))
    else:
        assert actual is x


def test_axes_keep_their_precision() -> None:
    half = torch.randn(2, 5, 3).half()
    assert resize_axis(half, 1, 9).dtype == torch.float16 and resize_axis(half, 1, 9).shape == (2, 9, 3)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    expected = torch.einsum('ij,ajb->aib', interpolation_matrix(5, 9, x), x)
    torch.testing.assert_close(resize_axis(x, 1, 9), expected)

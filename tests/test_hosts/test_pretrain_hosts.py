"""mmpretrain's attentions as hosts: Swin in both versions, and SAM's image encoder."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import needs_mmpretrain
from mmengine.registry import MODELS
from test_adapters import GATES, gated_copy, gradients, trained
from torch import nn

from mmgate import swap_attention

pytestmark = needs_mmpretrain
SWIN = dict(arch=dict(embed_dims=16, depths=[2, 2, 2, 2], num_heads=[1, 2, 4, 8]), out_indices=(0, 1, 2, 3))
SWIN.update(drop_path_rate=0.0, pad_small_map=True)
V2_ARCH = dict(SWIN['arch'], extra_norm_every_n_blocks=0)
SAM_ARCH = dict(embed_dims=32, num_layers=2, num_heads=4, feedforward_channels=64, global_attn_indexes=[1])
BACKBONES: dict[str, tuple[dict[str, Any], str]] = {
    'swin': (dict(SWIN, type='mmpretrain.SwinTransformer', window_size=4), 'stages.*.blocks.*.attn.w_msa'),
    'swin_v2': (
        dict(SWIN, type='mmpretrain.SwinTransformerV2', arch=V2_ARCH, window_size=4),
        'stages.*.blocks.*.attn.w_msa',
    ),
    # a window that does not divide the map, and an image of another size than the tables
    'sam': (
        dict(type='mmpretrain.ViTSAM', arch=SAM_ARCH, img_size=96, window_size=4, out_channels=8),
        'layers.*.attn',
    ),
}
V2_GATES = GATES | {
    'plug_post_softmax': dict(type='PLuGMultiheadAttention', position='post_softmax', heads='per_head'),
    **{
        f'sdpa_{position}': dict(
            type='SDPAGatedMultiheadAttention', scale=2.0, init='identity', position=position, granularity=granularity
        )
        for position, granularity in (('G2', 'headwise'), ('G3', 'elementwise'), ('G4', 'headwise'))
    },
    'sdpa_additive': dict(type='SDPAGatedMultiheadAttention', form='additive', act='silu', init='identity'),
}
CASES = [(name, gate) for name in BACKBONES for gate in (V2_GATES if name == 'swin_v2' else GATES)]


@pytest.mark.parametrize('name, gate', CASES)
def test_identity_start(name: str, gate: str) -> None:
    """Shifted windows and padded maps included."""
    cfg, path = BACKBONES[name]
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    gated, names = gated_copy(model, dict(V2_GATES[gate], path=path))
    assert len(names) == (2 if name == 'sam' else 8)
    x = torch.randn(2, 3, 96, 128)
    with torch.no_grad():
        for expected, actual in zip(model(x), gated(x), strict=True):
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)
    sum(map_.square().mean() for map_ in gated(x)).backward()
    assert any(grad.abs().sum() > 0 for grad in gradients(gated).values())
    copy.deepcopy(gated)  # as the EMA hook does


@pytest.mark.parametrize('gate', ['plug', 'sdpa_G1'])
@pytest.mark.parametrize('name', BACKBONES)
def test_mixed_precision(name: str, gate: str) -> None:
    cfg, path = BACKBONES[name]
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    gated, _ = gated_copy(model, dict(GATES[gate], path=path))
    x = torch.randn(1, 3, 96, 128)
    with torch.autocast('cpu', torch.bfloat16):
        expected, actual = model(x), gated(x)
        sum(map_.float().square().mean() for map_ in actual).backward()
    for theirs, ours in zip(expected, actual, strict=True):
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=0.1, atol=0.1 * theirs.abs().max().item())


def test_the_temperature_of_cosines_is_bounded() -> None:
    cfg, path = BACKBONES['swin_v2']
    model = trained(MODELS.build(copy.deepcopy(cfg)))
    for block in model.stages[0].blocks:
        nn.init.constant_(block.attn.w_msa.logit_scale, 9.0)
    gated, _ = gated_copy(model, dict(GATES['plug'], path=path))
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        torch.testing.assert_close(gated(x)[0], model(x)[0], rtol=1e-4, atol=1e-4)


def test_attention_over_the_whole_map_fits_the_first_version_only() -> None:
    rule = dict(type='AgentAttention', agent_num=4, map_size=(8, 8), path='stages.*.blocks.0.attn')
    first, second = (MODELS.build(copy.deepcopy(BACKBONES[name][0])) for name in ('swin', 'swin_v2'))
    assert len(swap_attention(first, rule)) == 4
    assert all(map_.isfinite().all() for map_ in first(torch.randn(1, 3, 64, 64)))
    with pytest.raises(ValueError, match='around a WindowMSAV2: it would lose'):
        swap_attention(second, rule)

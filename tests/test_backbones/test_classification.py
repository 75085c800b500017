"""Classification with mmpretrain: sizes of DeiT with gates, published classifiers converted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, needs_mmpretrain, tool
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from published import agent_deit, agent_pvt, agent_swin, pooled_logits, random_deit, random_pvt, random_swin
from published_cswin import SMALL, published_cswin, random_cswin
from torch import nn

from mmgate.analysis.complexity import count_config
from mmgate.backbones.convert import convert, convert_classifier


def vit(rule: dict[str, Any] | None, size: int = 224) -> nn.Module:
    """DeiT-T of two layers for images of a size, with attention over its map or the vanilla one."""
    init_default_scope('mmpretrain')
    arch = dict(embed_dims=192, num_layers=2, num_heads=3, feedforward_channels=768)
    model: dict[str, Any] = dict(
        type='ImageClassifier',
        backbone=dict(type='VisionTransformer', arch=arch, img_size=size, patch_size=16),
        head=dict(type='VisionTransformerClsHead', num_classes=1000, in_channels=192),
    )
    if rule is not None:
        over_map = dict(path='backbone.layers.*.attn', map_size=(size // 16, size // 16), class_token=True)
        model.update(type='mmgate.Gated', host='mmpretrain.ImageClassifier', attention={**over_map, **rule})
    return MODELS.build(model)


SIZES = [  # of DeiT-T; where multiply-accumulates differ, a comment has the paper's and a table why
    ('agent/classification/agent-deit-t_8xb128-300e_in1k', 224, 6.016, 1.2),
    ('saga/classification/saga-deit-t_8xb128-300e_in1k', 224, 7.071, 1.4),  # the paper prints 7.0
    ('plug/classification/plug-deit-t_8xb128-300e_in1k', 224, 6.014, 1.34),  # 1.4 in the paper
    ('plug/classification/ablations/plug-deit-t-per-head_8xb128-300e_in1k', 224, 6.607, 1.5),
    ('plug/classification/ablations/plug-deit-t-ratio-0.125_8xb128-300e_in1k', 224, 5.755, None),
]
LARGER = [  # images, and other ViTs
    ('agent/classification/agent-swin-b_8xb32-30e_in1k-384px', 384, 88, 46.2),  # 46.3 in the paper
    ('agent/classification/agent-cswin-b_8xb32-30e_in1k-384px', 384, 73, 46.2),  # 46.3
    ('agent/classification/agent-swin-s_8xb64-300e_in1k-288px', 288, 50, 14.5),  # 14.6
    ('agent/classification/agent-deit-s_8xb64-300e_in1k-448px', 448, 23.1, 17.6),  # 17.7
    ('agent/classification/agent-pvt-m_8xb64-300e_in1k-256px', 256, 36.1, 9.1),  # 9.2
    ('saga/classification/saga-swin-b_8xb32-30e_in1k-384px', 384, 105, 55.3),
    ('plug/classification/plug-tinyvit-5m_8xb128-300e_in1k', 224, 5.5, 1.3),  # 1.4
    ('plug/classification/plug-visformer-t_8xb128-300e_in1k', 224, 10.8, 1.3),
    ('plug/classification/plug-xcit-t12_8xb128-300e_in1k', 224, 6.9, 1.3),
    ('plug/classification/plug-gcvit-xxt_8xb128-300e_in1k', 224, 12.2, 2.2),  # 2.3
    ('vanilla/classification/lvvit-t_8xb128-300e_in1k', 224, 8.5, 2.9),
    ('plug/classification/plug-lvvit-t_8xb128-300e_in1k', 224, 8.88, 3.0),  # 8.8 and 3.1
    ('vanilla/classification/vitae-t_4xb128-300e_in1k', 224, 4.88, 1.8),  # 4.8 and 1.5
    ('plug/classification/plug-vitae-t_4xb128-300e_in1k', 224, 5.1, 1.8),  # 1.6
    ('plug/classification/plug-t2t-vit-10_8xb128-300e_in1k', 224, 6.2, 2.9),  # 1.6, with Performer layers
]


@needs_mmpretrain
@pytest.mark.parametrize(
    'name, side, millions, macs', [*SIZES, *(pytest.param(*row, marks=pytest.mark.slow) for row in LARGER)]
)
def test_sizes(name: str, side: int, millions: float, macs: float | None) -> None:
    """Parameters and multiply-accumulates to the papers' rounding."""
    counted = count_config(Config.fromfile(ROOT / f'configs/{name}.py'), side, side)
    assert round(counted.parameters / 1e6, len(str(millions).partition('.')[2])) == millions
    assert macs is None or round(counted.macs / 1e9, len(str(macs).partition('.')[2])) == macs


@needs_mmpretrain
@pytest.mark.parametrize('blocks, agents', [(2, 49), (1, 81), (0, 0)], ids=['all', 'first', 'vanilla'])
def test_converted_deit_gives_the_published_logits(blocks: int, agents: int) -> None:
    paths = [f'backbone.layers.{i}.attn' for i in range(blocks)]
    rule = dict(type='AgentAttention', agent_num=agents, path=paths) if blocks else None
    state, model = random_deit(2, agents, blocks), vit(rule)
    model.load_state_dict(convert_classifier({'model': state}), strict=True)
    x = torch.randn(2, 3, 224, 224)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(x), agent_deit(state, x, 3), rtol=1e-4, atol=1e-4)
    assert not any(key.startswith('head') for key in convert(state))


@needs_mmpretrain
@pytest.mark.parametrize('kind', ['pvt', 'swin', 'cswin'])
def test_converted_classifier_gives_the_published_logits(kind: str, tmp_path: Path) -> None:
    x = torch.randn(2, 3, 224, 224)
    if kind == 'pvt':
        state = random_pvt([2, 2, 2, 2], (9, 16, 49, 49))
        expected = pooled_logits(state, agent_pvt(state, x, [2, 2, 2, 2], (9, 16, 49, 49))[-1])
    elif kind == 'swin':
        state = random_swin([2, 2, 6, 2], (2, 2, 6, 0), (9, 16, 49, 49))
        expected = pooled_logits(state, agent_swin(state, x, [2, 2, 6, 2], (9, 16, 49, 49), dense=False)[-1])
    else:
        state = random_cswin(True)
        expected = published_cswin(state, x, (1, 2, 7, 7))
    cfg = Config.fromfile(ROOT / f'configs/agent/classification/agent-{kind}-t_8xb128-300e_in1k.py')
    if kind == 'cswin':  # smaller than T, whose depth takes the plain formulation minutes
        cfg.model.backbone.update(SMALL)
        cfg.model.head.update(in_channels=128, num_classes=10)
    init_default_scope('mmpretrain')
    model = MODELS.build(cfg.model).eval()
    # of CSwin's authors' file, the averaged weights
    published = {'model': state} if kind != 'cswin' else {'model': random_cswin(True), 'state_dict_ema': state}
    torch.save(published, tmp_path / 'published.pth')
    files = [str(tmp_path / 'published.pth'), str(tmp_path / 'classifier.pth')]
    tool('agent_attention', 'model_converters').main([*files, '--to', 'classifier'])
    keys = model.load_state_dict(torch.load(files[1])['state_dict'], strict=False)
    assert not keys.unexpected_keys and all(key.endswith('relative_position_index') for key in keys.missing_keys)
    with torch.no_grad():
        torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    'state, message',
    [
        (random_pvt([1, 1, 1, 1], (9, 16, 49, 49), classifier=False), 'no classifier: it has no head.weight'),
        (random_pvt([1, 1, 1, 1], ()), 'vanilla PVT or Swin makes no classifier'),
        ({**random_deit(1, 49, 1), 'dist_token': torch.ones(1)}, 'distilled'),
        ({**random_deit(1, 49, 1), 'mystery': torch.ones(1)}, 'unknown: mystery'),
    ],
    ids=['no head', 'vanilla', 'distilled', 'unknown'],
)
def test_what_makes_no_classifier_is_refused(state: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_classifier(state)

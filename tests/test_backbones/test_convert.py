"""Published classifiers, converted."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from conftest import ROOT, needs_mmpretrain, tool
from helpers.backbones import vit
from helpers.published import agent_deit, agent_pvt, agent_swin, pooled_logits, random_deit, random_pvt, random_swin
from helpers.published_cswin import SMALL, published_cswin, random_cswin
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate.backbones.convert import convert, convert_classifier


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

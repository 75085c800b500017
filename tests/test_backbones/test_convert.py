"""Published classifiers, converted, and what the converter refuses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, needs_mmpretrain, tool
from helpers.backbones import convert_file, swin_state, vit
from helpers.published import (
    State,
    agent_deit,
    agent_pvt,
    agent_swin,
    linear,
    pooled_logits,
    random_deit,
    random_pvt,
    random_swin,
)
from helpers.published_cswin import SMALL, published_cswin, random_cswin
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from mmgate.backbones.convert import convert_classifier

AGENTS = (9, 16, 49, 49)


def of_config(kind: str, **backbone: Any) -> nn.Module:
    """Return the classifier of a config, with other options of its backbone."""
    cfg = Config.fromfile(ROOT / f'configs/agent/classification/agent-{kind}-t_8xb128-300e_in1k.py')
    cfg.model.backbone.update(backbone)
    if kind == 'cswin':  # smaller than T, whose depth takes the plain formulation minutes
        cfg.model.head.update(in_channels=128, num_classes=10)
    init_default_scope('mmpretrain')
    return MODELS.build(cfg.model)


def deit(blocks: int, agents: int, x: Tensor) -> tuple[State, nn.Module, Tensor]:
    paths = [f'backbone.layers.{i}.attn' for i in range(blocks)]
    state = random_deit(2, agents, blocks)
    return (
        state,
        vit(dict(type='AgentAttention', agent_num=agents, path=paths) if blocks else None),
        agent_deit(state, x, 3),
    )


def pvt(x: Tensor) -> tuple[State, nn.Module, Tensor]:
    state = random_pvt([2, 2, 2, 2], AGENTS)
    return state, of_config('pvt'), pooled_logits(state, agent_pvt(state, x, [2, 2, 2, 2], AGENTS)[-1])


def swin(depths: list[int], blocks: tuple[int, ...], window: int, x: Tensor) -> tuple[State, nn.Module, Tensor]:
    size = x.shape[-1]
    state = random_swin(depths, blocks, AGENTS, image=size, window=window)
    model = of_config('swin', depths=depths, blocks=blocks, window_size=window, pretrain_img_size=size)
    return state, model, pooled_logits(state, agent_swin(state, x, depths, AGENTS, window, dense=False)[-1])


def cswin(agents: bool, split: int, x: Tensor) -> tuple[State, nn.Module, Tensor]:
    size, state = x.shape[-1], random_cswin(agents, x.shape[-1])
    of_agents = (
        dict(splits=(None, None, split, None)) if agents else dict(agent_nums=(None,) * 4, splits=(1, 2, split, None))
    )
    logits = linear(state, 'head.', published_cswin(state, x, (1, 2, split, split)).mean((2, 3)))
    return state, of_config('cswin', pretrain_img_size=size, **SMALL, **of_agents), logits


# by published classifier, what makes its state dict, the model and the published formulation's logits; and its images
CLASSIFIERS: dict[str, tuple[Any, tuple[Any, ...], int]] = {
    'deit': (deit, (2, 49), 224),
    'deit_of_one_block': (deit, (1, 81), 224),
    'deit_vanilla': (deit, (0, 0), 224),
    'pvt': (pvt, (), 224),
    'swin': (swin, ([2, 2, 6, 2], (2, 2, 6, 0), 7), 224),
    'swin_384': (swin, ([1, 1, 2, 2], (1, 1, 0, 0), 12), 384),  # windows of 12 and maps of 96
    'cswin': (cswin, (True, 7), 224),
    'cswin_384': (cswin, (True, 12), 384),
    'cswin_vanilla': (cswin, (False, 7), 224),
}


@needs_mmpretrain
@torch.no_grad()
@pytest.mark.parametrize('kind', CLASSIFIERS)
def test_a_converted_classifier_gives_the_published_logits(kind: str, tmp_path: Path) -> None:
    make, sizes, side = CLASSIFIERS[kind]
    x = torch.randn(1, 3, side, side)
    state, model, expected = make(*sizes, x)
    # of CSwin's authors' file, the averaged weights
    published = {'model': random_cswin(True), 'state_dict_ema': state} if kind == 'cswin' else {'model': state}
    torch.save(published, tmp_path / 'published.pth')
    files = [str(tmp_path / 'published.pth'), str(tmp_path / 'classifier.pth')]
    tool('agent_attention', 'model_converters').main([*files, '--to', 'classifier'])
    keys = model.load_state_dict(torch.load(files[1])['state_dict'], strict=False)
    assert not keys.unexpected_keys and all(key.endswith('relative_position_index') for key in keys.missing_keys)
    torch.testing.assert_close(model.eval()(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    'state, message',
    [
        (random_pvt([1, 1, 1, 1], AGENTS, classifier=False), 'no classifier: it has no head.weight'),
        (random_pvt([1, 1, 1, 1], ()), 'vanilla PVT or Swin makes no classifier'),
        ({**random_deit(1, 49, 1), 'dist_token': torch.ones(1)}, 'distilled'),
        ({**random_deit(1, 49, 1), 'mystery': torch.ones(1)}, 'unknown: mystery'),
    ],
    ids=['no head', 'vanilla', 'distilled', 'unknown'],
)
def test_what_makes_no_classifier_is_refused(state: dict[str, torch.Tensor], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        convert_classifier(state)


def test_converter_refuses_and_keeps_what_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / 'src.pth', tmp_path / 'dst.pth'
    dst.write_text('precious')
    for state, options, said in (
        (swin_state(), [], 'exists'),
        ({'fc.weight': torch.ones(1)}, ['--force'], 'Neither the keys of PVT'),
    ):
        torch.save({'model': state}, src)
        assert convert_file(src, dst, *options) == 2 and dst.read_text() == 'precious'
        assert said in capsys.readouterr().err

"""Agent-CSwin: sizes, the published layout and formulation, any size of image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from helpers.published_cswin import SMALL, published_cswin, random_cswin

from mmgate.adapter import unused_names
from mmgate.registry import MODELS


@torch.no_grad()
@pytest.mark.parametrize('agents', [True, False], ids=['agents', 'vanilla'])
@pytest.mark.parametrize('size', [(224, 224), (224, 448)], ids=str)
def test_published_layout_gives_the_published_logits(tmp_path: Path, agents: bool, size: tuple[int, int]) -> None:
    state = random_cswin(agents)
    path = tmp_path / 'cswin.pth'
    torch.save(dict(model=state), path)
    options: dict[str, Any] = {} if agents else dict(agent_nums=(None,) * 4, splits=(1, 2, 7, None))
    backbone = dict(type='mmgate.AgentCSwin', out_indices=(3,), **SMALL, **options)
    backbone['init_cfg'] = dict(type='Pretrained', checkpoint=str(path))
    model = MODELS.build(backbone).eval()
    model.init_weights()
    image = torch.randn(2, 3, *size)
    actual = F.linear(model(image)[-1].mean((2, 3)), state['head.weight'], state['head.bias'])
    torch.testing.assert_close(actual, published_cswin(state, image, (1, 2, 7, 7)), rtol=1e-4, atol=1e-4)


def test_vanilla_fills_what_is_shared_and_misfits_are_listed(tmp_path: Path) -> None:
    """The convolutions of a vanilla block's two branches have no place in one with agents."""
    path, state = tmp_path / 'cswin.pth', random_cswin(False)
    torch.save(state, path)
    init = dict(init_cfg=dict(type='Pretrained', checkpoint=str(path)))
    model = MODELS.build(dict(type='mmgate.AgentCSwin', **SMALL, **init))
    model.init_weights()
    assert torch.equal(model.stages[1][1].attn.qkv.weight, state['stage2.1.qkv.weight'])
    wrong = MODELS.build(dict(type='mmgate.AgentCSwin', **{**SMALL, 'depths': (1, 2, 3, 1)}, **init))
    with pytest.raises(ValueError, match=r'does not fit AgentCSwin.*\n.*missing: stages.2.2.norm1.weight'):
        wrong.init_weights()


@pytest.mark.parametrize('size', [(64, 64), (33, 90)], ids=str)
def test_any_size_and_more_agents(size: tuple[int, int]) -> None:
    model = MODELS.build(dict(type='mmgate.AgentCSwin', agent_nums=(25, 36, 16, None), drop_path_rate=0.2, **SMALL))
    assert [stage[0].attn.gate.pretrain_grid ** 2 for stage in model.stages[:3]] == [9, 16, 16]  # of the third in use
    model.init_weights()
    maps = model(torch.randn(2, 3, *size))
    assert [m.shape[1] for m in maps] == [16, 32, 64, 128]
    sum(m.sum() for m in maps).backward()
    assert {n for n, p in model.named_parameters() if p.grad is None} == {*unused_names(model)}


def test_drop_path_rises_over_the_blocks_and_is_off_by_default() -> None:
    def rates(**options: float) -> list[float]:
        model = MODELS.build(dict(type='mmgate.AgentCSwin', **SMALL, **options))
        return [getattr(block.drop_path, 'drop_prob', 0.0) for stage in model.stages for block in stage]

    found = rates(drop_path_rate=0.3)
    assert found == [pytest.approx(0.3 * number / (len(found) - 1)) for number in range(len(found))]
    assert not any(rates())

"""Counting rules against counts by hand, and parameters and multiply-accumulates of configs against the papers."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
import yaml
from conftest import ROOT, TORCH, one_of_each, skip_unless_readable
from helpers.metafiles import MODELS
from mmengine.config import Config
from mmengine.hub import get_config
from torch import nn

from mmgate.analysis.complexity import count_config, count_model
from mmgate.ops import gated_linear_attention, ms_deform_attn
from mmgate.ops.backend import CAN_REGISTER

Q, K = torch.zeros(2, 4, 10, 8), torch.zeros(2, 4, 6, 8)  # (B, H, N, d)
SHAPES, START = torch.tensor([[4, 5], [2, 3]]), torch.tensor([0, 20])
DEFORMABLE = (torch.zeros(2, 26, 4, 8), SHAPES, START, torch.rand(2, 7, 4, 2, 3, 2), torch.zeros(2, 7, 4, 2, 3))
RULES = {  # function, inputs, multiply-accumulates
    'einsum': (lambda q, k: torch.einsum('bhnd,bhmd->bhnm', q, k), [Q, K], 8 * 10 * 6 * 8),
    'attention': (F.scaled_dot_product_attention, [Q, K, K, torch.zeros(2, 4, 10, 6)], 8 * 10 * 6 * (8 + 8)),
    'torch_attention': (nn.MultiheadAttention(8, 2, batch_first=True), [K[0]] * 3, 4 * 6 * 8 * (4 * 8 + 2 * 6)),
    'linear_attention': (gated_linear_attention, [Q, Q, Q], 8 * 2 * 10 * 8 * 8),
    'convolution': (nn.Conv2d(4, 6, 3, groups=2), [torch.zeros(1, 4, 9, 9)], 49 * 6 * 2 * 9),
    'grid_sample': (F.grid_sample, [torch.zeros(2, 3, 5, 5), torch.zeros(2, 4, 6, 2)], 2 * 3 * 24 * 4),
    'deformable': (ms_deform_attn, DEFORMABLE, 2 * 7 * 4 * 2 * 3 * 8 * 5),
}

# Rows of the tables of parameters and multiply-accumulates, by their page or docs/papers.yml: name, config, image,
# figures and reason.
ROW = re.compile(r'^\| \[(.*)\]\((.*\.py)\) \| (\d+) x (\d+) \|(.*)\|(.*)\|(.*)\|(.*)\|(.*)\|$', re.MULTILINE)
PAGES = sorted(page for folder in ('configs', 'projects') for page in ROOT.glob(f'{folder}/*/README.md'))
ROWS = [(page, *row) for page in PAGES for row in ROW.findall(page.read_text())]
PAPERS = ROOT / 'docs/papers.yml'
CONFIG = {Path(model['Config']).stem.lower(): model['Config'] for model in MODELS}
for paper in yaml.safe_load(PAPERS.read_text()).values():
    for name, (size, *figures) in paper.get('counts', {}).items():
        ROWS.append((PAPERS, name, f'../{CONFIG[name]}' if name in CONFIG else name, *size.split(' x '), *figures))


@pytest.mark.parametrize('name', RULES)
def test_an_operation_is_counted_by_its_rule(name: str) -> None:
    if name == 'deformable' and TORCH < (2, 4):
        pytest.skip('torch 2.3 registers no operator, so that its counter does not see ours')
    function, inputs, expected = RULES[name]
    model = function if isinstance(function, nn.Module) else nn.Module()
    if model is not function:
        model.forward = function
    assert count_model(model, *inputs).macs == expected


def test_what_is_frozen_computes_and_is_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(8, 6).requires_grad_(False), nn.Linear(6, 4))
    counted = count_model(model, torch.zeros(2, 8))
    assert counted.macs == 2 * 6 * (8 + 4) and counted.parameters == 6 * 4 + 4


# Agent attention's Tables 4 and 14 and SAGA's Table 1, beside docs/papers.yml: side, billions of multiply-accumulates
VANILLA = {
    'deit-s_8xb64-300e_in1k-416px': (416, 18.8),
    'pvt-l_8xb128-300e_in1k': (224, 9.8),
    'pvtv2-b0_8xb128-300e_in1k': (224, 0.6),
    'swin-t_8xb128-300e_in1k': (224, 4.5),
    'swin-b_8xb32-30e_in1k-384px': (384, 47.0),
    'cswin-t_8xb128-300e_in1k': (224, 4.3),
    'cswin-b_8xb32-30e_in1k-384px': (384, 47.0),
}


@pytest.mark.parametrize('name', one_of_each(VANILLA, lambda name: name.split('-')[0]))
def test_vanilla_classifiers_compute_as_much_as_in_the_papers(name: str) -> None:
    """Parameters do not tell which tokens attend to which: attention over whole maps has those of windows."""
    side, billions = VANILLA[name]
    path = ROOT / f'configs/vanilla/classification/{name}.py'
    skip_unless_readable(path)
    macs = count_config(Config.fromfile(path), side, side).macs / 1e9
    assert abs(macs - billions) <= max(0.05, 0.015 * billions)


@pytest.mark.parametrize(
    'row',
    one_of_each(ROWS, lambda row: (row[0], row[2].rpartition('/')[0])),
    ids=lambda row: f'{row[0].parent.name} {row[1]}',
)
def test_figures_of_a_table_are_counted_and_are_the_papers_or_say_why_not(row: tuple[Path, ...]) -> None:
    page, _, config, height, width, *cells, reason = row
    if '::' in config:
        cfg = get_config(config)
    else:
        skip_unless_readable((page.parent / config).resolve())
        cfg = Config.fromfile(page.parent / config)
    counted = count_config(cfg, int(height), int(width))
    # torch below 2.4 counts calls of modules alone; layers of the head that a deformable decoder calls count twice
    assert TORCH < (2, 4) or 'deformable' in config or sum(counted.by_module.values()) == counted.macs
    cells = [cell.strip() for cell in cells]
    figures = [(counted.parameters / 1e6, *cells[:2]), (counted.macs / 1e9, *cells[2:])]
    if not CAN_REGISTER and 'deformable' in config:  # whose sampling is not counted, as a warning says
        figures.pop()
    for figure, paper, ours in figures:
        assert f'{figure:.{len(ours.partition(".")[2])}f}' == ours, f'{page} has {ours}'
        digits = len(paper.partition('.')[2])
        assert not paper or f'{figure:.{digits}f}' == paper or reason.strip(), 'no reason is given'

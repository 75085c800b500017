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
from mmgate.gates import AgentAttention, SAGAAttention
from mmgate.ops import gated_linear_attention, ms_deform_attn
from mmgate.ops.backend import CAN_REGISTER

Q, K = torch.zeros(2, 4, 10, 8), torch.zeros(2, 4, 6, 8)  # (B, H, N, d)
SHAPES, START = torch.tensor([[4, 5], [2, 3]]), torch.tensor([0, 20])
DEFORMABLE = (torch.zeros(2, 26, 4, 8), SHAPES, START, torch.rand(2, 7, 4, 2, 3, 2), torch.zeros(2, 7, 4, 2, 3))
RULES = {  # function, inputs, multiply-accumulates
    'linear': (lambda x: F.linear(x, torch.zeros(5, 8)), [Q], 80 * 5 * 8),
    'einsum': (lambda q, k: torch.einsum('bhnd,bhmd->bhnm', q, k), [Q, K], 8 * 10 * 6 * 8),
    'attention': (F.scaled_dot_product_attention, [Q, K, K], 8 * 10 * 6 * (8 + 8)),
    'torch_attention': (nn.MultiheadAttention(8, 2, batch_first=True), [K[0]] * 3, 4 * 6 * 8 * (4 * 8 + 2 * 6)),
    'attention_masked': (F.scaled_dot_product_attention, [Q, K, K, torch.zeros(2, 4, 10, 6)], 8 * 10 * 6 * (8 + 8)),
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


def test_layers_are_counted_as_by_hand() -> None:
    n, c, d, heads, agents = 48, 12, 4, 3, 9
    x = torch.zeros(1, n, c)
    agent = AgentAttention(c, heads, map_size=(6, 8), agent_num=agents)
    projections = n * c * 4 * c
    assert count_model(agent, x, (6, 8)).macs == projections + 2 * (2 * n * agents * c) + 9 * n * c
    saga = SAGAAttention(c, heads, map_size=(6, 8))
    counted = count_model(saga, x, (6, 8))
    assert counted.macs == n * c * 7 * c + 2 * n * d * c + 25 * n * c
    assert counted.parameters == sum(p.numel() for p in saga.parameters())


def test_what_is_frozen_computes_and_is_no_parameter() -> None:
    model = nn.Sequential(nn.Linear(8, 6).requires_grad_(False), nn.Linear(6, 4))
    counted = count_model(model, torch.zeros(2, 8))
    assert counted.macs == 2 * 6 * (8 + 4) and counted.parameters == 6 * 4 + 4


@pytest.mark.skipif(TORCH < (2, 4), reason='torch 2.3 counts by module only what is called through it')
def test_heads_of_two_stage_detectors_see_fixed_proposals() -> None:
    cfg = get_config('mmgate::agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py')
    counted = count_config(cfg, 128, 128)
    box = 1000 * (64 * 49 * 256 + 256 * 256 + 256 * (7 + 24))
    mask = 100 * (2 * 14 * 14 * 64 * 64 * 9 + 14 * 14 * 64 * 64 * 4 + 28 * 28 * 64 * 6)
    assert counted.by_module['roi_head'] == box + mask
    assert sum(counted.by_module.values()) == counted.macs


# Agent attention's Tables 4 and 14, SAGA's Table 1, PLuG's Table 1: side of the image, multiply-accumulates in billions
VANILLA = {
    'deit-t_8xb128-300e_in1k': (224, 1.3),
    'deit-b_8xb128-300e_in1k': (224, 17.6),
    'deit-s_8xb64-300e_in1k-416px': (416, 18.8),
    'pvt-l_8xb128-300e_in1k': (224, 9.8),
    'pvt-m_8xb64-300e_in1k-256px': (256, 8.8),
    'pvtv2-b0_8xb128-300e_in1k': (224, 0.6),
    'pvtv2-b1_8xb128-300e_in1k': (224, 2.1),
    'swin-t_8xb128-300e_in1k': (224, 4.5),
    'swin-b_8xb128-300e_in1k': (224, 15.4),
    'swin-s_8xb64-300e_in1k-288px': (288, 14.7),
    'swin-b_8xb32-30e_in1k-384px': (384, 47.0),
    'cswin-t_8xb128-300e_in1k': (224, 4.3),
    'cswin-s_8xb128-300e_in1k': (224, 6.9),
    'cswin-b_8xb128-300e_in1k': (224, 15.0),
    'cswin-b_8xb32-30e_in1k-384px': (384, 47.0),
    'tinyvit-5m_8xb128-300e_in1k': (224, 1.3),
    'visformer-t_8xb128-300e_in1k': (224, 1.3),
    'xcit-t12_8xb128-300e_in1k': (224, 1.2),
    'gcvit-xxt_8xb128-300e_in1k': (224, 2.1),
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
    cells = [cell.strip() for cell in cells]
    figures = [(counted.parameters / 1e6, *cells[:2]), (counted.macs / 1e9, *cells[2:])]
    if not CAN_REGISTER and 'deformable' in config:  # whose sampling is not counted, as a warning says
        figures.pop()
    for figure, paper, ours in figures:
        assert f'{figure:.{len(ours.partition(".")[2])}f}' == ours, f'{page} has {ours}'
        digits = len(paper.partition('.')[2])
        assert not paper or f'{figure:.{digits}f}' == paper or reason.strip(), 'no reason is given'

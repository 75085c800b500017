"""Every part of a comparison trains what it names and nothing else, at the rate that held-out images chose."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT, tool
from torch import nn
from torch.nn.utils import parametrize

from mmgate.errors import ConfigError

adapters = tool('compare_adapters')
GATES = [dict(type='PLuGMultiheadAttention', path='attention')]


class Toy(nn.Module):
    """Attention between a batch norm and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(self.attention(x, x, x, need_weights=False)[0])


def toy() -> Toy:
    torch.manual_seed(0)
    model = Toy().eval()
    nn.init.normal_(model.norm.weight)
    return model


@pytest.mark.parametrize(
    'part, expected',
    [
        (dict(trains=['.*']), {'norm.', 'attention.', 'head.'}),
        (dict(trains=['head']), {'head.'}),
        (dict(trains=['norms']), {'norm.', 'attention.in_proj_bias', 'attention.out_proj.bias', 'head.bias'}),
        (dict(trains=['gates'], attention=GATES), {'attention.gate.'}),
        (dict(trains=['gates', 'head'], attention=GATES), {'attention.gate.', 'head.'}),
        (
            dict(trains=['low_rank'], low_rank=dict(pattern='attention', rank=2)),
            {'attention.parametrizations.in_proj_weight.0.', 'attention.out_proj.parametrizations.weight.0.'},
        ),
        (dict(trains=[]), set()),
    ],
    ids=['everything', 'head', 'norms', 'gates', 'gates_and_head', 'low_rank', 'nothing'],
)
def test_a_part_alone_trains(part: dict[str, Any], expected: set[str]) -> None:
    """It starts as the vanilla model, which stays as it was; each of its tensors gets a gradient."""
    model = toy()
    adapted = adapters.adapted(model, part)
    x = torch.randn(4, 5, 8)
    torch.testing.assert_close(adapted(x), model(x))
    trained = {name for name, p in adapted.named_parameters() if p.requires_grad}
    starts = {start for start in expected if any(name.startswith(start) for name in trained)}
    assert starts == expected and all(name.startswith(tuple(expected)) for name in trained)
    assert all(p.requires_grad for p in model.parameters()) and not hasattr(model.attention, 'parametrizations')
    if trained:
        adapted(x).square().sum().backward()
        assert all(adapted.get_parameter(name).grad is not None for name in trained)


def test_low_rank_updates_each_of_the_stacked_projections() -> None:
    """Rank 2 for each of query, key and value, which one update of the stack could not give."""
    model = adapters.adapted(toy(), dict(trains=['low_rank'], low_rank=dict(pattern='attention', rank=2)))
    update = model.attention.parametrizations.in_proj_weight
    nn.init.normal_(update[0].up)
    change = model.attention.in_proj_weight - update.original
    assert [int(torch.linalg.matrix_rank(block)) for block in change.chunk(3)] == [2, 2, 2]
    assert int(torch.linalg.matrix_rank(change)) == 6
    assert not parametrize.is_parametrized(model.head)
    size = adapters.size_of(model, False)
    assert size == dict(parameters=2 * 8 * 2 * 4, bytes=4 * 2 * 8 * 2 * 4)
    assert adapters.size_of(model, True)['bytes'] == size['bytes'] + 4 * 2 * 8  # mean and variance


def test_refuses_a_part_of_nothing() -> None:
    with pytest.raises(ConfigError, match=r"no parameter is of \['heads'\]"):
        adapters.adapted(toy(), dict(trains=['heads']))


def test_statistics_are_kept() -> None:
    model = toy().train()
    adapters.keep_statistics(model)
    assert not model.norm.training and model.attention.training


@pytest.fixture
def comparison() -> Any:
    parts = dict(everything=dict(trains=['.*']), head=dict(trains=['head']))
    return adapters.Comparison(
        config=str(ROOT / 'configs/real/camvid/mask2former_lite0_1xb4-1k_camvid-day-160x128.py'),
        checkpoint='start.pth',
        parts=parts,
        rates=dict(default=[0.1, 0.2], head=[0.3]),
        steps=1,
        sweep=dict(train=dict(name='sweep'), test=dict(name='held_out')),
        train=dict(many=dict(name='many'), few=dict(name='few')),
        tests=dict(dusk=dict(name='dusk'), day=dict(name='day')),
        seeds=[0, 1],
        metric='mIoU',
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, float, int]]:
    """Replace training and testing: the result of a run follows from its rate, and 0.1 is the better one."""
    done = []

    def train(model: Any, cfg: Any, data: str, rate: float, steps: int, seed: int, statistics: bool) -> None:
        done.append((data, rate, seed))
        model.rate = rate
        model.seed = seed

    def test(model: Any, cfg: Any, data: str, metric: str) -> float:
        if not hasattr(model, 'rate'):
            return 1.0
        return 10 - 10 * model.rate + model.seed + (5 if data == 'dusk' else 0)

    loaded = type('Loaded', (), dict(model=toy()))
    monkeypatch.setattr(adapters, 'load_model', lambda *_, **__: loaded)
    monkeypatch.setattr(adapters, 'train', train)
    monkeypatch.setattr(adapters, 'test', test)
    monkeypatch.setattr(adapters.Adaptation, '_data', lambda self, split, changes: changes['name'])
    return done


def test_sweeps_then_compares_and_goes_on(comparison: Any, runs: list[Any], tmp_path: Path) -> None:
    """The rate is chosen without the test images, and with the first seed alone; what the file has is not repeated."""
    out = tmp_path / 'results.csv'
    adapters.Adaptation(comparison, out, ['head']).run()
    assert runs == [('sweep', 0.3, 0), ('many', 0.3, 0), ('few', 0.3, 0), ('many', 0.3, 1), ('few', 0.3, 1)]
    runs.clear()
    adaptation = adapters.Adaptation(comparison, out)
    adaptation.run()
    assert runs[:4] == [('sweep', 0.1, 0), ('sweep', 0.2, 0), ('many', 0.1, 0), ('few', 0.1, 0)]
    assert runs[4:] == [('many', 0.1, 1), ('few', 0.1, 1)]
    rows = list(csv.DictReader(out.open()))
    assert [row for row in rows if row['stage'] == 'start'] == [
        dict.fromkeys(rows[0], '') | dict(stage='start', part='start', dusk='1.0', day='1.0', held_out='1.0')
    ]
    swept = [row for row in rows if row['stage'] == 'sweep']
    assert all(row['held_out'] and not row['dusk'] and not row['day'] for row in swept)
    assert rows[2] | dict(dusk='', day='') == dict.fromkeys(rows[0], '') | dict(
        stage='result', part='head', images='many', rate='0.3', seed='0', parameters='27', bytes='108'
    )
    table = adapters.report(comparison, adaptation.rows)
    assert 'mIoU on dusk after many, seeds 0, 1\n' in table and table.count('| head | 2 |') == 4
    assert '| head | 2 | 12.500 | 0.707 | everything | -2.000 | - | - |' in table


def test_a_longer_sweep_replaces_results(comparison: Any, runs: list[Any], tmp_path: Path) -> None:
    """They stay in the file, and out of the table."""
    out = tmp_path / 'results.csv'
    adapters.Adaptation(comparison, out).run()
    comparison.rates['head'].append(0.05)
    runs.clear()
    adaptation = adapters.Adaptation(comparison, out)
    adaptation.run()
    assert runs[:2] == [('sweep', 0.05, 0), ('many', 0.05, 0)] and len(runs) == 5
    assert {row['rate'] for row in adaptation.rows if row['part'] == 'head'} == {'0.3', '0.05'}
    assert '| head | 2 | 15.000 |' in adapters.report(comparison, adaptation.rows)


@pytest.mark.parametrize('name', ['adapt_bccd', 'adapt_camvid'])
def test_the_repositorys_studies_choose_no_rate_on_test_images(name: str) -> None:
    study = adapters.read_comparison(ROOT / f'configs/studies/{name}.py')
    assert set(study.sweep['train']['indices']).isdisjoint(study.sweep['test']['indices'])
    held_out = study.sweep['test']
    assert (
        held_out.get('ann_file', '') == 'annotations/train.json'
        or held_out['data_prefix']['img_path'] == 'images/train'
    )


def test_settings_that_would_not_be_used_are_refused(tmp_path: Path) -> None:
    path = ROOT / 'configs/studies/adapt_camvid.py'
    text = path.read_text()
    (tmp_path / 's.py').write_text(text.replace('steps = 60', 'step = 60'))
    with pytest.raises(ConfigError, match='lacks or has no use for step, steps'):
        adapters.read_comparison(tmp_path / 's.py')
    (tmp_path / 's.py').write_text(text.replace("norms=dict(trains=['norms'])", "norms=dict(train=['norms'])"))
    with pytest.raises(ConfigError, match='part norms of .* has train'):
        adapters.read_comparison(tmp_path / 's.py')

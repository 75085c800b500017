"""Costs of gates before a training: what they add, whether they start as vanilla."""

from __future__ import annotations

import math
from copy import deepcopy
from typing import Any

import pytest
from conftest import over_shapes
from helpers.small_demo import write_demo
from mmengine.config import Config

from mmgate.benchmarks.costs import costs_table, first_batch, measure_costs, run_seconds
from mmgate.errors import ConfigError
from mmgate.mm.gate_options import put_rules

GATES = {
    'plug': 'encoder.layers.*.self_attn=PLuGMultiScaleDeformableAttention',
    'sdpa': 'decoder.layers.*.self_attn=SDPAGatedMultiheadAttention',
}


@pytest.fixture(scope='module')
def vanilla(tmp_path_factory: pytest.TempPathFactory) -> Config:
    """A vanilla config with five images to train on and two to test on, in batches of two."""
    folder = write_demo(tmp_path_factory.mktemp('costs'), images=5)
    return Config.fromstring(over_shapes(folder / 'vanilla.py', folder / 'data/shapes'), '.py')


def test_gates_beside_the_vanilla_model(vanilla: Config) -> None:
    batch, batches, images = first_batch(vanilla, 'train')
    assert (batches, images, len(batch['inputs'])) == (3, 5, 2)
    tested, _, images = first_batch(vanilla, 'test')
    assert images == 2
    configs = {'vanilla': vanilla}
    for name, gate in GATES.items():
        configs[name] = deepcopy(vanilla)
        put_rules(configs[name], [gate], train='gates' if name == 'plug' else None)
    before = vanilla.pretty_text
    first, plug, sdpa = measure_costs(configs, batch, tested, repetitions=1)
    assert vanilla.pretty_text == before
    assert (first['time'], first['memory'], first['output']) == (1, 1, 0)
    assert plug['parameters'] - first['parameters'] == plug['trained'] > 0 and sdpa['trained'] == sdpa['parameters']
    # PLuG's starts as vanilla, the SDPA gate with a half.
    assert plug['output'] < 1e-5 and sdpa['output'] > 1e-3
    assert sdpa['macs'] > first['macs'] > 1e6 and all(row['step_ms'] > 0 for row in (first, plug, sdpa))
    lines = costs_table([first, plug, sdpa]).splitlines()
    assert len(lines) == 5 and lines[3].startswith('| plug | +') and lines[3].endswith('| yes |')
    assert lines[4].endswith(f'| no, {sdpa["output"]:.2g} |')


def test_data_that_is_not_there_is_said(vanilla: Config) -> None:
    cfg = deepcopy(vanilla)
    cfg.train_dataloader.dataset.ann_file = 'absent.json'
    with pytest.raises(ConfigError, match=r'the data of train_dataloader in .* cannot be read: .*absent\.json'):
        first_batch(cfg, 'train')
    with pytest.raises(ConfigError, match='has no val_dataloader'):
        first_batch(Config(dict(default_scope='mmdet')), 'val')


def test_a_run_takes_its_steps_its_validations_and_a_start_and_what_is_unknown_is_a_dash() -> None:
    known: dict[str, Any] = dict(name='x', parameters=10, trained=10, macs=1e9, memory_mib=5, image_ms=10, output=0.0)
    known.update(time=1.0, memory=1.0)
    fast, slow = (run_seconds([dict(known, step_ms=ms)], iters=1000, images=50, validations=2) for ms in (100, 200))
    assert 100 + 1.5 < fast < slow and slow - fast == pytest.approx(110)
    unknown = dict(known, step_ms=100, macs=math.nan)
    table = costs_table([unknown, dict(unknown, output=math.nan)])
    assert '| - |' in table and table.endswith('| unknown |') and 'nan' not in table


def test_a_model_that_makes_no_step_is_said(vanilla: Config) -> None:
    batch, *_ = first_batch(vanilla, 'train')
    tested, *_ = first_batch(vanilla, 'test')
    gated = deepcopy(vanilla)
    put_rules(gated, [GATES['plug']])
    gated.model.bbox_head.loss_cls.loss_weight = 'much'
    with (
        pytest.warns(UserWarning, match='plug is left out'),
        pytest.raises(ConfigError, match='plug makes no step on its first batch'),
    ):
        measure_costs(dict(vanilla=vanilla, plug=gated), batch, tested, repetitions=1)

"""Adapt a trained model to other data by training gates or other small parts, and compare the results.

Each row of the table trains another part of the model for equally many steps, at the learning rate that was best on
held-out training images.
"""

import argparse
import csv
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from children import alone
from compare_runs import as_table, summary
from mmengine.config import Config
from mmengine.dataset import pseudo_collate
from mmengine.evaluator import Evaluator
from mmengine.optim import build_optim_wrapper
from mmengine.registry import DATASETS, init_default_scope
from torch import Tensor, nn
from torch.nn.utils import parametrize

import mmgate
from mmgate.analysis.loading import load_model, write_csv
from mmgate.errors import ConfigError
from mmgate.gate import named_gate_parameters
from mmgate.mm import cli
from mmgate.mm.config_file import package_of, read_config

KEYS = {'config', 'checkpoint', 'parts', 'rates', 'steps', 'sweep', 'train', 'tests', 'seeds', 'metric'}
PART = {'attention', 'trains', 'low_rank', 'statistics'}
COLUMNS = ('stage', 'part', 'images', 'rate', 'seed', 'parameters', 'bytes')
START = 'start'
WARM_UP = 10  # steps


class LowRank(nn.Module):
    """Low-rank update of a weight matrix as in LoRA, ``W + B A``, which starts at zero; a torch parametrization.

    Args:
        shape: Shape ``(out, in)`` of the matrix.
        rank: Rank of the update.
        blocks: Number of matrices stacked in ``W``, such as 3 in the ``in_proj_weight`` of torch's attention. Each has
            its update.

    Source:
        *LoRA: Low-Rank Adaptation of Large Language Models*, section 4.1, with a factor of 1.
    """

    def __init__(self, shape: Sequence[int], rank: int, blocks: int = 1) -> None:
        super().__init__()
        rows, columns = shape
        self.down = nn.Parameter(torch.randn(blocks, rank, columns) / columns**0.5)  # A
        self.up = nn.Parameter(torch.zeros(blocks, rows // blocks, rank))  # B

    def forward(self, weight: Tensor) -> Tensor:
        """Return the updated matrix, ``(out, in)``."""
        return weight + (self.up @ self.down).flatten(0, 1)


@dataclass(frozen=True)
class Comparison:
    """The settings of a comparison, as its Python file has them.

    Attributes:
        config: Config of the vanilla model, with data, optimizer and metrics.
        checkpoint: The trained model that every row starts from.
        parts: Rows by name: ``trains`` has ``'gates'``, ``'norms'`` (norms and all biases), ``'low_rank'``, or regular
            expressions for names of parameters; ``attention`` has rules for gates; ``low_rank`` has ``pattern`` (a
            regular expression for names of weights) and ``rank``; ``statistics=True`` lets batch norms update
            their running statistics.
        rates: Learning rates of the sweep, by the name of a part or ``'default'``.
        steps: Number of training steps.
        sweep: ``train`` and ``test``, changes of the config's ``train_dataloader.dataset``, for choosing rates.
        train: Such changes for training, by name.
        tests: Such changes for testing, by name, of the config's ``test_dataloader.dataset``.
        seeds: Seeds of the rows. The sweep has the first.
        metric: Name of the metric.
    """

    config: str
    checkpoint: str
    parts: dict[str, dict[str, Any]]
    rates: dict[str, list[float]]
    steps: int
    sweep: dict[str, dict[str, Any]]
    train: dict[str, dict[str, Any]]
    tests: dict[str, dict[str, Any]]
    seeds: list[int]
    metric: str


def read_comparison(path: str | Path) -> Comparison:
    """Read a Python file with the settings of :class:`Comparison`.

    Raises:
        ConfigError: A setting is missing or unknown.
    """
    cfg = read_config(str(path))
    unknown = sorted(set(cfg.keys()) ^ KEYS)
    if unknown:
        raise ConfigError(f'{path} lacks or has no use for {", ".join(unknown)}; it has to have {", ".join(KEYS)}.')
    settings = cfg.to_dict()
    for name, part in settings['parts'].items():
        strange = sorted(set(part) - PART)
        if strange or 'trains' not in part:
            raise ConfigError(f'part {name} of {path} has {", ".join(strange) or "no trains"}; known: {sorted(PART)}.')
        if name not in settings['rates'] and 'default' not in settings['rates']:
            raise ConfigError(f'{path} has no rates for {name}, and no default.')
    return Comparison(**settings)


def adapted(model: nn.Module, part: Mapping[str, Any]) -> nn.Module:
    """Return a copy of a model in which one part trains, the rest is frozen, and batch norms keep their statistics.

    Args:
        model: The vanilla model with its weights.
        part: One of :attr:`Comparison.parts`.

    Raises:
        ConfigError: Nothing would train although ``trains`` names something.
    """
    model = deepcopy(model)
    if part.get('attention'):
        mmgate.swap_attention(model, part['attention'])
    low_rank = part.get('low_rank')
    if low_rank:
        add_low_rank(model, low_rank['pattern'], low_rank['rank'])
    chosen = set(trained_names(model, part['trains']))
    if part['trains'] and not chosen:
        raise ConfigError(f'no parameter is of {part["trains"]}.')
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in chosen)
    return model


def add_low_rank(model: nn.Module, pattern: str, rank: int) -> None:
    """Add a low-rank update to each weight matrix whose name matches a regular expression from its start."""
    matrices = [name for name, p in model.named_parameters() if p.ndim == 2 and re.match(pattern, name)]
    for name in matrices:
        owner, _, own = name.rpartition('.')
        module = model.get_submodule(owner)
        blocks = 3 if own == 'in_proj_weight' else 1
        update = LowRank(getattr(module, own).shape, rank, blocks)
        parametrize.register_parametrization(module, own, update)


def trained_names(model: nn.Module, trains: Sequence[str]) -> Iterator[str]:
    """Yield the names of the parameters that a part's setting ``trains`` chooses."""
    gates = set(dict(named_gate_parameters(model)))
    norms = {name for name, module in model.named_modules() if 'Norm' in type(module).__name__}
    for name, _ in model.named_parameters():
        owner, _, own = name.rpartition('.')
        kinds = {
            'gates': name in gates,
            'norms': name not in gates and (owner in norms or 'bias' in own),
            'low_rank': 'parametrizations' in name and own in ('up', 'down'),
        }
        if any(kinds[kind] if kind in kinds else re.match(kind, name) for kind in trains):
            yield name


def train(model: nn.Module, cfg: Config, samples: Any, rate: float, steps: int, seed: int, statistics: bool) -> None:
    """Train the parameters that require a gradient; the learning rate climbs for 10 steps, then falls linearly to 0.

    Args:
        model: From :func:`adapted`.
        cfg: Config with ``optim_wrapper`` and the batch of ``train_dataloader``.
        samples: The data set.
        rate: Learning rate, before the factors in the config's ``paramwise_cfg``.
        steps: Number of steps.
        seed: Seed of the order and of what is drawn in a step.
        statistics: True lets batch norms update their running statistics.
    """
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    batch = cfg.train_dataloader.batch_size
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if trained:
        settings = deepcopy(cfg.optim_wrapper)
        settings.optimizer.lr = rate
        wrapper = build_optim_wrapper(model, settings)
        schedule = torch.optim.lr_scheduler.LambdaLR(
            wrapper.optimizer, lambda step: min((step + 1) / WARM_UP, (steps - step) / max(1, steps - WARM_UP))
        )
    model.train()
    if not statistics:
        keep_statistics(model)
    order: list[int] = []
    for _ in range(steps):
        while len(order) < batch:
            order += torch.randperm(len(samples)).tolist()
        data = pseudo_collate([samples[number] for number in order[:batch]])
        del order[:batch]
        if trained:
            model.train_step(data, wrapper)
            schedule.step()
        else:
            with torch.no_grad():
                data = model.data_preprocessor(data, True)
                model(**data, mode='loss')
    model.eval()


def keep_statistics(model: nn.Module) -> None:
    """Set every module with running statistics to eval mode."""
    for module in model.modules():
        if getattr(module, 'running_mean', None) is not None:
            module.eval()


@torch.no_grad()
def test(model: nn.Module, cfg: Config, samples: Any, metric: str) -> float:
    """Test a model on a data set and return the metric."""
    evaluator = Evaluator(deepcopy(cfg.test_evaluator))
    evaluator.dataset_meta = samples.metainfo
    batch = cfg.test_dataloader.batch_size
    for first in range(0, len(samples), batch):
        data = pseudo_collate([samples[n] for n in range(first, min(first + batch, len(samples)))])
        evaluator.process(data_samples=model.test_step(data), data_batch=data)
    return round(float(evaluator.evaluate(len(samples))[metric]), 4)


def size_of(model: nn.Module, statistics: bool) -> dict[str, int]:
    """Return how many parameters train, and how many bytes they and the changed statistics take in a file."""
    trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    counted = 0
    if statistics:
        counted = sum(tensor.numel() for name, tensor in model.named_buffers() if 'running_' in name)
    return dict(parameters=trained, bytes=4 * (trained + counted))


class Adaptation:
    """The runs of a comparison, whose results go into a CSV file, one row after the other.

    Args:
        comparison: The settings.
        out: Path of the CSV file. Rows that it has are not run again.
        parts: Names of the parts to run; by default all.
    """

    def __init__(self, comparison: Comparison, out: Path, parts: Sequence[str] | None = None) -> None:
        self.comparison = comparison
        self.parts = list(parts or comparison.parts)
        self.out = out
        self.cfg = read_config(comparison.config)
        init_default_scope(package_of(self.cfg) or 'mmdet')
        self.model = load_model(self.cfg, comparison.checkpoint, whole=True).model
        self.rows: list[dict[str, str]] = []
        if out.is_file():
            self.rows = list(csv.DictReader(out.open()))

    def run(self) -> None:
        """Test the model before adaptation, then train each part, seed by seed, with its best learning rate."""
        settings = self.comparison
        self._add(dict(stage=START, part=START), {**settings.tests, 'held_out': settings.sweep['test']}, {})
        for seed in settings.seeds:  # seed by seed, so that a comparison cut short still compares
            for images in settings.train:
                for name in self.parts:
                    self._sweep(name)
                    self._adapt('result', name, images, float(best_rate(self.rows, name)), seed, settings.tests)

    def _sweep(self, name: str) -> None:
        settings = self.comparison
        for rate in settings.rates.get(name, settings.rates.get('default', [])):
            self._adapt('sweep', name, 'sweep', rate, settings.seeds[0], {'held_out': settings.sweep['test']})

    def _adapt(self, stage: str, name: str, images: str, rate: float, seed: int, tests: Mapping[str, Any]) -> None:
        settings = self.comparison
        part = settings.parts[name]
        keys = dict(stage=stage, part=name, images=images, rate=f'{rate:g}', seed=str(seed))
        if self._has(keys):
            return
        torch.manual_seed(seed)
        model = adapted(self.model, part)
        data = settings.sweep['train'] if images == 'sweep' else settings.train[images]
        counts = bool(part.get('statistics'))
        train(model, self.cfg, self._data('train', data), rate, settings.steps, seed, counts)
        self._add(keys, tests, size_of(model, counts), model)

    def _add(
        self, keys: Mapping[str, str], tests: Mapping[str, Any], size: Mapping[str, int], model: nn.Module | None = None
    ) -> None:
        if self._has(keys):
            return
        scores = {
            n: test(model or self.model, self.cfg, self._data('test', d), self.comparison.metric)
            for n, d in tests.items()
        }
        row = {**dict.fromkeys([*COLUMNS, 'held_out', *self.comparison.tests], ''), **keys, **size, **scores}
        self.rows.append({key: str(value) for key, value in row.items()})
        write_csv(self.out, self.rows)
        print(' '.join(f'{key}={value}' for key, value in row.items() if value != ''), flush=True)

    def _has(self, keys: Mapping[str, str]) -> bool:
        return any(all(row[key] == value for key, value in keys.items()) for row in self.rows)

    def _data(self, split: str, changes: Mapping[str, Any]) -> Any:
        dataset = deepcopy(self.cfg[f'{split}_dataloader'].dataset)
        dataset.update(changes)
        return DATASETS.build(dataset)


def best_rate(rows: Sequence[Mapping[str, str]], name: str) -> str:
    """Return the learning rate, as text, with which a part did best on the held-out training images."""
    swept = [row for row in rows if (row['stage'], row['part']) == ('sweep', name)]
    return max(swept, key=lambda row: float(row['held_out']))['rate']


def report(comparison: Comparison, rows: Sequence[Mapping[str, str]]) -> str:
    """Return the tables of results, one for each training set and test set, of seeds that all parts have finished.

    Differences are to the first part, paired by seed. Results of a rate that a longer sweep has replaced are left out.
    """
    swept = {row['part'] for row in rows if row['stage'] == 'sweep'}
    best = {name: best_rate(rows, name) for name in swept}
    rows = [row for row in rows if row['stage'] == 'result' and row['rate'] == best[row['part']]]
    tables = []
    for images in comparison.train:
        done = [row for row in rows if row['images'] == images]
        seeds = [
            s for s in comparison.seeds if {r['part'] for r in done if r['seed'] == str(s)} == set(comparison.parts)
        ]
        for name in comparison.tests if seeds else ():
            groups = {
                part: [float(r[name]) for s in seeds for r in done if (r['part'], r['seed']) == (part, str(s))]
                for part in comparison.parts
            }
            title = f'{comparison.metric} on {name} after {images}, seeds {", ".join(map(str, seeds))}'
            tables.append(f'{title}\n\n{as_table(summary(groups))}\n')
    return '\n'.join(tables) or 'No seed is done for every part.'


def main(argv: list[str]) -> None:
    """Parse arguments, run what is missing, print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('comparison', help='a file such as configs/studies/adapt_camvid.py')
    parser.add_argument('--out', help='CSV file (default: work_dirs/<name of the file>/results.csv)')
    parser.add_argument(
        '--parts', nargs='+', help='run these alone, such as in one of several processes, each with its own CSV file'
    )
    args = parser.parse_args(argv)
    comparison = read_comparison(args.comparison)
    strangers = sorted(set(args.parts or ()) - set(comparison.parts))
    if strangers:
        raise ConfigError(
            f'{args.comparison} has no parts {", ".join(strangers)}; it has {", ".join(comparison.parts)}.'
        )
    out = Path(args.out or f'work_dirs/{Path(args.comparison).stem}/results.csv')
    with alone(out.with_suffix('.lock')):
        adaptation = Adaptation(comparison, out, args.parts)
        adaptation.run()
    print(report(comparison, adaptation.rows))


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Train the three models and compare them; ``python -m projects.dgt.study run`` and ``... report``."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from itertools import product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import t
from torch import Tensor, nn

from projects.dgt.data import SOURCES, Examples, corrupt, docstrings, encode, published, split, vocabulary_of
from projects.dgt.model import ATTENTIONS, TABLE_2, TextClassifier, compared

# Table 4; Rotten Tomatoes by the text of A.3.2, 20 Newsgroups' layers by Table 6
PAPER = dict(epochs=10, batch=32, lr=3e-4, warmup=1000, length=256, dim=256, layers=6, heads=8, dropout=0.1)
SETTINGS: dict[str, dict[str, Any]] = {name: PAPER for name in SOURCES}
SETTINGS['rotten_tomatoes'] = {**PAPER, 'layers': 4, 'lr': 5e-4, 'warmup': 500}
SETTINGS['20_newsgroups'] = {**PAPER, 'layers': 4}
SETTINGS['docstrings'] = {**PAPER, 'lr': 2e-3, 'warmup': 80, 'length': 40, 'dim': 64, 'layers': 2, 'heads': 4}
NOISE = (0.0, 0.3)
FIELDS = ('data', 'expansion', 'train_noise', 'attention', 'seed', 'parameters', 'test_noise', 'accuracy', 'seconds')


def train(
    model: TextClassifier, words: Tensor, labels: Tensor, setting: dict[str, Any], noise: float, seed: int
) -> None:
    """Train by Table 4: AdamW, warm-up and linear decay, gradients clipped; batches are the same for every model."""
    draw, device, batch = torch.Generator().manual_seed(seed), next(model.parameters()).device, setting['batch']
    wide, narrow = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    groups = [dict(params=wide, weight_decay=0.01), dict(params=narrow, weight_decay=0.0)]  # biases and norms do not
    optimizer = torch.optim.AdamW(groups, lr=setting['lr'], betas=(0.9, 0.98), eps=1e-8)
    steps, warmup = setting['epochs'] * -(-len(words) // batch), setting['warmup']
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / warmup, (steps - step) / max(1, steps - warmup))
    )
    torch.manual_seed(seed)  # dropout
    model.train()
    for _ in range(setting['epochs']):
        for chosen in torch.randperm(len(words), generator=draw).split(batch):
            x = corrupt(words[chosen], noise, model.words.num_embeddings, draw).to(device)
            loss = F.cross_entropy(model(x), labels[chosen].to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()


@torch.no_grad()
def accuracy(model: TextClassifier, words: Tensor, labels: Tensor, noise: float, seed: int) -> float:
    """Return the share of texts, in percent, whose class is found, with that much noise."""
    model.eval()
    noisy = corrupt(words, noise, model.words.num_embeddings, torch.Generator().manual_seed(seed))
    found = torch.cat([model(x.to(model.words.weight.device)).argmax(-1).cpu() for x in noisy.split(256)])
    return 100 * (found == labels).double().mean().item()


def parts(data: str, seed: int) -> tuple[Examples, Examples]:
    """Return training and test texts of a task."""
    if data == 'docstrings':
        return split(docstrings()[0], seed)
    training, test = published(data)
    return split(training, seed)[0], test  # A.2 keeps a fifth for validation, which nothing here needs


def planned(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what a command works on: runs that the CSV file lacks, or for ``report`` the rows that it has."""
    done = read(arguments.csv)
    if arguments.command == 'report':
        return list(done)
    paper = arguments.data in SOURCES
    noises = arguments.train_noise or ((0.0,) if paper else NOISE)
    names = TABLE_2 if paper else tuple(ATTENTIONS)
    found = product([arguments.data], [arguments.expansion], noises, names, arguments.seeds)
    keys = (dict(zip(FIELDS, values, strict=False)) for values in found)
    return [key for key in keys if not any(all(row[k] == str(v) for k, v in key.items()) for row in done)]


def run(arguments: argparse.Namespace) -> None:
    """Train what the CSV file does not hold yet, and add a row for each noise of the test."""
    setting = SETTINGS[arguments.data]
    sizes = {name: setting[name] for name in ('dim', 'layers', 'heads', 'length', 'dropout')}
    sizes.update(expansion=arguments.expansion, of_table_2=arguments.data in SOURCES)
    keys = planned(arguments)
    if not keys:
        print(f'{arguments.csv} has all of these runs. Give another --csv to train them again.')
    for seed in dict.fromkeys(key['seed'] for key in keys):
        training, test = parts(arguments.data, seed)
        vocabulary = vocabulary_of(training)
        words, labels = encode(training, vocabulary, setting['length'])
        test_words, test_labels = encode(test, vocabulary, setting['length'])
        lacking = [key for key in keys if key['seed'] == seed]
        for noise in dict.fromkeys(key['train_noise'] for key in lacking):
            models = compared(len(vocabulary) + 2, int(labels.max()) + 1, seed, **sizes)
            for key in (key for key in lacking if key['train_noise'] == noise):
                model = models[key['attention']]
                start, count = time.process_time(), sum(p.numel() for p in model.parameters())
                train(model.to(arguments.device), words, labels, setting, noise, seed)
                key |= dict(parameters=count, seconds=round(time.process_time() - start, 1))
                found = {level: round(accuracy(model, test_words, test_labels, level, seed), 3) for level in NOISE}
                write(arguments.csv, [key | dict(test_noise=at, accuracy=share) for at, share in found.items()])


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV file, none if there is no such file."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', newline='') as file:
        writer = csv.DictWriter(file, FIELDS, lineterminator='\n')
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def report(arguments: argparse.Namespace) -> None:
    """Print the table: means and deviations, and the differences within a seed with their 95 % intervals."""
    print('| data | e | trained with | tested with | attention | parameters | accuracy | minus vanilla | seeds |')
    print('|---' * 9 + '|')
    groups: dict[tuple[str, ...], dict[str, dict[int, tuple[float, int]]]] = {}
    for row in read(arguments.csv):
        group = groups.setdefault(tuple(row[k] for k in ('data', 'expansion', 'train_noise', 'test_noise')), {})
        group.setdefault(row['attention'], {})[int(row['seed'])] = float(row['accuracy']), int(row['parameters'])
    for (data, expansion, *noise), group in sorted(groups.items()):
        vanilla = group.get('vanilla', {})
        for name in filter(group.__contains__, TABLE_2):
            shares = [share for share, _ in group[name].values()]
            gains = [share - vanilla[seed][0] for seed, (share, _) in group[name].items() if seed in vanilla]
            spread = f' ± {stdev(shares):.2f}' if len(shares) > 1 else ''
            count = f'{mean(size for _, size in group[name].values()):,.0f}'
            cells = [data, f'{float(expansion):.2f}', *noise, name, count, f'{mean(shares):.2f}{spread}']
            cells += ['' if name == 'vanilla' else interval(gains), ' '.join(map(str, sorted(group[name])))]
            print('| ' + ' | '.join(cells) + ' |')


def interval(values: list[float]) -> str:
    """Return the mean of the values with its 95 % interval by Student's t."""
    if len(values) < 2:
        return 'too few seeds'
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return f'{mean(values):+.2f} [{mean(values) - half:+.2f}, {mean(values) + half:+.2f}]'


def main(argv: Sequence[str] | None = None) -> None:
    """Parse and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('command', choices=('run', 'report'))
    parser.add_argument('--csv', type=Path, default=Path(__file__).parent / 'docstrings.csv')
    parser.add_argument('--data', choices=SETTINGS, default='docstrings')
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--train-noise', type=float, nargs='+', help="default 0 and 0.3; 0 of the paper's data")
    parser.add_argument('--expansion', type=float, default=4.0, help='2, 4 or 5.3333')
    parser.add_argument('--device', default='cpu')
    arguments = parser.parse_args(argv)
    (run if arguments.command == 'run' else report)(arguments)


if __name__ == '__main__':
    main()

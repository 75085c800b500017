"""Train classifiers of texts and compare them; ``python -m projects.dgsa.study run`` and ``... report``."""

from __future__ import annotations

import argparse
import csv
import time
from collections.abc import Sequence
from itertools import groupby, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from mmgate import ConfigError
from projects.dgsa import side_by_side
from projects.dgsa.model import ATTENTIONS, TABLE_2, TextClassifier, compared
from projects.dgsa.side_by_side import Training, batches_of, train_side_by_side
from projects.dgsa.texts import SOURCES, Examples, corrupt, docstrings, encode, published, split, trimmed, vocabulary_of

# Table 4; Rotten Tomatoes by the text of A.3.2, 20 Newsgroups' layers by Table 6. bfloat16 is ours
PAPER: dict[str, Any] = dict(
    epochs=10, batch=32, lr=3e-4, warmup=1000, bfloat16=True, length=256, dim=256, layers=6, heads=8, dropout=0.1
)
DOCSTRINGS = dict(lr=2e-3, warmup=80, bfloat16=False, length=40, dim=64, layers=2, heads=4)
SETTINGS: dict[str, dict[str, Any]] = {name: PAPER for name in SOURCES}
SETTINGS['rotten_tomatoes'] = {**PAPER, 'layers': 4, 'lr': 5e-4, 'warmup': 500}
SETTINGS['20_newsgroups'] = {**PAPER, 'layers': 4}
SETTINGS['docstrings'] = {**PAPER, **DOCSTRINGS}
SIZES = ('dim', 'layers', 'heads', 'length', 'dropout')
NOISE = (0.0, 0.3)
DATA = f'one of {", ".join(SETTINGS)}; or FOLDER/NAME, where FOLDER/NAME_train.jsonl.gz and _test.jsonl.gz are'
FIELDS = ('data', 'expansion', 'train_noise', 'attention', 'seed', 'parameters', 'test_noise', 'accuracy', 'seconds')


def prepared(
    model: TextClassifier, words: Tensor, labels: Tensor, setting: dict[str, Any], noise: float, seed: int
) -> Training:
    """Return the training by Table 4; batches and noise are the same for every model."""
    device, epochs = model.words.weight.device, setting['epochs']
    batches = batches_of(len(words), setting['batch'], epochs, seed)
    steps, warmup = len(batches), setting['warmup']
    rates = [setting['lr'] * min((n + 1) / warmup, (steps - n) / max(1, steps - warmup)) for n in range(steps)]
    decayed = [parameter for parameter in model.parameters() if parameter.ndim > 1]
    others = [parameter for parameter in model.parameters() if parameter.ndim <= 1]  # biases and norms
    if noise:  # each epoch has texts of its own
        epoch = torch.arange(steps)[:, None] // (steps // epochs)
        batches = torch.where(batches < 0, batches, batches + epoch * len(words))
        draw = torch.Generator().manual_seed(seed)
        words = torch.cat([corrupt(words, noise, model.words.num_embeddings, draw) for _ in range(epochs)])
        labels = labels.repeat(epochs)
    words, labels = trimmed(words).to(device), labels.to(device)

    def losses(rows: Tensor) -> Tensor:
        # A graph's shapes are fixed.
        texts = words[rows] if device.type == 'cuda' else trimmed(words[rows])
        return F.cross_entropy(model(texts), labels[rows], reduction='none')

    model.train()
    groups = [dict(params=decayed, weight_decay=0.01), dict(params=others, weight_decay=0.0)]
    options: dict[str, Any] = dict(bfloat16=setting['bfloat16'], compiled=model.blocks, clip=1.0)
    training = Training(model, losses, batches, rates, groups, betas=(0.9, 0.98), eps=1e-8, **options)
    torch.manual_seed(seed)  # dropout
    return training


def accuracy(model: TextClassifier, words: Tensor, labels: Tensor, noise: float, seed: int) -> float:
    """Return the share of texts, in percent, whose class is found, with that much noise."""
    noisy = corrupt(words, noise, model.words.num_embeddings, torch.Generator().manual_seed(seed))
    device = model.words.weight.device
    return side_by_side.accuracy(model, (trimmed(x).to(device) for x in noisy.split(256)), labels)


def parts(data: str, seed: int) -> tuple[Examples, Examples]:
    """Return training and test texts of a task; ``data`` as in the command line."""
    if data == 'docstrings':
        return split(docstrings()[0], seed)
    training, test = published(data)
    return split(training, seed)[0], test  # A.2 keeps a fifth for validation, which nothing here needs


def csv_of(arguments: argparse.Namespace) -> Path:
    """Return the CSV file of a command: unless one is given, ``report`` reads the data set's in this folder."""
    folder = Path(__file__).parent if arguments.command == 'report' else Path('work_dirs/dgsa')
    return arguments.csv or folder / f'{Path(arguments.data).name}.csv'


def planned(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what a command works on: runs that the CSV file lacks, or for ``report`` the rows that it has."""
    done = read(csv_of(arguments))
    if arguments.command == 'report':
        return list(done)
    data = Path(arguments.data).name
    noises = arguments.train_noise or ((0.0,) if data in SOURCES else NOISE)
    names = arguments.attention or (TABLE_2 if data in SOURCES else ATTENTIONS)
    keys = []
    for seed, noise, expansion, name in product(arguments.seeds, noises, arguments.expansion, names):
        # the Transformer's network is four times as wide, whatever the others' is
        values = (data, 4.0 if name == 'transformer' else expansion, noise, name, seed)
        key: dict[str, Any] = dict(zip(FIELDS, values, strict=False))
        if key not in keys and not any(all(row[k] == str(v) for k, v in key.items()) for row in done):
            keys.append(key)
    return keys


def run(arguments: argparse.Namespace) -> None:
    """Train what the CSV file does not hold yet, on a GPU all of a seed at once; add each model's rows at its end."""
    setting, keys = setting_of(arguments.data), planned(arguments)
    if not keys:
        print(f'{csv_of(arguments)} has all of these runs. Give another --csv to train them again.')
    sizes = {name: setting[name] for name in SIZES} | dict(of_table_2=Path(arguments.data).name in SOURCES)
    for seed, of_seed in groupby(keys, lambda key: key['seed']):
        training, test = parts(arguments.data, seed)
        vocabulary = vocabulary_of(training)
        words, labels = encode(training, vocabulary, setting['length'])
        test_words, test_labels = encode(test, vocabulary, setting['length'])
        counts = (len(vocabulary) + 2, int(labels.max()) + 1)
        on_gpu = arguments.device.startswith('cuda')
        clock = time.perf_counter if on_gpu else time.process_time
        chosen = list(of_seed)
        for at_once in [chosen] if on_gpu else [[key] for key in chosen]:
            trainings: dict[Training, dict[str, Any]] = {}
            for key in at_once:
                model = compared(*counts, seed, expansion=key['expansion'], **sizes)[key['attention']]
                model.to(arguments.device)
                trainings[prepared(model, words, labels, setting, key['train_noise'], seed)] = key
            start = clock()
            for training in train_side_by_side(trainings):
                model = training.model
                size = sum(parameter.numel() for parameter in model.parameters())
                found = {noise: accuracy(model, test_words, test_labels, noise, seed) for noise in NOISE}
                row = dict(**trainings[training], parameters=size)
                times = dict(seconds=round(clock() - start, 1))
                rows = [dict(**row, test_noise=n, accuracy=round(share, 3), **times) for n, share in found.items()]
                write(csv_of(arguments), rows)


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV file, none if there is no such file."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV file, which gets the first row's names when it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', newline='') as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator='\n')
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def report(arguments: argparse.Namespace) -> None:
    """Print the table: means and deviations, and the differences within a seed with their 95 % intervals."""
    groups: dict[tuple[str, ...], dict[str, dict[int, tuple[float, int]]]] = {}
    partners: dict[tuple[str, ...], dict[int, tuple[float, int]]] = {}  # the Transformer, which has one expansion
    for row in read(csv_of(arguments)):
        found = {int(row['seed']): (float(row['accuracy']), int(row['parameters']))}
        group = groups.setdefault(tuple(row[k] for k in ('data', 'expansion', 'train_noise', 'test_noise')), {})
        group.setdefault(row['attention'], {}).update(found)
        if row['attention'] == 'transformer':
            partners.setdefault((row['data'], row['train_noise'], row['test_noise']), {}).update(found)
    names = ['data', 'e', 'trained with', 'tested with', 'attention', 'parameters', 'accuracy', 'minus vanilla']
    names += ['minus transformer'] * bool(partners) + ['seeds']
    print('| ' + ' | '.join(names) + ' |\n' + '|---' * len(names) + '|')
    for (data, expansion, *noise), group in sorted(groups.items()):
        against = [('vanilla', group.get('vanilla', {}))]
        if partners:
            against.append(('transformer', partners.get((data, *noise), {})))
        for name in filter(group.__contains__, TABLE_2):
            shares = [share for share, _ in group[name].values()]
            spread = f' ± {stdev(shares):.2f}' if len(shares) > 1 else ''
            count = f'{mean(size for _, size in group[name].values()):,.0f}'
            cells = [data, f'{float(expansion):.2f}', *noise, name, count, f'{mean(shares):.2f}{spread}']
            for partner, by_seed in against:
                gains = [share - by_seed[seed][0] for seed, (share, _) in group[name].items() if seed in by_seed]
                cells.append('' if name == partner else interval(gains))
            cells.append(' '.join(map(str, sorted(group[name]))))
            print('| ' + ' | '.join(cells) + ' |')


def interval(values: list[float]) -> str:
    """Return the mean of the values with its 95 % interval by Student's t."""
    from scipy.stats import t

    if len(values) < 2:
        return 'too few seeds'
    half = float(t.ppf(0.975, len(values) - 1)) * stdev(values) / len(values) ** 0.5
    return f'{mean(values):+.2f} [{mean(values) - half:+.2f}, {mean(values) + half:+.2f}]'


def setting_of(data: str) -> dict[str, Any]:
    """Return the setting of a data set, which the last part of its path names."""
    name = Path(data).name
    if name not in SETTINGS:
        raise ConfigError(f'--data {data}: no setting is known for {name!r}; the name is one of {", ".join(SETTINGS)}.')
    return SETTINGS[name]


def main(argv: Sequence[str] | None = None) -> None:
    """Parse and do it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('command', choices=('run', 'report'))
    parser.add_argument(
        '--csv', type=Path, help="default: run adds to work_dirs/dgsa/DATA.csv, report reads the project's DATA.csv"
    )
    parser.add_argument('--data', default='docstrings', help=DATA)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--train-noise', type=float, nargs='+', help="default 0 and 0.3; 0 of the paper's data")
    parser.add_argument('--attention', nargs='+', choices=TABLE_2, help='default: all')
    parser.add_argument('--expansion', type=float, nargs='+', default=[4.0], help='of 2, 4 and 5.3333')
    parser.add_argument('--device', default='cpu')
    arguments = parser.parse_args(argv)
    (run if arguments.command == 'run' else report)(arguments)


if __name__ == '__main__':
    main()

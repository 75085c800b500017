"""Train the three models and compare them; ``python -m projects.dgt.study run`` and ``... report``."""

from __future__ import annotations

import argparse
import csv
import fcntl
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch
import torch.nn.functional as F
from scipy.stats import t
from torch import Tensor, nn

from mmgate.errors import ConfigError
from projects.dgt.data import SOURCES, Examples, corrupt, docstrings, encode, published, split, trimmed, vocabulary_of
from projects.dgt.model import ATTENTIONS, TABLE_2, TextClassifier, compared
from projects.dgt.side_by_side import Training, batches_of, train_side_by_side

# Table 4; Rotten Tomatoes by the text of A.3.2, 20 Newsgroups' layers by Table 6. bfloat16 is ours
PAPER: dict[str, Any] = dict(
    epochs=10, batch=32, lr=3e-4, warmup=1000, bfloat16=True, length=256, dim=256, layers=6, heads=8, dropout=0.1
)
DOCSTRINGS = dict(lr=2e-3, warmup=80, bfloat16=False, length=40, dim=64, layers=2, heads=4)
SETTINGS: dict[str, dict[str, Any]] = {name: PAPER for name in SOURCES}
SETTINGS['rotten_tomatoes'] = {**PAPER, 'layers': 4, 'lr': 5e-4, 'warmup': 500}
SETTINGS['20_newsgroups'] = {**PAPER, 'layers': 4}
SETTINGS['docstrings'] = {**PAPER, **DOCSTRINGS}
NOISE = (0.0, 0.3)
DATA = f'one of {", ".join(SETTINGS)}; or FOLDER/NAME, where FOLDER/NAME_train.jsonl.gz and _test.jsonl.gz are'
FIELDS = ('data', 'expansion', 'train_noise', 'attention', 'seed', 'parameters', 'test_noise', 'accuracy', 'seconds')


def rates_of(setting: dict[str, Any], steps: int) -> list[float]:
    """Return the learning rate of each step: warm-up and linear decay."""
    warmup, lr = setting['warmup'], setting['lr']
    return [lr * min((step + 1) / warmup, (steps - step) / max(1, steps - warmup)) for step in range(steps)]


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return the parameters in two groups: biases and norms do not decay."""
    wide, narrow = ([p for p in model.parameters() if (p.ndim > 1) is many] for many in (True, False))
    return [dict(params=wide, weight_decay=0.01), dict(params=narrow, weight_decay=0.0)]


def train(
    model: TextClassifier,
    words: Tensor,
    labels: Tensor,
    setting: dict[str, Any],
    noise: float,
    seed: int,
    kept: Path | None = None,
) -> None:
    """Train by Table 4: AdamW, warm-up and linear decay, gradients clipped; batches are the same for every model.

    The file ``kept`` gets the state after each epoch but the last, and training goes on from it if it is there.
    """
    draw, device, batch = torch.Generator().manual_seed(seed), next(model.parameters()).device, setting['batch']
    optimizer = torch.optim.AdamW(groups_of(model), lr=setting['lr'], betas=(0.9, 0.98), eps=1e-8, fused=True)
    steps, first = -(-len(words) // batch), 0
    torch.manual_seed(seed)  # dropout
    if kept is not None and kept.exists():
        state = torch.load(kept, map_location=device)
        model.load_state_dict(state['model'])
        optimizer.load_state_dict(state['optimizer'])
        draw.set_state(state['draw'].cpu())
        torch.set_rng_state(state['dropout'].cpu())
        first = state['epochs']
    rates = iter(rates_of(setting, setting['epochs'] * steps)[first * steps :])
    model.train()
    for epoch in range(first, setting['epochs']):
        for chosen in torch.randperm(len(words), generator=draw).split(batch):
            x = trimmed(corrupt(words[chosen], noise, model.words.num_embeddings, draw)).to(device)
            with torch.autocast(device.type, torch.bfloat16, enabled=setting['bfloat16']):
                loss = F.cross_entropy(model(x), labels[chosen].to(device))
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            rate = next(rates)
            for group in optimizer.param_groups:
                group['lr'] = rate
            optimizer.step()
        if kept is not None and epoch + 1 < setting['epochs']:
            state = dict(model=model.state_dict(), optimizer=optimizer.state_dict(), epochs=epoch + 1)
            state |= dict(draw=draw.get_state(), dropout=torch.get_rng_state())
            torch.save(state, part := kept.with_suffix('.part'))
            part.replace(kept)


def prepared(job: Job, device: str) -> Training:
    """Return the same training without noise for :func:`.train_side_by_side`, on a device."""
    setting = job.setting
    model = job.model.to(device).train()
    words, labels = trimmed(job.words).to(device), job.labels.to(device)
    batches = batches_of(len(words), setting['batch'], setting['epochs'], job.seed)
    return Training(
        model,
        lambda rows: F.cross_entropy(model(words[rows]), labels[rows], reduction='none'),
        batches,
        rates_of(setting, len(batches)),
        groups_of(model),
        compiled=model.blocks,
        clip=1.0,
        betas=(0.9, 0.98),
        eps=1e-8,
    )


@torch.no_grad()
def accuracy(model: TextClassifier, words: Tensor, labels: Tensor, noise: float, seed: int) -> float:
    """Return the share of texts, in percent, whose class is found, with that much noise."""
    model.eval()
    noisy = corrupt(words, noise, model.words.num_embeddings, torch.Generator().manual_seed(seed))
    device = model.words.weight.device
    found = torch.cat([model(trimmed(x).to(device)).argmax(-1).cpu() for x in noisy.split(256)])
    return 100 * (found == labels).double().mean().item()


def parts(data: str, seed: int) -> tuple[Examples, Examples]:
    """Return training and test texts of a task; ``data`` as in the command line."""
    if data == 'docstrings':
        return split(docstrings()[0], seed)
    training, test = published(data)
    return split(training, seed)[0], test  # A.2 keeps a fifth for validation, which nothing here needs


@dataclass
class Job:
    """One model to be trained, and its texts, numbered."""

    key: dict[str, Any]  # the first columns of its rows
    model: TextClassifier
    words: Tensor
    labels: Tensor
    test_words: Tensor
    test_labels: Tensor
    setting: dict[str, Any]

    @property
    def seed(self) -> int:
        """The seed of start and batches."""
        return int(self.key['seed'])

    def rows(self, seconds: float) -> list[dict[str, Any]]:
        """Return the trained model's rows, one for each noise of the test."""
        count = sum(p.numel() for p in self.model.parameters())
        key = self.key | dict(parameters=count, seconds=round(seconds, 1))
        found = {at: accuracy(self.model, self.test_words, self.test_labels, at, self.seed) for at in NOISE}
        return [key | dict(test_noise=at, accuracy=round(share, 3)) for at, share in found.items()]


def csv_of(arguments: argparse.Namespace) -> Path:
    """Return the CSV file of a command: the data set's in this folder unless another is given."""
    return arguments.csv or Path(__file__).parent / f'{Path(arguments.data).name}.csv'


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


def missing(arguments: argparse.Namespace) -> Iterator[Job]:
    """Yield the models whose rows the CSV file does not hold yet."""
    setting, keys = setting_of(arguments.data), planned(arguments)
    if not keys:
        print(f'{csv_of(arguments)} has all of these runs. Give another --csv to train them again.')
    sizes = {name: setting[name] for name in ('dim', 'layers', 'heads', 'length', 'dropout')}
    sizes.update(of_table_2=Path(arguments.data).name in SOURCES, pooling=arguments.pooling)
    for seed, of_seed in groupby(keys, lambda key: key['seed']):
        training, test = parts(arguments.data, seed)
        vocabulary = vocabulary_of(training)
        words, labels = encode(training, vocabulary, setting['length'])
        texts = (words, labels, *encode(test, vocabulary, setting['length']))
        counts = (len(vocabulary) + 2, int(labels.max()) + 1)
        for key in of_seed:
            models = compared(*counts, seed, expansion=key['expansion'], **sizes)
            yield Job(key, models[key['attention']], *texts, setting)


def run(arguments: argparse.Namespace) -> None:
    """Train what the CSV file does not hold yet, and add the rows of each model when it is trained."""
    if arguments.device.startswith('cuda') and not any(arguments.train_noise or ()):
        run_side_by_side(arguments)
        return
    for job in missing(arguments):
        start, noise = time.process_time(), job.key['train_noise']
        kept = arguments.csv.with_name('-'.join(map(str, job.key.values())) + '.pt')
        train(job.model.to(arguments.device), job.words, job.labels, job.setting, noise, job.seed, kept)
        write(arguments.csv, job.rows(time.process_time() - start))
        kept.unlink(missing_ok=True)


def run_side_by_side(arguments: argparse.Namespace) -> None:
    """Do the same with all models at once, as :class:`.Training` does it; seconds are from the start of all."""
    torch.set_float32_matmul_precision('high')
    jobs = {prepared(job, arguments.device): job for job in missing(arguments)}
    start = time.time()
    for training in train_side_by_side(list(jobs), arguments.until):
        with torch.compiler.set_stance('force_eager'):  # to compile for a test does not pay
            write(arguments.csv, jobs[training].rows(time.time() - start))


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of the CSV file, none if there is no such file."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def write(path: Path, rows: list[dict[str, Any]]) -> None:
    """Add rows to the CSV file, which other processes may do at the same time."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('a', newline='') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        writer = csv.DictWriter(file, FIELDS, lineterminator='\n')
        if file.tell() == 0:
            writer.writeheader()
        writer.writerows(rows)


def report(arguments: argparse.Namespace) -> None:
    """Print the table: means and deviations, and the differences within a seed with their 95 % intervals."""
    groups: dict[tuple[str, ...], dict[str, dict[int, tuple[float, int]]]] = {}
    partners: dict[tuple[str, ...], dict[int, tuple[float, int]]] = {}  # the Transformer, which has one expansion
    for row in read(arguments.csv):
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
    parser.add_argument('--csv', type=Path, help="default: the data set's in this folder")
    parser.add_argument('--data', default='docstrings', help=DATA)
    parser.add_argument('--seeds', type=int, nargs='+', default=[0, 1, 2, 3, 4])
    parser.add_argument('--train-noise', type=float, nargs='+', help="default 0 and 0.3; 0 of the paper's data")
    parser.add_argument('--attention', nargs='+', choices=TABLE_2, help='default: all')
    parser.add_argument('--expansion', type=float, nargs='+', default=[4.0], help='of 2, 4 and 5.3333')
    parser.add_argument('--pooling', choices=('mean', 'class'), default='mean', help='rows of each in a CSV of its own')
    parser.add_argument('--device', default='cpu', help='cpu or cuda: there all models side by side')
    parser.add_argument('--until', type=float, help='on cuda: give up the rest at this time, in seconds since 1970')
    arguments = parser.parse_args(argv)
    arguments.csv = csv_of(arguments)
    (run if arguments.command == 'run' else report)(arguments)


if __name__ == '__main__':
    main()

"""Train rows of the paper's Table 1 at a small size and tabulate them; the table grows, what is in it is not rerun.

python -m projects.gated_lm.study run --variants none g1-elementwise --seeds 0 1 2
python -m projects.gated_lm.study report --out work_dirs/gated_lm.csv
"""

import argparse
import ast
import csv
import math
import os
import sysconfig
import time
from itertools import groupby, product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from projects.gated_lm.model import VARIANTS, Decoder

WINDOW, BATCH, STEPS, RATE, WARM_UP, TESTS = 96, 8, 1600, 3e-3, 50, 128
POINT = 20  # steps that a point of the loss curve is the mean of
MEASURES = ('loss', 'loss_at_twice', 'first', 'peak', 'gate', 'spikes')


def docstrings() -> list[str]:
    """Return the docstrings of the standard library of the Python that runs this, longer than 80 characters, once."""
    found: dict[str, None] = {}
    for folder, folders, files in os.walk(sysconfig.get_paths()['stdlib']):
        folders[:] = sorted(set(folders) - {'site-packages', 'dist-packages', 'test', 'tests', 'lib2to3'})
        for name in sorted(name for name in files if name.endswith('.py')):
            nodes = ast.walk(ast.parse(Path(folder, name).read_bytes()))
            texts = (ast.get_docstring(n) for n in nodes if isinstance(n, ast.Module | ast.ClassDef | ast.FunctionDef))
            found |= {text: None for text in texts if text and len(text) > 80}
    return list(found)


def corpus(path: Path | None) -> tuple[Tensor, Tensor]:
    """Return bytes to train and to test on: every twentieth docstring, or paragraph of a file, is the test's."""
    parts: tuple[list[str], list[str]] = ([], [])
    for i, text in enumerate(docstrings() if path is None else path.read_text().split('\n\n')):
        parts[i % 20 == 7].append(text)
    train, test = (torch.frombuffer(bytearray('\n\n'.join(p).encode()), dtype=torch.uint8).long() for p in parts)
    return train, test


def windows(data: Tensor, starts: Tensor, length: int) -> tuple[Tensor, Tensor]:
    """Return inputs and targets ``(B, length)``; the first input is 256, which begins every text."""
    targets = data[starts[:, None] + torch.arange(length)]
    return F.pad(targets[:, :-1], (1, 0), value=256), targets


def train(model: Decoder, data: Tensor, seed: int, rate: float, steps: int) -> list[float]:
    """Train in place and return the loss of every step."""
    optimizer = torch.optim.AdamW(model.parameters(), rate, weight_decay=0.1, betas=(0.9, 0.95))
    draws, losses = torch.Generator().manual_seed(seed), []
    for step in range(steps):
        optimizer.param_groups[0]['lr'] = rate * min(1, (step + 1) / WARM_UP) * (1 - 0.9 * step / steps)
        x, y = windows(data, torch.randint(len(data) - WINDOW, (BATCH,), generator=draws), WINDOW)
        loss = F.cross_entropy(model(x)[0].flatten(0, 1), y.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses


@torch.no_grad()
def measure(model: Decoder, data: Tensor) -> dict[str, float | str]:
    """Return the test loss, that of tokens beyond the trained length, and what the layers did and its mean."""
    starts = torch.linspace(0, len(data) - 2 * WINDOW, TESTS).long()
    x, y = windows(data, starts, 2 * WINDOW)
    late = F.cross_entropy(model(x)[0][:, WINDOW:].flatten(0, 1), y[:, WINDOW:].flatten()).item()
    x, y = windows(data, torch.cat((starts, starts + WINDOW)), WINDOW)
    logits, layers = model(x, look=True)
    first = [look[0][:, :, 16:, 0].mean().item() for look, _ in layers]  # of queries that see 17 tokens or more
    gates = [look[1].mean().item() for look, _ in layers if look[1] is not None] or [math.nan]
    peaks = [out.abs().max().item() for _, out in layers]
    means = dict(loss=F.cross_entropy(logits.flatten(0, 1), y.flatten()).item(), loss_at_twice=late, gate=mean(gates))
    return means | dict(first=mean(first), peak=mean(peaks), first_by_layer=cell(first), peak_by_layer=cell(peaks))


def spikes(losses: list[float]) -> int:
    """Return how many losses, from twice the warm-up on, are 0.5 above the mean of the :data:`POINT` before them."""
    return sum(losses[i] > mean(losses[i - POINT : i]) + 0.5 for i in range(2 * WARM_UP, len(losses)))


def cell(values: list[float]) -> str:
    """Return values as one cell of the table."""
    return ' '.join(f'{value:.4g}' for value in values)


def table_of(args: argparse.Namespace) -> Path:
    """Return the CSV file of a command: unless one is given, ``report`` reads the one in this folder."""
    if args.out:
        return args.out
    return Path(__file__).with_name('results.csv') if args.what == 'report' else Path('work_dirs/gated_lm.csv')


def planned(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Return what a command works on: combinations that the table lacks, or for ``report`` the rows that it has."""
    done = read(table_of(args))
    if args.what == 'report':
        return list(done)
    same = dict(steps=args.steps, rotated=args.rotated)
    found = (dict(variant=v, seed=s, rate=r, **same) for s, r, v in product(args.seeds, args.rates, args.variants))
    return [row for row in found if not any({k: str(v) for k, v in row.items()}.items() <= d.items() for d in done)]


def run(args: argparse.Namespace) -> None:
    """Train and measure every combination that the table lacks, and add a row for each."""
    rows, out = planned(args), table_of(args)
    if not rows:
        print(f'{out} has all of these runs. Give another --out to train them again.')
    for row in rows:
        learn, test = corpus(args.text)
        torch.manual_seed(row['seed'])
        model, start = Decoder(row['variant'], args.rotated), time.time()
        losses = train(model, learn, row['seed'], row['rate'], args.steps)
        row |= measure(model, test) | dict(spikes=spikes(losses), parameters=sum(p.numel() for p in model.parameters()))
        row |= dict(curve=cell([mean(losses[i : i + POINT]) for i in range(0, args.steps, POINT)]))
        row |= dict(seconds=round(time.time() - start), bytes=len(learn) + len(test), torch=torch.__version__)
        out.parent.mkdir(parents=True, exist_ok=True)
        with out.open('a', newline='') as file:
            csv.writer(file).writerows([row.values()] if file.tell() else [row, row.values()])


def read(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table of results."""
    return list(csv.DictReader(path.read_text().splitlines())) if path.exists() else []


def report(rows: list[dict[str, str]]) -> str:
    """Return a Markdown table by variant, rate and steps: mean and standard deviation over seeds."""
    names, order = ('variant', 'rate', 'steps', 'rotated', 'parameters'), list(VARIANTS)
    lines = [f'| {" | ".join((*names, "seeds", *MEASURES))} |', '|---' * 12 + '|']
    rows = sorted(rows, key=lambda row: (row['rotated'], row['rate'], order.index(row['variant']), row['seed']))
    for key, same in groupby(rows, lambda row: [row[name] for name in names]):
        group = list(same)
        cells = [*key, ' '.join(row['seed'] for row in group)]
        for values in (torch.tensor([float(row[name]) for row in group]) for name in MEASURES):
            cells.append(f'{values.mean():.3f}' + (f' ± {values.std():.3f}' if len(values) > 1 else ''))
        lines.append(f'| {" | ".join(cells)} |'.replace('nan ± nan', '-').replace('nan', '-'))
    return '\n'.join(lines)


def main(arguments: list[str] | None = None) -> None:
    """Run or report."""
    parser = argparse.ArgumentParser(description=__doc__.partition('\n')[0])
    parser.add_argument('what', choices=('run', 'report'))
    parser.add_argument('--variants', nargs='+', choices=list(VARIANTS), default=list(VARIANTS))
    parser.add_argument('--seeds', nargs='+', type=int, default=[0])
    parser.add_argument('--rates', nargs='+', type=float, default=[RATE])
    parser.add_argument('--steps', type=int, default=STEPS)
    parser.add_argument('--rotated', type=float, default=0.25, help='share of the channels with rotary positions')
    parser.add_argument('--text', type=Path, help='a file to learn instead of docstrings')
    parser.add_argument(
        '--out', type=Path, help="default: run adds to work_dirs/gated_lm.csv, report reads the project's results.csv"
    )
    args = parser.parse_args(arguments)
    run(args) if args.what == 'run' else print(report(read(table_of(args))))


if __name__ == '__main__':
    main()

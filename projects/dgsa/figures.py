"""Draw the rollout of a text through vanilla, differential and M-DGSA attention, as the M-DGSA paper's Fig. 3.

python -m projects.dgsa.figures --out work_dirs/rollout.png        docstrings: two minutes on one core
python -m projects.dgsa.figures --out work_dirs/rollout.png --data 20_newsgroups --expansion 5.3333 --device cuda
"""

from __future__ import annotations

import argparse
import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mmgate import record
from projects.dgsa.model import ATTENTIONS, TextClassifier, compared
from projects.dgsa.side_by_side import train_side_by_side
from projects.dgsa.study import DATA, SIZES, parts, prepared, setting_of
from projects.dgsa.texts import PAD, encode, vocabulary_of, words_of

LINE = 104  # characters of a line of words
LEAST, MOST = 20, 60  # words of a text that is drawn by default


@torch.no_grad()
def rollout(model: TextClassifier, words: Tensor) -> Tensor:
    """Return the relevance of each word ``(N,)`` to the mean of the words, which the classes are read off.

    Of signed maps it is signed; its sizes sum to 1.

    Source: Abnar and Zuidema, Quantifying attention flow in transformers (arXiv 2005.00928), Eq. 1; M-DGSA, Fig. 3.
    """
    model.eval()
    with record(model, ['attention']) as recording:
        model(words[None])
    relevance = torch.full((len(words),), 1 / len(words))
    for layer in reversed(range(len(model.blocks))):
        weights = recording[f'blocks.{layer}.attention']['attention'].tensors[0][0]  # (H, N, N)
        shares = (weights / weights.abs().sum(-1, keepdim=True)).mean(0)
        relevance = 0.5 * relevance + 0.5 * relevance @ shares  # half passes by
    return relevance / relevance.abs().sum()


def draw(words: Sequence[str], relevances: Mapping[str, np.ndarray], out: Path) -> Path:
    """Draw the words, coloured by each model's relevance, in multiples of the mean size; return the path."""
    import matplotlib.pyplot as plt

    lines, used = 1, 0
    places = []  # line and first character of each word
    for word in words:
        if used + len(word) > LINE:
            lines, used = lines + 1, 0
        places.append((lines - 1, used))
        used += len(word) + 1
    height = (0.22 * lines + 0.5) * len(relevances)
    figure, axes = plt.subplots(len(relevances), 1, figsize=(7, height), layout='constrained', squeeze=False)
    times = {name: values * len(words) for name, values in relevances.items()}
    high = max(2.0, *(float(np.abs(values).max()) for values in times.values()))
    for axis, (name, values) in zip(axes.flat, times.items(), strict=True):
        axis.set(xlim=(0, LINE), ylim=(lines, 0), xticks=[], yticks=[], frame_on=False)
        axis.set_title(name, loc='left', fontsize=9)
        shades = axis.scatter([], [], c=[], cmap='RdBu_r', vmin=-high, vmax=high)
        for word, (line, first), value in zip(words, places, values, strict=True):
            colour = shades.to_rgba(value)
            box = dict(facecolor=colour, edgecolor='none', pad=1.2)
            dark = 'white' if np.mean(colour[:3]) < 0.45 else 'black'
            at = dict(fontsize=6.5, family='monospace', va='center', color=dark, bbox=box)
            axis.text(first, line + 0.5, word, **at)
    bar = figure.colorbar(shades, ax=axes, fraction=0.03)
    bar.set_label('relevance, times its mean size;\nblue inhibits', fontsize=8)
    out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(out, dpi=150)
    plt.close(figure)
    return out


def choose(models: Mapping[str, TextClassifier], words: Tensor, labels: Tensor) -> int:
    """Return the first text of a fair length whose class all models find, or the first of all."""
    lengths = (words != PAD).sum(1)
    for number in torch.where((lengths >= LEAST) & (lengths <= MOST))[0].tolist():
        if all(predicted(model, words[number]) == labels[number] for model in models.values()):
            return number
    return 0


@torch.no_grad()
def predicted(model: TextClassifier, words: Tensor) -> int:
    """Return the number of the class that a model finds for numbered words ``(N,)``."""
    return int(model.eval()(words[None]).argmax())


def main(argv: Sequence[str] | None = None) -> None:
    """Train the three models, choose a text of the test and draw it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--data', default='docstrings', help=DATA)
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument('--expansion', type=float, default=4.0, help='2, 4 or 5.3333')
    parser.add_argument('--text', type=int, help='number of a text of the test; default: one that all models get right')
    parser.add_argument('--device', default='cpu')
    parser.add_argument(
        '--out', type=Path, default=Path('work_dirs/dgsa/rollout.png'), help='a CSV file goes beside it'
    )
    arguments = parser.parse_args(argv)
    setting: dict[str, Any] = setting_of(arguments.data)
    training, test = parts(arguments.data, arguments.seed)
    vocabulary = vocabulary_of(training)
    words, labels = encode(training, vocabulary, setting['length'])
    sizes = {name: setting[name] for name in SIZES}
    models = compared(
        len(vocabulary) + 2, int(labels.max()) + 1, arguments.seed, expansion=arguments.expansion, **sizes
    )
    for model in models.values():
        list(train_side_by_side([prepared(model.to(arguments.device), words, labels, setting, 0.0, arguments.seed)]))
        model.cpu()
    numbered, classes = encode(test, vocabulary, setting['length'])
    number = choose(models, numbered, classes) if arguments.text is None else arguments.text
    shown = numbered[number][numbered[number] != PAD]
    text = words_of(test[number][0])[: len(shown)]
    relevances = {name: rollout(models[name], shown).numpy() for name in ATTENTIONS}
    print(draw(text, relevances, arguments.out), write(text, relevances, arguments.out.with_suffix('.csv')))


def write(words: Sequence[str], relevances: Mapping[str, np.ndarray], out: Path) -> Path:
    """Write a row for each model and word, and return the path."""
    with out.open('w', newline='') as file:
        writer = csv.writer(file, lineterminator='\n')
        writer.writerow(('attention', 'place', 'word', 'relevance'))
        for name, values in relevances.items():
            for place, (word, value) in enumerate(zip(words, values, strict=True)):
                writer.writerow((name, place, word, f'{value:.6g}'))
    return out


if __name__ == '__main__':
    main()

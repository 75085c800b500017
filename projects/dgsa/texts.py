"""Texts and their classes: docstrings of the standard library, or the paper's data sets by Hugging Face."""

from __future__ import annotations

import ast
import functools
import gzip
import json
import random
import re
import sysconfig
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from projects.dgsa.model import PAD, UNKNOWN

Examples = list[tuple[str, int]]  # text and number of its class
WORD = re.compile(r'\w+|[^\w\s]')  # words and marks
NO_PACKAGE = {'site-packages', 'dist-packages', 'test', 'tests', 'idle_test'}
SOURCES = {
    'rotten_tomatoes': 'cornell-movie-review-data/rotten_tomatoes',
    'imdb': 'stanfordnlp/imdb',
    'ag_news': 'fancyzhx/ag_news',
    '20_newsgroups': 'SetFit/20_newsgroups',
}


def docstrings(classes: int = 12, least_words: int = 5) -> tuple[Examples, list[str]]:
    """Return the docstrings of the packages that have most of them, in the Python that runs this, and their names.

    A docstring that stands in several places counts once, and not at all if two packages have it.
    """
    root = Path(sysconfig.get_paths()['stdlib'])
    owners: dict[str, set[str]] = {}
    for path in sorted(root.rglob('*.py')):
        parts = path.relative_to(root).parts
        for node in [] if NO_PACKAGE & set(parts) else ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                text = ' '.join((ast.get_docstring(node) or '').split())
                if len(text.split()) >= least_words:
                    owners.setdefault(text, set()).add(parts[0].removesuffix('.py'))
    unique = {text: next(iter(names)) for text, names in owners.items() if len(names) == 1}
    names = [name for name, _ in Counter(sorted(unique.values())).most_common(classes)]
    return [(text, names.index(name)) for text, name in unique.items() if name in names], names


def published(name: str) -> tuple[Examples, Examples]:
    """Return training and test texts of a data set of the paper, or of another that ``datasets`` loads by this name.

    Where there are files ``{name}_train.jsonl.gz`` and ``{name}_test.jsonl.gz``, such as of ``FOLDER/20_newsgroups``,
    the texts are read from these, lines ``{"text": ..., "label": ...}``.
    """
    files = [Path(f'{name}_{part}.jsonl.gz') for part in ('train', 'test')]
    if files[0].exists():
        lines = (gzip.decompress(file.read_bytes()).decode().splitlines() for file in files)
        first, second = ([(row['text'], row['label']) for row in map(json.loads, part)] for part in lines)
        return first, second
    from datasets import load_dataset

    train, test = load_dataset(SOURCES.get(name, name), split=['train', 'test'])
    return [(row['text'], row['label']) for row in train], [(row['text'], row['label']) for row in test]


def split(examples: Examples, seed: int, share: float = 0.8) -> tuple[Examples, Examples]:
    """Return two parts, the first with ``share`` of every class."""
    groups: dict[int, Examples] = {}
    for example in examples:
        groups.setdefault(example[1], []).append(example)
    parts: tuple[Examples, Examples] = ([], [])
    for label in sorted(groups):
        random.Random(seed * 1000 + label).shuffle(groups[label])
        at = round(len(groups[label]) * share)
        parts[0].extend(groups[label][:at])
        parts[1].extend(groups[label][at:])
    return parts


@functools.cache
def words_of(text: str) -> list[str]:
    """Return the words and marks of a text in small letters."""
    return WORD.findall(text.lower())


def vocabulary_of(examples: Examples, least: int = 2, most: int = 60_000) -> dict[str, int]:
    """Number the words that occur ``least`` times, the ``most`` frequent of them (Table 4), from 2 on."""
    counts = Counter(word for text, _ in examples for word in words_of(text))
    kept = [word for word, count in counts.most_common(most - 2) if count >= least]
    return {word: number for number, word in enumerate(kept, 2)}


def encode(examples: Examples, vocabulary: dict[str, int], length: int) -> tuple[Tensor, Tensor]:
    """Return numbered words ``(B, length)``, padded behind, and classes ``(B,)``."""
    rows = torch.full((len(examples), length), PAD)
    for row, (text, _) in zip(rows, examples, strict=True):
        found = [vocabulary.get(word, UNKNOWN) for word in words_of(text)[:length]] or [UNKNOWN]
        row[: len(found)] = torch.tensor(found)
    return rows, torch.tensor([label for _, label in examples])


def trimmed(words: Tensor) -> Tensor:
    """Return numbered words ``(B, N)`` without the columns behind the longest text."""
    return words[:, : int((words != PAD).sum(1).max())]


def corrupt(words: Tensor, rate: float, vocabulary: int, draw: torch.Generator) -> Tensor:
    """Replace every word with probability ``rate`` by any of the vocabulary."""
    hit = (torch.rand(words.shape, generator=draw) < rate) & (words != PAD)
    return torch.where(hit, torch.randint(2, vocabulary, words.shape, generator=draw), words)

"""Mutation testing: make small changes to the code, and list those that no test notices.

cosmic-ray has the changes: other operators and numbers, inverted conditions, skipped loops, removed decorators. Places
are drawn by a seed, the same number from each group of files, with one change at each. A group is a package without the
files of the core, or the core: what gates, starts, records and saves. Annotations and the arguments of
:data:`MEANINGLESS`, which have no effect when the code runs, are left out. Changes are made in a copy of the tree. Each
result is saved at once and used again until its code or its tests change, so that an interrupted run can continue.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from fnmatch import fnmatch
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import NoReturn

from cosmic_ray.ast import ast_nodes, get_ast
from cosmic_ray.mutating import mutate_code
from cosmic_ray.plugins import get_operator, operator_names
from trees import ROOT, copy_tree

CORE = (
    'gate.py',
    'adapter.py',
    'gating.py',
    'rules.py',
    'plan.py',
    'swap.py',
    'gates/base/named.py',
    'start.py',
    'frozen.py',
    'notes.py',
    'recording.py',
    'files.py',
    'removal.py',
    'training.py',
    'checkpoints/gates_file.py',
)
PACKAGES = ('gates', 'ops', 'hosts', 'backbones', 'checkpoints', 'speed', 'mm')
GROUPS = ('core', *PACKAGES)
LEFT_OUT = (
    'ops/*/*kernel*.py',
    'ops/*/triton_*.py',
    'ops/deformable/deformable_backward.py',
    'ops/triton_backend.py',
    'hosts/points.py',
    'hosts/transformers.py',
)  # kernels, their launches; what is tested beside transformers, in an environment without mm packages
# Keyword arguments that change no result: whose line a warning names, and a check of lengths that are one by the code.
MEANINGLESS = ('stacklevel', 'strict')
PYTEST = ('-x', '-q', '-p', 'no:cacheprovider', '-m', 'not slow')
# Packages that every test run needs are imported once; none of them imports mmgate.
PRELOADED = (
    'pytest',
    'torch',
    'mmcv.ops',
    'mmdet.models',
    'mmdet.datasets',
    'mmseg.models',
    'mmseg.datasets',
    'mmpretrain.models',
)
SETTINGS = {'PYTHONDONTWRITEBYTECODE': '1', 'OMP_NUM_THREADS': '1', 'TRITON_INTERPRET': '1'}


@dataclass(frozen=True)
class Place:
    """A place where a file may be changed: path below ``mmgate``, line and column."""

    module: str
    line: int
    column: int


@dataclass(frozen=True)
class Change:
    """One of cosmic-ray's operators at one of its occurrences in a file."""

    operator: str
    occurrence: int


def main() -> None:
    """Draw a sample of changes, run their tests and report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--sample', type=int, default=60, help='number of changes, shared out among the groups')
    parser.add_argument('--groups', nargs='+', choices=GROUPS, default=GROUPS, help='groups of files to draw from')
    parser.add_argument('--seed', type=int, default=0)
    parser.add_argument(
        '--timeout', type=float, default=600, help="seconds for one change's tests, then it is undecided"
    )
    parser.add_argument('--out', type=Path, default=ROOT / 'work_dirs/mutants', help='folder for what was tried')
    parser.add_argument('--list', action='store_true', help='print the sample and try nothing')
    args = parser.parse_args()
    chosen = sample(ROOT / 'mmgate', args.sample, args.seed, args.groups)
    if args.list:
        for place, change in chosen:
            print(f'{place.module}:{place.line}:{place.column} {change.operator} {" ".join(tests_of(place.module))}')
        return
    preload()
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / 'tried.jsonl'
    known = {row['key']: row for row in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix='mutants-') as folder, suppress(KeyboardInterrupt):
        copy_checkout(Path(folder))
        for number, (place, change) in enumerate(chosen, 1):
            row = known.get(key_of(place, change)) or attempt(Path(folder), place, change, args.timeout)
            if row['key'] not in known and row['outcome'] != 'timeout':
                with log.open('a') as file:
                    file.write(json.dumps(row) + '\n')
            rows.append(row)
            where = f'{place.module}:{place.line}'
            print(f'{number:3} {row["outcome"]:8} {row["seconds"]:5.0f} s  {where} {change.operator}', flush=True)
    report = summary(rows, len(chosen), args.seed)
    (args.out / f'seed{args.seed}.md').write_text(report)
    print(report)


def copy_checkout(target: Path) -> None:
    """Copy the tree and the compiled library, which git ignores; without it the tests of the kernels are skipped."""
    copy_tree(target)
    for library in (ROOT / 'mmgate/ops/native/cpp').glob('*.so'):
        shutil.copy2(library, target / library.relative_to(ROOT))


def preload() -> None:
    """Import the packages that tests need once, in the process from which each run of tests is forked."""
    os.environ.update(SETTINGS)
    sys.dont_write_bytecode = True
    for name in PRELOADED:
        with suppress(ImportError):  # mmpretrain is not everywhere
            import_module(name)
    assert 'mmgate' not in sys.modules


def sample(package: Path, number: int, seed: int, groups: Sequence[str] = GROUPS) -> list[tuple[Place, Change]]:
    """Return ``number`` places, the same share from each group, with a change each, shuffled."""
    modules = [path.relative_to(package).as_posix() for path in sorted(package.rglob('*.py'))]
    draw = random.Random(seed)
    chosen = []
    for name in groups:
        places: dict[Place, list[Change]] = {}
        for module in modules:
            if group_of(module) == name:
                places.update(changes(module, (package / module).read_text()))
        ordered = sorted(places, key=lambda place: (place.module, place.line, place.column))
        draw.shuffle(ordered)
        drawn = (draw_change(draw, (package / place.module).read_text(), places[place], place) for place in ordered)
        chosen += list(islice(filter(None, drawn), number // len(groups)))
    draw.shuffle(chosen)
    return chosen


def group_of(module: str) -> str | None:
    """Return the group of a path below ``mmgate``; None for a file that is not changed."""
    if any(fnmatch(module, pattern) for pattern in LEFT_OUT):
        return None
    if any(fnmatch(module, pattern) for pattern in CORE):
        return 'core'
    package = module.partition('/')[0]
    return package if package in PACKAGES else None


def tests_of(module: str) -> list[str]:
    """Return the test files for a path below ``mmgate``, the nearest first.

    ``tests`` mirrors ``mmgate``: ``a/b/c.py`` has ``test_a/test_b/test_c.py``, and ``a/b/__init__.py`` has
    ``test_a/test_b/test_b.py``. Its neighbours in ``test_a/test_b`` follow, then the files in ``test_a``. A module
    beside the packages has the file of its name alone.
    """
    *folders, name = module.removesuffix('.py').split('/')
    folder = ROOT.joinpath('tests', *(f'test_{part}' for part in folders))
    if name == '__init__' and folders:
        name = folders[-1]
    named = folder / f'test_{name.lstrip("_")}.py'
    found = [named] if named.is_file() else []
    if module in CORE and not folders:
        core = {folder / f'test_{one}' for one in CORE if '/' not in one}
        found += sorted(path for path in core - {named} if path.is_file())
    for _ in folders:
        found += sorted(set(folder.glob('test_*.py')) - {named})
        folder = folder.parent
    return [path.relative_to(ROOT).as_posix() for path in found]


def draw_change(draw: random.Random, code: str, possible: list[Change], place: Place) -> tuple[Place, Change] | None:
    """Return a random change of a place after which the code can still be parsed, or None."""
    for change in draw.sample(possible, len(possible)):
        try:
            ast.parse(mutate_code(code, get_operator(change.operator)(), change.occurrence))
        except (AttributeError, SyntaxError):  # the former where an exception's name has dots
            continue
        return place, change
    return None


def changes(module: str, code: str) -> dict[Place, list[Change]]:
    """Return cosmic-ray's changes of a file by place, without those that have no effect when the code runs."""
    found: dict[Place, list[Change]] = {}
    tree = get_ast(code)
    unread, operands = spans(code)
    nodes = list(ast_nodes(tree))
    for name in operator_names():
        kind = get_operator(name)
        if kind.arguments():
            continue
        operator = kind()
        positions = (position[0] for node in nodes for position in operator.mutation_positions(node))
        for occurrence, position in enumerate(positions):
            if any(start <= position < end for start, end in unread):
                continue
            if 'BinaryOperator' in name and not any(start <= position < end for start, end in operands):
                continue  # the star of keyword-only arguments and of unpacking
            found.setdefault(Place(module, *position), []).append(Change(name, occurrence))
    return found


def spans(code: str) -> tuple[list[tuple], list[tuple]]:
    """Return the spans of code without effect, and the spans between the operands of binary operators."""
    unread = []
    between = []
    for node in ast.walk(ast.parse(code)):
        skipped = [getattr(node, 'annotation', None), getattr(node, 'returns', None)]
        if isinstance(node, ast.keyword) and node.arg in MEANINGLESS:
            skipped.append(node.value)
        for part in filter(None, skipped):
            unread.append(((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)))
        if isinstance(node, ast.BinOp):
            start = (node.left.end_lineno, node.left.end_col_offset)
            between.append((start, (node.right.lineno, node.right.col_offset)))
    return unread, between


def key_of(place: Place, change: Change) -> str:
    """Return a key of an attempt, made of the change, the file's code and the tests' code."""
    read = [f'mmgate/{place.module}', *tests_of(place.module)]
    state = repr((place, change)).encode() + b''.join((ROOT / name).read_bytes() for name in read)
    return hashlib.sha256(state).hexdigest()[:16]


def attempt(tree: Path, place: Place, change: Change, timeout: float) -> dict:
    """Change one place of the copy, run its tests until one fails, and change it back."""
    path = tree / 'mmgate' / place.module
    before = path.read_text()
    after = mutate_code(before, get_operator(change.operator)(), change.occurrence)
    assert after is not None
    started = time.monotonic()
    outcome = 'survived'
    failed = ''
    try:
        path.write_text(after)
        status, output = run(tests_of(place.module), tree, timeout)
        if status not in (0, 5):  # 5: all of its tests are skipped or deselected here
            outcome = 'timeout' if status is None else 'killed'
            failed = first_failure(output)
    finally:
        path.write_text(before)
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), n=0, lineterm='')
    diff = [line for line in lines if line[:1] in '+-' and line[:3] not in ('+++', '---')]
    return dict(
        key=key_of(place, change),
        **asdict(place),
        **asdict(change),
        outcome=outcome,
        seconds=round(time.monotonic() - started, 1),
        by=failed,
        diff=diff,
    )


def run(arguments: list[str], tree: Path, timeout: float) -> tuple[int | None, str]:
    """Return the status and output of pytest in a fork of this process, or None and '' if it took too long."""
    with tempfile.TemporaryFile('w+') as output:
        child = os.fork()
        if not child:
            _test(arguments, tree, output.fileno())
        deadline = time.monotonic() + timeout
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.killpg(child, signal.SIGKILL)
                os.waitpid(child, 0)
                return None, ''
            time.sleep(0.1)
        output.seek(0)
        return os.waitstatus_to_exitcode(ended[1]), output.read()


def _test(arguments: list[str], tree: Path, output: int) -> NoReturn:
    """Run the tests of a tree in this process, as the leader of a process group."""
    status = 1
    try:
        os.setsid()
        for stream in (1, 2):
            os.dup2(output, stream)
        # Both write to the file of the output, whatever they were before.
        sys.stdout = os.fdopen(1, 'w', closefd=False)
        sys.stderr = sys.stdout
        os.chdir(tree)
        os.environ['PYTHONPATH'] = str(tree)
        sys.path.insert(0, str(tree))
        import pytest

        status = int(pytest.main([*PYTEST, *arguments]))
        sys.stdout.flush()
    finally:
        os._exit(status)


def first_failure(output: str) -> str:
    """Return the name of the failing test in pytest's output, or the last line if no test has started."""
    failures = [line for line in output.splitlines() if line.startswith(('FAILED', 'ERROR'))]
    return (failures or output.strip().splitlines()[-1:] or [''])[0][:200]


def summary(rows: list[dict], asked: int, seed: int) -> str:
    """Return the score and the survivors as a page."""
    outcomes = Counter(row['outcome'] for row in rows)
    decided = outcomes['killed'] + outcomes['survived']
    lines = [
        f'`make mutants` (seed {seed}): {outcomes["killed"]} of {decided} changes killed, '
        f'{100 * outcomes["killed"] / max(decided, 1):.0f} %; {outcomes["timeout"]} more ran out of time undecided, '
        f'{asked - len(rows)} were not tried.',
        '',
    ]
    for group in GROUPS:
        own = Counter(row['outcome'] for row in rows if group_of(row['module']) == group)
        if own:
            lines.append(f'- {group}: {own["killed"]} of {own["killed"] + own["survived"]}')
    for row in rows:
        if row['outcome'] == 'survived':
            lines += [
                '',
                f'Survived: mmgate/{row["module"]}:{row["line"]}, {row["operator"]}',
                '```',
                *row['diff'],
                '```',
            ]
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    main()

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
import hashlib
import json
import os
import random
import shlex
import shutil
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from fnmatch import fnmatch
from functools import cache
from itertools import islice
from pathlib import Path

from cosmic_ray.commands.init import init
from cosmic_ray.mutating import mutate_and_test, mutate_code
from cosmic_ray.plugins import get_operator
from cosmic_ray.work_db import WorkDB, use_db
from cosmic_ray.work_item import MutationSpec
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
SETTINGS = {'OMP_NUM_THREADS': '1', 'TRITON_INTERPRET': '1'}
PYTEST = f"{shlex.quote(sys.executable)} -m pytest -x -q -p no:cacheprovider -m 'not slow'"
NO_TESTS = 5  # pytest's status if all tests are skipped or deselected here


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
    out = args.out.absolute()
    log = out / 'tried.jsonl'
    known = {row['key']: row for row in map(json.loads, log.read_text().splitlines())} if log.exists() else {}
    rows: list[dict] = []
    with tempfile.TemporaryDirectory(prefix='mutants-') as folder, suppress(KeyboardInterrupt):
        package = copy_checkout(Path(folder))
        chosen = sample(package, args.sample, args.seed, args.groups)
        for number, mutation in enumerate(chosen, 1):
            module = mutation.module_path.relative_to(package).as_posix()
            where = f'{module}:{mutation.start_pos[0]} {mutation.operator_name}'
            if args.list:
                print(where, *tests_of(module))
                continue
            key = key_of(module, mutation)
            row = known.get(key) or dict(key=key, module=module, where=where, **attempt(module, mutation, args.timeout))
            if key not in known and row['outcome'] != 'timeout':
                out.mkdir(parents=True, exist_ok=True)
                with log.open('a') as file:
                    file.write(json.dumps(row) + '\n')
            rows.append(row)
            print(f'{number:3} {row["outcome"]:8} {row["seconds"]:5.0f} s  {where}', flush=True)
    if rows:
        report = summary(rows, len(chosen), args.seed)
        (out / f'seed{args.seed}.md').write_text(report)
        print(report)


def copy_checkout(target: Path) -> Path:
    """Copy the tree and the compiled library, which git ignores, work there, and return the package's folder.

    Without the library the tests of the kernels are skipped.
    """
    copy_tree(target)
    for library in (ROOT / 'mmgate/ops/native/cpp').glob('*.so'):
        shutil.copy2(library, target / library.relative_to(ROOT))
    os.environ.update(SETTINGS, PYTHONPATH=str(target))
    os.chdir(target)
    return target / 'mmgate'


def sample(package: Path, number: int, seed: int, groups: Sequence[str] = GROUPS) -> list[MutationSpec]:
    """Return ``number`` changes at different places, the same share from each group, shuffled."""
    modules = sorted(package.rglob('*.py'))
    draw = random.Random(seed)
    chosen: list[MutationSpec] = []
    for name in groups:
        places = defaultdict(list)
        for mutation in mutations([path for path in modules if group_of(path.relative_to(package).as_posix()) == name]):
            places[mutation.module_path, mutation.start_pos].append(mutation)
        ordered = sorted(places)
        draw.shuffle(ordered)
        shuffled = (draw.sample(places[place], len(places[place])) for place in ordered)
        drawn = (next(filter(is_python, possible), None) for possible in shuffled)
        chosen += islice(filter(None, drawn), number // len(groups))
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
    ``test_a/test_b/test_b.py``; modules without such a file are in ``TESTED_BY`` of test_architecture.py. Neighbours in
    ``test_a/test_b`` follow, then the files in ``test_a``. A module beside the packages has none of these.
    """
    *folders, name = module.removesuffix('.py').split('/')
    folder = ROOT.joinpath('tests', *(f'test_{part}' for part in folders))
    if name == '__init__' and folders:
        name = folders[-1]
    named = folder / f'test_{name.lstrip("_")}.py'
    listed = [ROOT / 'tests' / name for name, modules in tested_by().items() if module in modules]
    found = [path for path in (named, *listed) if path.is_file()]
    if module in CORE and not folders:
        core = {folder / f'test_{one}' for one in CORE if '/' not in one}
        found += sorted(path for path in core - {*found} if path.is_file())
    for _ in folders:
        found += sorted(set(folder.glob('test_*.py')) - {*found})
        folder = folder.parent
    return [path.relative_to(ROOT).as_posix() for path in found]


@cache
def tested_by() -> dict[str, tuple[str, ...]]:
    """Return ``TESTED_BY`` of test_architecture.py: test files, with the modules that they test."""
    statements = ast.parse((ROOT / 'tests/test_architecture.py').read_text()).body
    assigned = [one for one in statements if isinstance(one, ast.Assign)]
    listed = next(one.value for one in assigned if ast.unparse(one.targets[0]) == 'TESTED_BY')
    return ast.literal_eval(listed)


def is_python(mutation: MutationSpec) -> bool:
    """Return whether a file can still be parsed after a change."""
    operator = get_operator(mutation.operator_name)()
    try:
        ast.parse(mutate_code(mutation.module_path.read_text(), operator, mutation.occurrence))
    except (AttributeError, SyntaxError):  # the former where an exception's name has dots
        return False
    return True


def mutations(modules: Sequence[Path]) -> Iterator[MutationSpec]:
    """Yield cosmic-ray's changes of files, without those that have no effect when the code runs."""
    read = {path: spans(path.read_text()) for path in modules}
    with tempfile.TemporaryDirectory() as folder, use_db(f'{folder}/changes.sqlite', WorkDB.Mode.create) as changes:
        init(modules, changes, {})
        for item in changes.work_items:
            (mutation,) = item.mutations
            unread, operands = read[mutation.module_path]
            # A star outside of the operands is that of keyword-only arguments or of unpacking.
            within = operands if 'BinaryOperator' in mutation.operator_name else [((0, 0), (sys.maxsize, 0))]
            if is_inside(mutation, within) and not is_inside(mutation, unread):
                yield mutation


def is_inside(mutation: MutationSpec, spans: Iterable[tuple]) -> bool:
    """Return whether a change starts inside one of these spans."""
    return any(start <= mutation.start_pos < end for start, end in spans)


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


def key_of(module: str, mutation: MutationSpec) -> str:
    """Return a key of an attempt, made of the change, the file's code and the tests' code."""
    read = [f'mmgate/{module}', *tests_of(module)]
    state = f'{module} {mutation.operator_name} {mutation.occurrence}'.encode()
    return hashlib.sha256(state + b''.join((ROOT / name).read_bytes() for name in read)).hexdigest()[:16]


def attempt(module: str, mutation: MutationSpec, timeout: float) -> dict:
    """Change one place of the copy, run its tests until one fails, and change it back."""
    started = time.monotonic()
    tests = f'{PYTEST} {" ".join(tests_of(module))} || [ $? = {NO_TESTS} ]'
    result = mutate_and_test([mutation], shlex.join(['sh', '-c', tests]), timeout)
    outcome = 'timeout' if result.output == 'timeout' else result.test_outcome.value
    diff = [line for line in (result.diff or '').splitlines() if line[:1] in '+-' and line[:3] not in ('+++', '---')]
    return dict(outcome=outcome, seconds=round(time.monotonic() - started, 1), diff=diff)


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
            lines += ['', f'Survived: mmgate/{row["where"]}', '```', *row['diff'], '```']
    return '\n'.join(lines) + '\n'


if __name__ == '__main__':
    main()

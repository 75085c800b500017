"""Write docs/papers.md, with all rows of the tables and figures of five papers, from docs/papers.yml and metafiles.

python tools/dev/papers.py           writes the page
python tools/dev/papers.py --check   reports wrong answers and a stale page
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import importlib.util
import io
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / 'docs/papers.md'
ROWS = ROOT / 'docs/papers.yml'
KINDS = ('config', 'run', 'option', 'see', 'not')
# Metrics of a host's models, and of ours by the task in their metafile.
HOSTS = {'mmdet': {'box AP', 'mask AP'}, 'mmseg': {'mIoU'}, 'mmpretrain': {'Top 1 Accuracy'}}
TASKS = {
    'Object Detection': {'box AP'},
    'Instance Segmentation': {'mask AP'},
    'Semantic Segmentation': {'mIoU'},
    'Image Classification': {'Top 1 Accuracy'},
}
PARAMETERS = 'million parameters'  # of any model; those of the metafile have to agree
RECIPES = {  # by the first file that a classifier is or inherits
    'lvvit-t_8xb128-300e_in1k': "LV-ViT's recipe",
    'vitae-t_4xb128-300e_in1k': "ViTAE's recipe",
    'imagenet_deit_8xb128-300e': "DeiT's recipe",
    'imagenet_pvt_8xb128-300e': "Agent attention's recipe for PVT",
    'imagenet_swin_8xb128-300e': "Agent attention's recipe for Swin",
    'imagenet_cswin_8xb128-300e': "Agent attention's recipe for CSwin",
    'imagenet_384px_8xb32-30e': 'fine-tuned for 30 epochs',
    'deit-t_8xb128-300e': "Agent attention's recipe",
    'imagenet_8xb128-300e': "Agent attention's recipe",
}
INTRODUCTION = """# The papers, row by row

Every table and figure of the five papers. A row links the config that reproduces it with mmgate, or names the command,
the option, or the reason why there is none. Figures are the papers'; ours are among
[papers' claims, tried](when_gates_help.md#papers-claims-tried). `python tools/dev/papers.py` writes the page from
[papers.yml](papers.yml) and the metafiles of configs and projects.
"""


def read_rows() -> dict[str, dict[str, Any]]:
    """Return the papers in docs/papers.yml, with their tables and rows."""
    return yaml.safe_load(ROWS.read_text())


def read_models() -> dict[str, dict[str, Any]]:
    """Return the entries of all metafiles by name."""
    listed = yaml.safe_load((ROOT / 'model-index.yml').read_text())['Import']
    paths = [*(ROOT / path for path in listed), *sorted(ROOT.glob('projects/*/metafile.yml'))]
    entries = [entry for path in paths for entry in yaml.safe_load(path.read_text())['Models']]
    return {entry['Name']: entry for entry in entries}


def find_problems(papers: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """Yield the problems: wrong or missing answers, wrong or missing figures, missing links."""
    for paper, entry in papers.items():
        for table, content in entry['tables'].items():
            for row, given in content['rows'].items():
                reason = _fault(given, entry, models) or _wrong_figure(given, paper, table, content, models)
                reason = reason or _answered_by_project(given, entry, table, row)
                if reason:
                    yield f'{paper}, {table}, {row}: {reason}'
        project = entry.get('project')
        readme = entry['readme']
        if project and f'{project}/README.md' not in (ROOT / readme).read_text():
            yield f'{readme} does not link {project}/README.md'
    for name, model in models.items():
        paper, table = _source(model)
        tables = {key.lower(): value['tables'] for key, value in papers.items()}.get(paper)
        rows = (tables or {}).get(table, {'rows': {}})['rows'].values()
        if tables is not None and not any(_answer(given)[:2] == ('config', name) for given in rows):
            yield f'{name} has a figure of {paper}, {table}, and is in no row of it'


def make_page(papers: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION]
    for paper, entry in papers.items():
        links = f'[README](../{entry["readme"]})'
        if entry.get('project'):
            links += f', [{entry["project"]}](../{entry["project"]}/README.md)'
        lines += [f'## {paper}', '', f'{entry["title"]}; {links}.', '']
        for table, content in entry['tables'].items():
            title = f'{table}: {content["about"]}' if content['about'] else table
            lines += [f'### {title}', '', *_table(paper, table, content, models), '']
    return '\n'.join(lines)


def _table(paper: str, table: str, content: Mapping[str, Any], models: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table: a column for each metric, and above it what its rows have in common.

    A row links the config that answers it. Other answers have a column where most rows have one, and else follow the
    row's name.
    """
    metrics = _metrics(content)
    answers = {row: _cell(given, models) for row, given in content['rows'].items()}
    said = [content['note']] if content.get('note') else []
    recipes = list(dict.fromkeys(filter(None, (_recipe_of(given, models) for given in content['rows'].values()))))
    if recipes:
        numbers = [f'({number}) {recipe}' for number, recipe in enumerate(recipes, 1)]
        text = recipes[0] if len(recipes) == 1 else ', '.join(numbers)
        said.append(text[0].upper() + text[1:] + '.')
    frame = _shared(answers.values())
    if frame:
        start, end = frame
        said.append(f'Command: `{" ".join((*start, "...", *end))}`, where the rows name the rest.')
        for row, answer in answers.items():
            words = answer.strip('`').split()
            rest = ' '.join(words[len(start) : len(words) - len(end)])
            answers[row] = f'`{rest}`' if rest else '-'
    common = len(answers) > 1 and set(answers.values()) != {''} and len(set(answers.values())) == 1
    if common:
        said.append(f'All rows: {next(iter(answers.values()))}.')
    apart = bool(metrics) and not common and sum(map(bool, answers.values())) > len(answers) / 2
    lines = [['row', *metrics] + (['answer'] if apart else [])]
    for row, given in content['rows'].items():
        kind, text, _ = _answer(given)
        linked = kind == 'config' and text in models
        name = f'[{row}](../{models[text]["Config"]})' if linked else row
        recipe = _recipe_of(given, models)
        if recipe and len(recipes) > 1:
            name += f' ({recipes.index(recipe) + 1})'
        if answers[row] and not apart and not common:
            name += f': {answers[row]}'
        figures = _figures(given, paper, table, content, models)
        lines.append([name, *(str(figures.get(metric, '-')) for metric in metrics)] + ([answers[row]] if apart else []))
    above = [' '.join(said), ''] if said else []
    if not metrics:
        return above + [f'- {name}' for (name,) in lines[1:]]
    header, *rows = (f'| {" | ".join(line)} |' for line in lines)
    return [*above, header, '|' + '---|' * len(lines[0]), *rows]


def _shared(answers: Collection[str]) -> tuple[list[str], list[str]] | None:
    """Return the first and the last words that different commands have in common, or None if these are few."""
    commands = [answer.strip('`').split() for answer in answers if answer.startswith('`python ')]
    if len(commands) < len(answers) or len(set(map(tuple, commands))) < 2:
        return None
    start = os.path.commonprefix(commands)
    end = os.path.commonprefix([command[len(start) :][::-1] for command in commands])[::-1]
    return (start, end) if len(start) + len(end) > 4 else None


def _answer(given: Any) -> tuple[str, Any, Any]:
    """Return kind, text and figure of a row's answer; the kind is empty if the answer is not valid."""
    if isinstance(given, str):
        return 'config', given, None
    kinds = [key for key in given if key != 'figure'] if isinstance(given, Mapping) else []
    if len(kinds) != 1 or kinds[0] not in KINDS:
        return '', None, None
    return kinds[0], given[kinds[0]], given.get('figure')


def _fault(given: Any, paper: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return the reason why an answer is not valid, or why its file or link does not exist."""
    kind, text, _ = _answer(given)
    if not kind:
        return f'neither a config nor one of {", ".join(KINDS)}'
    if not text or not str(text).strip():
        return f'{kind} is empty'
    if kind == 'config' and '::' in text:
        package, _, path = text.partition('::')
        return '' if package in HOSTS and path.endswith('.py') else f'{text} is no config of a host'
    if kind == 'config':
        return '' if text in models else f'{text} is in no metafile'
    if kind == 'run':
        return _idle(text) if script(text).exists() else f'{script(text).relative_to(ROOT)} is no file'
    return f'{text} is no table of the paper' if kind == 'see' and text not in paper['tables'] else ''


def script(command: str) -> Path:
    """Return the script that a command runs, or the file of the module after ``-m``."""
    words = _words(command)
    if words[0] == '-m':
        return ROOT / words[2] if words[1] == 'pytest' else ROOT / f'{words[1].replace(".", "/")}.py'
    return ROOT / words[0]


def plan(command: str) -> list[Any]:
    """Return what a command would work on in a fresh checkout, without doing it.

    The script's own parser reads the arguments. A script that leaves out what is done has a function ``planned``, which
    lists the rest; the work of any other is the call itself, and that of pytest the tests that it collects.

    Raises:
        SystemExit: The parser refuses the arguments.
        ModuleNotFoundError: The script needs a package that is not installed.
    """
    words = _words(command)
    if words[:2] == ['-m', 'pytest']:
        call = [sys.executable, *words[:2], '-o', 'addopts=', '--collect-only', '-q', *words[2:]]
        collected = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
        return [line for line in collected.stdout.splitlines() if '::' in line]
    module = _load(script(command))
    parsed = _parse(module.main, words[2 if words[0] == '-m' else 1 :])
    if not hasattr(module, 'planned'):
        return [parsed]
    own = Path.cwd()
    with tempfile.TemporaryDirectory() as empty:  # nothing of an earlier run is there
        os.chdir(empty)
        try:
            return list(module.planned(parsed))
        finally:
            os.chdir(own)


class _Parsed(BaseException):
    """Carries the arguments out of a script that has just parsed them, past its own handlers."""


def _words(command: str) -> list[str]:
    """Return a command's words after the program that starts it."""
    return re.sub('^(python|accelerate launch) ', '', command).split()


def _load(path: Path) -> ModuleType:
    """Return a tool, or a module of a project, which other modules of it import by name."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == 'projects':
        if str(ROOT) not in sys.path:
            sys.path.insert(0, str(ROOT))
        return importlib.import_module('.'.join(relative.with_suffix('').parts))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _parse(main: Callable[[list[str]], Any], words: list[str]) -> argparse.Namespace:
    """Return the arguments as a script parses them, and stop it there."""
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise _Parsed(parse_args(parser, *args, **kwargs))

    with mock.patch.object(argparse.ArgumentParser, 'parse_args', stop):
        try:
            main(words)
        except _Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f'{main.__module__}.main parses no arguments')


@functools.cache
def _idle(command: str) -> str:
    """Return the reason why a command does no work; empty if it works, or if a package to tell is not installed."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return '' if plan(command) else f'{command} plans no work'
    except SystemExit:
        return errors.getvalue().strip().splitlines()[-1]
    except ModuleNotFoundError:
        return ''


def _wrong_figure(given: Any, paper: str, table: str, content: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return the reason why a row's figure differs from the one that its table prints."""
    kind, text, figure = _answer(given)
    metrics = _metrics(content)
    if not metrics:
        return f'a figure, and {table} has no metric' if figure is not None else ''
    written = _written(figure, metrics)
    strange = set(written) - set(metrics)
    if strange:
        return f'a figure of {", ".join(sorted(strange))}, and the metric of {table} is {", ".join(metrics)}'
    if kind == 'config':
        judged = HOSTS[text.partition('::')[0]] if '::' in text else _judged_by(models[text])
        if PARAMETERS not in metrics and not judged & set(metrics):
            return f'a model judged by {", ".join(sorted(judged))}, and the metric of {table} is {", ".join(metrics)}'
        printed = _of_metafile(text, paper, table, models)
        if PARAMETERS in written and text in models:
            digits = len(str(written[PARAMETERS]).partition('.')[2])
            printed = {**printed, PARAMETERS: round(models[text]['Metadata']['Parameters'] / 1e6, digits)}
        other = [metric for metric, value in written.items() if printed.get(metric, value) != value]
        if other:
            return f'{other[0]} {written[other[0]]}, and {printed[other[0]]} in the metafile'
    if kind != 'see' and not _figures(given, paper, table, content, models):
        return f"no figure: give what {table} prints, '-' for nothing"
    return ''


def _answered_by_project(given: Any, paper: Mapping[str, Any], table: str, row: str) -> str:
    """Return the project whose README names the table, the figure or the row of an answer "none"."""
    kind = _answer(given)[0]
    project = paper.get('project')
    if kind != 'not' or not project:
        return ''
    readme = (ROOT / project / 'README.md').read_text()
    parts = row.partition(':')[0].split(', ')
    places = {f'Figure {part}' for part in parts} if table == 'Figures' else {table}
    words = [part for part in parts if re.search('[A-Za-z]{2}', part)]
    if places & _places(readme) or any(re.search(rf'\b{re.escape(word)}\b', readme, re.I) for word in words):
        return f'none, and the README of {project} names it'
    return ''


def _places(text: str) -> set[str]:
    """Return the tables and figures that a text names: ``Table 2``, ``Tables 11 to 13``, ``Fig. 3``."""
    found = set()
    for word, first, last in re.findall(r'\b(Tables?|Fig\.|Figs\.|Figures?) (\d+)(?:(?: to | and |-)(\d+))?', text):
        kind = 'Table' if word.startswith('Table') else 'Figure'
        found |= {f'{kind} {number}' for number in range(int(first), int(last or first) + 1)}
    return found


def _metrics(content: Mapping[str, Any]) -> list[str]:
    metric = content.get('metric') or []
    return [metric] if isinstance(metric, str) else list(metric)


def _written(figure: Any, metrics: list[str]) -> dict[str, Any]:
    """Return a row's figures by metric; a figure without a name is of the table's first metric."""
    if figure is None:
        return {}
    return dict(figure) if isinstance(figure, Mapping) else {metrics[0]: figure}


def _judged_by(model: Mapping[str, Any]) -> set[str]:
    """Return the metrics that a metafile's entry may have."""
    judged: set[str] = set()
    for result in model['Results']:
        judged |= TASKS.get(result['Task'], set()) | set(result['Metrics'])
    return judged


def _of_metafile(name: str, paper: str, table: str, models: Mapping[str, Any]) -> dict[str, Any]:
    """Return the figures by metric that a config's metafile has from this table."""
    model = models.get(name)
    if model is None:
        return {}
    metrics = {key: value for result in model['Results'] for key, value in result['Metrics'].items()}
    return metrics if _source(model) == (paper.lower(), table) else {}


def _source(model: Mapping[str, Any]) -> tuple[str, str]:
    """Return paper and table of a model's figure, the paper in lower case; empty without."""
    paper, _, table = model['Metadata'].get('Metrics From', '').removeprefix('the ').partition(' paper, ')
    return paper.lower(), table


def _figures(
    given: Any, paper: str, table: str, content: Mapping[str, Any], models: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the printed figures of a row by metric: the metafile's, if they are of this table, and the row's."""
    kind, text, figure = _answer(given)
    metrics = _metrics(content)
    printed = _of_metafile(text, paper, table, models) if kind == 'config' else {}
    found = {**printed, **_written(figure, metrics)}
    return {metric: found[metric] for metric in metrics if metric in found}


def _cell(given: Any, models: Mapping[str, Any]) -> str:
    """Return a row's answer as text; empty for a config of ours, which the row's name links."""
    kind, text, _ = _answer(given)
    if kind == 'config':
        return '' if text in models else f'`{text}`'
    return {'run': f'`{text}`', 'option': text, 'see': f'see {text}', 'not': f'none: {text}'}[kind]


def _recipe_of(given: Any, models: Mapping[str, Any]) -> str:
    """Return the ImageNet recipe of a row's config; empty if it has none."""
    kind, text, _ = _answer(given)
    return _recipe(ROOT / models[text]['Config']) if kind == 'config' and text in models else ''


def _recipe(path: Path) -> str:
    """Return the ImageNet recipe that a config of ours inherits; empty if it inherits none."""
    if 'classification' not in path.parts:
        return ''
    if path.stem in RECIPES:
        return RECIPES[path.stem]
    for base in re.findall(r"'([^':]+\.py)'", path.read_text().partition('_base_ = ')[2].partition('\n\n')[0]):
        found = _recipe((path.parent / base).resolve())
        if found:
            return found
    return ''


def main(argv: list[str]) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing; fail where the page is wrong')
    args = parser.parse_args(argv)
    papers = read_rows()
    models = read_models()
    problems = list(find_problems(papers, models))
    if not problems:
        page = make_page(papers, models)
        if not args.check:
            PAGE.write_text(page)
        elif not PAGE.is_file() or PAGE.read_text() != page:
            problems = ['docs/papers.md is stale: python tools/dev/papers.py']
    for problem in problems:
        print(problem, file=sys.stderr)
    return 1 if problems else 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1:]))

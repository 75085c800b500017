"""Write docs/papers.md, what is the papers' and what is ours, from docs/papers.yml and the metafiles.

python tools/dev/papers.py    writes the page; tests/test_papers.py holds it to what it is made from
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import io
import os
import re
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import yaml

ROOT = Path(__file__).parents[2]
PAGE = ROOT / 'docs/papers.md'
ROWS = ROOT / 'docs/papers.yml'
KINDS = ('config', 'run', 'option', 'see', 'not')
HOSTS = ('mmdet', 'mmseg', 'mmpretrain')
PARAMETERS = 'million parameters'  # of any model; those of the metafile have to agree
UNPRINTED = {PARAMETERS, 'FPS'}  # metrics that are not in the column of results
LISTS = {'Figures', 'Measures'}  # tables whose rows are answered one by one
INTRODUCTION = """# The papers: what is theirs, what is ours

**No result on this page is ours, and no config on it was trained at its paper's scale.** Accuracies are the papers'.
Smaller trials are in [when gates help](when_gates_help.md).

The *source* of a point is the **paper**, its authors' **files** (code, checkpoints), its parameter **counts**, or
**ours**: our choice.

In the tables of configs, *tables* are the paper's tables and figures (F) that have the config as a row. *Ungated* is
the partner without the method, linked if it is mmgate's, and else the package's config of the same name. Parameters are
the trained ones, multiply-accumulates (MACs) by `python tools/analysis_tools/get_flops.py CONFIG --shape HEIGHT WIDTH`:
as counted here, the ungated model's first, and in brackets as the paper prints them. Every printed row is in
[papers.yml](papers.yml), from which `python tools/dev/papers.py` writes this page.
"""
NEXT = """Next: [when gates help](when_gates_help.md), [all configs](../configs/README.md),
[train and test](train.md).
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
        lines += _rows(['point', 'here', 'source'], entry['fidelity']) + ['']
        lines += [f'### {paper}: configs', '', entry['tried'], '', *_configs(paper, entry, models), '']
        lines += [f'- {table}: {content["note"]}' for table, content in entry['tables'].items() if content.get('note')]
        lines += ['', f'### {paper}: commands and other rows', '', *_others(entry), '']
        lines += [f'### {paper}: missing', '', *_missing(entry), '']
    lines.append(NEXT)
    return re.sub(r'\n{3,}', '\n\n', '\n'.join(lines))


def _rows(header: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table."""
    return [f'|{"|".join(line)}|' for line in (header, ['---'] * len(header), *rows)]


def _configs(paper: str, entry: Mapping[str, Any], models: Mapping[str, Any]) -> list[str]:
    """Return the table of a paper's configs, each with its ungated partner, and the reasons of its differences."""
    tables: dict[str, list[str]] = {}
    figures: dict[str, dict[str, Any]] = {}
    for table, content in entry['tables'].items():
        for row, given in content['rows'].items():
            kind, name, _ = _answer(given)
            if kind == 'config':
                tables[name] = tables.get(name, []) + _short(table, row)
                printed = _figures(given, paper, table, content, models)
                figures[name] = {**printed, **figures.get(name, {})}
    counts = entry.get('counts', {})
    by_stem = {Path(name).stem: name for name in tables}
    partners = {name: by_stem.get(name.partition('-')[2], '') for name in tables if not _ungated(name, models)}
    has_counts = any(name in counts for name in tables)
    reasons: list[str] = []
    lines = []
    for name in tables:
        if name in partners.values():
            continue
        ungated = _ungated(name, models)
        pair = (name, '') if ungated else (partners[name], name)
        results = [_results(one, figures) for one in pair]
        if pair[0] in models and not ungated:
            results[0] = f'[{results[0] or "config"}](../{models[pair[0]]["Config"]})'
        columns: list[list[str]] = [[], [], []]
        for one in pair:
            parameters, macs, why = _counted(one, figures, counts, models)
            if why and why not in reasons:
                reasons.append(why)
            if parameters and (one == name or one in counts):
                columns[0].append(parameters)
                columns[1].append(macs)
                columns[2].append(str(reasons.index(why) + 1) if why else '')
        cells = [', '.join(dict.fromkeys(filter(None, column))) for column in columns]
        line = [_label(name, entry, models), ', '.join(dict.fromkeys(tables[name])), *results]
        lines.append([*line, *(cells if has_counts else cells[:1])])
    header = ['config', 'tables', 'ungated', 'with it', 'million parameters']
    header += ['billion MACs', 'why'] if has_counts else []
    return _rows(header, lines) + [''] + [f'{number}. {why}' for number, why in enumerate(reasons, 1)] + ['']


def _short(table: str, row: str) -> list[str]:
    """Return the numbers of a row's tables and figures, figures with an F before them."""
    if table == 'Figures':
        return [f'F{number}' for number in row.partition(':')[0].split(', ')]
    return [re.sub('^(Table|Section|Appendix) ', '', table).replace('Figure ', 'F')]


def _ungated(name: str, models: Mapping[str, Any]) -> bool:
    return '::' in name or '/vanilla/' in models[name]['Config']


def _label(name: str, entry: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return a config's name without its schedule, linked, and a mark if its recipe is not the paper's."""
    if '::' in name:
        return f'`{name}`'
    short = re.sub(r'(_\d+xb\d+-(\d+[ek]|lsj-50e))?_(in1k|coco|ade20k-\d+x\d+)', '', name)
    short = re.sub(r'_\d+xb\d+-\d+e_', ', ', short).replace('-in1k-384x384-pre', '')
    own = any(re.fullmatch(pattern, name) for pattern in entry.get('own_recipes', []))
    return f'[{short}](../{models[name]["Config"]}){"*" if own else ""}'


def _results(name: str, figures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the printed results of a config."""
    return ' / '.join(str(value) for metric, value in figures.get(name, {}).items() if metric not in UNPRINTED)


def _counted(
    name: str, figures: Mapping[str, Mapping[str, Any]], counts: Mapping[str, Any], models: Mapping[str, Any]
) -> tuple[str, str, str]:
    """Return parameters and multiply-accumulates, each with the paper's in brackets, and the reason of a difference."""
    if name in counts:
        _, *cells, why = counts[name]
        return (
            *(f'{ours} ({paper})' if paper else ours for paper, ours in zip(cells[::2], cells[1::2], strict=True)),
            why,
        )
    if name not in models:
        return '', '', ''
    printed = figures[name].get(PARAMETERS)
    ours = f'{models[name]["Metadata"]["Parameters"] / 1e6:.2f}'
    return (f'{ours} ({printed})' if printed else ours), '', ''


def _others(entry: Mapping[str, Any]) -> list[str]:
    """Return a line for each row that is answered by a command, an option or another table."""
    lines = []
    for table, content in entry['tables'].items():
        title = f'{table}, {content["about"]}' if content['about'] else table
        runs = {row: _answer(given)[1] for row, given in content['rows'].items() if _answer(given)[0] == 'run'}
        if table in LISTS:
            prefix = 'Figure ' if table == 'Figures' else ''
            lines += [f'- {prefix}{row}: `{command}`' for row, command in runs.items()]
        elif runs:
            start, end = _shared(runs.values())
            rest = [' '.join(run.split()[len(start) : len(run.split()) - len(end)]) for run in runs.values()]
            command = ' '.join([*start, *(['...'] if any(rest) else []), *end])
            given = [f'`{words}`' if words else 'nothing' for words in dict.fromkeys(rest)]
            lines.append(f'- {title}: `{command}`' + (f', where ... is {", ".join(given)}' if any(rest) else ''))
        for row, given in content['rows'].items():
            kind, text, _ = _answer(given)
            if kind in ('see', 'option'):
                name = f'Figure {row}' if table == 'Figures' else table if row == 'all' else f'{table}, {row}'
                lines.append(f'- {name}: {"see " if kind == "see" else ""}{text}')
    return lines


def _shared(commands: Collection[str]) -> tuple[list[str], list[str]]:
    """Return the first and the last words that commands have in common."""
    split = [command.split() for command in commands]
    start = os.path.commonprefix(split)
    end = os.path.commonprefix([words[len(start) :][::-1] for words in split])[::-1]
    return start, end


def _missing(entry: Mapping[str, Any]) -> list[str]:
    """Return a line for each reason why rows have no answer, and what else is missing."""
    rows: dict[tuple[str, str], list[str]] = {}
    for table, content in entry['tables'].items():
        for row, given in content['rows'].items():
            kind, text, _ = _answer(given)
            if kind == 'not':
                rows.setdefault((table, text), []).append(row)
    lines = [f'- {table} ({", ".join(names)}): {text}' for (table, text), names in rows.items()]
    return lines + [f'- {line}' for line in entry.get('missing', [])]


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
        return _refused(text)
    return f'{text} is no table of the paper' if kind == 'see' and text not in paper['tables'] else ''


class _Parsed(BaseException):
    """Carries the arguments out of a script that has just parsed them, past its own handlers."""


def parse(command: str) -> argparse.Namespace:
    """Return a command's arguments as its script parses them, and stop it there; pytest's are its folder and a word.

    Raises:
        ModuleNotFoundError: There is no such script, or it needs a package that is not installed.
        SystemExit: The parser refuses the arguments, or pytest would find no test.
    """
    name, *words = re.sub('^(python|accelerate launch)( -m)? ', '', command).split()
    if name == 'pytest':
        folder, _, word = words
        tests = ''.join(path.read_text() for path in (ROOT / folder).glob('*.py'))
        if not re.search(rf'def test_\w*{word}', tests):
            print(f'no test of {folder} has {word} in its name', file=sys.stderr)
            raise SystemExit(2)
        return argparse.Namespace(file=folder)
    parse_args = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        raise _Parsed(parse_args(parser, *args, **kwargs))

    with mock.patch.object(sys, 'path', [str(ROOT), *sys.path]):
        script = importlib.import_module(name.removesuffix('.py').replace('/', '.'))
    with mock.patch.object(argparse.ArgumentParser, 'parse_args', stop):
        try:
            script.main(words)
        except _Parsed as parsed:
            return parsed.args[0]
    raise AssertionError(f'{name} parses no arguments')


@functools.cache
def _refused(command: str) -> str:
    """Return the reason why a command is refused; empty if it is not, or if a package to tell is not installed."""
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            parse(command)
    except SystemExit:
        return errors.getvalue().strip().splitlines()[-1]
    except ModuleNotFoundError as error:
        return f'{error.name} is no file' if str(error.name).partition('.')[0] in ('projects', 'tools') else ''
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


def _metrics(content: Mapping[str, Any]) -> list[str]:
    metric = content.get('metric') or []
    return [metric] if isinstance(metric, str) else list(metric)


def _written(figure: Any, metrics: list[str]) -> dict[str, Any]:
    """Return a row's figures by metric; a figure without a name is of the table's first metric."""
    if figure is None:
        return {}
    return dict(figure) if isinstance(figure, Mapping) else {metrics[0]: figure}


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


def main() -> None:
    """Write the page, or end with what is wrong in it."""
    papers = read_rows()
    models = read_models()
    problems = list(find_problems(papers, models))
    if problems:
        sys.exit('\n'.join(problems))
    PAGE.write_text(make_page(papers, models))


if __name__ == '__main__':
    main()

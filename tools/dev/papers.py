"""Write docs/papers.md, every table and figure of the five papers row by row, from docs/papers.yml and the metafiles.

python tools/dev/papers.py           writes the page
python tools/dev/papers.py --check   says what has no answer, or that the page is stale
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
PAGE, ROWS = ROOT / 'docs/papers.md', ROOT / 'docs/papers.yml'
KINDS = ('run', 'option', 'see', 'not')
HOSTS = ('mmdet', 'mmseg', 'mmpretrain')
INTRODUCTION = """# The papers, row by row

Every table and figure of the five papers, and what reaches it here: a config, a command, an option, or why there is
none. Figures are the papers' claims, from the metafiles: nothing was trained on ImageNet, COCO, ADE20K, CIFAR or SVHN
here. One with a table in brackets is that table's. Written by `python tools/dev/papers.py` from
[papers.yml](papers.yml) and `configs/*/metafile.yml`.
"""


def read_rows() -> dict[str, dict[str, Any]]:
    """Return the papers, with their tables and rows, as docs/papers.yml has them."""
    return yaml.safe_load(ROWS.read_text())


def read_models() -> dict[str, dict[str, Any]]:
    """Return the entries of all metafiles by name."""
    index = yaml.safe_load((ROOT / 'model-index.yml').read_text())
    entries = [entry for path in index['Import'] for entry in yaml.safe_load((ROOT / path).read_text())['Models']]
    return {entry['Name']: entry for entry in entries}


def find_problems(papers: Mapping[str, Any], models: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is wrong: a row without an answer, an answer that is not there, a figure of a metafile in no row."""
    for paper, entry in papers.items():
        for table, content in entry['tables'].items():
            for row, answer in content['rows'].items():
                reason = _fault(answer, entry['tables'], models)
                if reason:
                    yield f'{paper}, {table}, {row}: {reason}'
    for name, model in models.items():
        paper, table = _source(model)
        tables = {key.lower(): value['tables'] for key, value in papers.items()}.get(paper)
        if tables is not None and name not in tables.get(table, {'rows': {}})['rows'].values():
            yield f'{name} has a figure of {paper}, {table}, and stands in no row of it'


def make_page(papers: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    """Return the page as Markdown."""
    lines = [INTRODUCTION]
    for paper, entry in papers.items():
        lines += [f'## {paper}', '', f'{entry["title"]}; [README](../{entry["readme"]}).', '']
        for table, content in entry['tables'].items():
            title = f'{table}: {content["about"]}' if content['about'] else table
            lines += [f'### {title}', '', '| row | figure | answer |', '|---|---|---|']
            for row, answer in content['rows'].items():
                lines.append(f'| {row} | {_figure(answer, paper, table, models)} | {_cell(answer, models)} |')
            lines.append('')
    return '\n'.join(lines)


def _fault(answer: Any, tables: Mapping[str, Any], models: Mapping[str, Any]) -> str:
    if isinstance(answer, str) and '::' in answer:
        package, _, path = answer.partition('::')
        return '' if package in HOSTS and path.endswith('.py') else f'{answer} is no config of a host'
    if isinstance(answer, str):
        return '' if answer in models else f'{answer} stands in no metafile'
    if not isinstance(answer, Mapping) or len(answer) != 1 or next(iter(answer)) not in KINDS:
        return f'neither a config nor one of {", ".join(KINDS)}'
    ((kind, text),) = answer.items()
    if not text or not str(text).strip():
        return f'{kind} says nothing'
    if kind == 'run' and not (ROOT / text.split()[0]).is_file():
        return f'{text.split()[0]} is no file'
    return f'{text} is no table of the paper' if kind == 'see' and text not in tables else ''


def _source(model: Mapping[str, Any]) -> tuple[str, str]:
    """Return paper and table of a model's figure, the paper in lower case; empty without."""
    paper, _, table = model['Metadata'].get('Metrics From', '').removeprefix('the ').partition(' paper, ')
    return paper.lower(), table


def _figure(answer: Any, paper: str, table: str, models: Mapping[str, Any]) -> str:
    model = models.get(answer) if isinstance(answer, str) else None
    metrics = {key: value for result in model['Results'] for key, value in result['Metrics'].items()} if model else {}
    if not model or not metrics:
        return ''
    figure, (origin, where) = ', '.join(f'{key} {value}' for key, value in metrics.items()), _source(model)
    if origin != paper.lower():
        return f'{figure} ({model["Metadata"]["Metrics From"].removeprefix("the ")})'
    return figure if where == table else f'{figure} ({where})'


def _cell(answer: Any, models: Mapping[str, Any]) -> str:
    if isinstance(answer, str):
        return f'[{answer}](../{models[answer]["Config"]})' if answer in models else f'`{answer}`'
    ((kind, text),) = answer.items()
    return {'run': f'`{text}`', 'option': text, 'see': f'see {text}', 'not': f'none: {text}'}[kind]


def main(argv: list[str]) -> int:
    """Write the page, or check it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--check', action='store_true', help='write nothing; fail where the page is wrong')
    args = parser.parse_args(argv)
    papers, models = read_rows(), read_models()
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

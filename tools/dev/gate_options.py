"""Write the tables of docs/gates.md: each gate's options and their defaults from its signature and docstring.

python tools/dev/gate_options.py    writes the tables; tests/test_readme.py compares them
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import mmgate
from mmgate.gate import gate_of_type, gate_options
from mmgate.registry import MODELS

PAGE = Path(mmgate.__file__).parents[1] / 'docs/gates.md'
HEADER = '| option | default | meaning |\n|---|---|---|\n'
# Sections of the page that explain a class which docstrings name.
SECTIONS = {'GatingModulation': '[`gml`](#gml)', 'mmgate.ops.ms_deform_attn': '[the operator](../mmgate/ops/README.md)'}
SECTIONS['mmgate.ops.plug_attention'] = SECTIONS['mmgate.ops.ms_deform_attn']


def table_of(name: str) -> str:
    """Return the table of a registered name's options, in Markdown."""
    gate = gate_of_type(MODELS.get(name))
    described: dict[str, str] = {}
    for cls in reversed(gate.__mro__):
        described.update(arguments_of(cls))
    options = gate_options(gate).items()
    return HEADER + ''.join(f'| `{name}` | `{one.default!r}` | {described[name]} |\n' for name, one in options)


def arguments_of(cls: type) -> dict[str, str]:
    """Return the texts of the ``Args`` of a class's docstring, by argument, in Markdown."""
    doc = inspect.cleandoc(cls.__dict__.get('__doc__') or '')
    args = re.search(r'^Args:\n((?:    .*\n?|\n)*)', doc, re.M)
    found = re.findall(r'^    (\w+): ((?:.*\n?)(?:        .*\n?)*)', args.group(1), re.M) if args else []
    return {name: as_markdown(text) for name, text in found}


def as_markdown(text: str) -> str:
    """Return a docstring's text as one line of Markdown, without the defaults, which have a column."""
    line = ' '.join(text.split())
    line = re.sub(r' \(default\)| Default (``[^`]*``|[\d.]+\d)\.', '', line)
    line = re.sub(r':\w+:`([^`]*)`', lambda match: SECTIONS.get(match[1], f'`{match[1]}`'), line)
    return line.replace('``', '`').replace('|', '\\|')


def written(page: str) -> str:
    """Return the text of the page with the table of each section that is named like a gate written anew."""
    tables = re.compile(r'(^## (\w+)\n(?:(?!^#|^\| option ).*\n)*)\| option \|.*\n(?:\|.*\n)*', re.M)
    return tables.sub(lambda match: match[1] + table_of(match[2]), page)


if __name__ == '__main__':
    PAGE.write_text(written(PAGE.read_text()))

"""Write the table of hosts in docs/hosts.md from the adapters; needs transformers and timm.

python tools/dev/host_table.py    writes the page; tests/test_transformers/test_pages.py holds it to the adapters
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

from mmgate.errors import full_name
from mmgate.gate import Gate
from mmgate.gates.base.deformable import DeformableGate
from mmgate.gates.base.dense import DenseGate
from mmgate.gates.base.map import MapGate
from mmgate.hosts.table import _ADAPTERS, PACKAGES

PAGE = Path(__file__).parents[2] / 'docs/hosts.md'
FILES = sorted(name for name in PACKAGES if not name.startswith('mm'))
KINDS: dict[type[Gate], str] = {DenseGate: 'dense', DeformableGate: 'deformable', MapGate: 'over a map'}
START = '<!-- written by tools/dev/host_table.py -->\n'
END = '<!-- end of the table -->\n'


def models(adapter: type) -> str:
    """Return the part of an adapter's first sentence that names its hosts."""
    first = (inspect.getdoc(adapter) or '').partition('\n')[0].replace('``', '`').rstrip('.')
    subject = re.sub(r'^Adapter .*?\b(?:for|into|replace) ', '', first)
    return re.split(r';|, wh', subject)[0]


def table() -> str:
    """Return the table: a row an adapter, and a row for all of transformers' classes that attend alike."""
    for name in FILES:
        importlib.import_module(f'mmgate.hosts.{name}')
    hosts: dict[tuple[str, type], list[str]] = {}
    of_transformers: dict[str, set[str]] = {}
    for (gate, host), adapter in _ADAPTERS.items():
        if gate not in KINDS or not isinstance(adapter, type):
            continue
        kind = KINDS[gate]
        name = host if isinstance(host, str) else full_name(host)
        if name != host and name.partition('.')[0] not in PACKAGES:
            continue
        if name.startswith('modeling_'):
            model = name.partition('.')[0].removeprefix('modeling_')
            of_transformers.setdefault(kind, set()).add(model)
        else:
            hosts.setdefault((kind, adapter), []).append(name)
    rows = [
        f'| {models(adapter)} | {", ".join(f"`{name}`" for name in names)} | {kind} |'
        for (kind, adapter), names in hosts.items()
    ]
    rows += [
        f'| transformers, by folder: {", ".join(sorted(found))} | in `modeling_*.py` | {kind} |'
        for kind, found in of_transformers.items()
    ]
    return '\n'.join(['| models | attention classes | gates |', '|---|---|---|', *rows, ''])


def written() -> str:
    """Return the page with the table in its place."""
    before, _, rest = PAGE.read_text().partition(START)
    return before + START + '\n' + table() + '\n' + END + rest.partition(END)[2]


if __name__ == '__main__':
    PAGE.write_text(written())

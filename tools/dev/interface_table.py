"""List transformers' attention classes that mmgate/hosts/interface_classes.py does not have, or write rows of it.

python tools/dev/interface_table.py                            # what the installed release has, and the table has not
python tools/dev/interface_table.py modeling_vit.ViTAttention=self    # write rows: classes with their forms

Choose a form of FORMS in mmgate/hosts/interface.py by what a forward projects. Leave out a class that does something
between projection and attention that no form says, such as a cache, or a factor of the queries under another form than
a rotated one. tests/test_transformers/test_interface.py then compares each class in the table with itself.
"""

from __future__ import annotations

import argparse
import ast
from pathlib import Path

import transformers

from mmgate.hosts.interface import FORMS, hash_of
from mmgate.hosts.interface_classes import CLASSES

TABLE = Path(__file__).parents[2] / 'mmgate/hosts/interface_classes.py'
INTERFACE = 'ALL_ATTENTION_FUNCTIONS'
# Classes that look like one of a form and are not.
LEFT_OUT = {
    'modeling_kosmos2_5.Kosmos2_5VisionAttention': 'it always calls eager attention, whatever its config says',
    'modeling_florence2.Florence2VisionChannelAttention': 'channels attend, not tokens',
    'modeling_lw_detr.LwDetrAttention': 'it has its adapter, for its groups of queries',
    'modeling_rf_detr.RfDetrAttention': 'the same',
}


def forwards() -> dict[str, ast.FunctionDef]:
    """Return the forward of each class that calls the attention interface, in the installed transformers, by name."""
    found = {}
    for path in sorted(Path(transformers.__file__).parent.glob('models/**/modeling_*.py')):
        for kind in ast.parse(path.read_text()).body:
            for node in kind.body if isinstance(kind, ast.ClassDef) else ():
                if isinstance(node, ast.FunctionDef) and node.name == 'forward' and INTERFACE in ast.unparse(node):
                    found[f'{path.stem}.{kind.name}'] = node
    return found


def written(rows: dict[str, tuple[str, str]]) -> str:
    """Return the module with the table."""
    lines = [f'    {name!r}: {row!r},\n' for name, row in sorted(rows.items())]
    return (
        '"""Attention classes of transformers, each with its form and the hash of its forward.\n\n'
        'tools/dev/interface_table.py writes this file; see :data:`.interface.FORMS` and :func:`.interface.hash_of`.\n'
        f'"""\n\nWRITTEN_WITH = {transformers.__version__!r}  # transformers\n'
        f'CLASSES: dict[str, tuple[str, str]] = {{\n{"".join(lines)}}}\n'
    )


def main() -> None:
    """Print what differs, and write the rows that are given."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rows', nargs='*', metavar='MODULE.CLASS=FORM', help=f'one of {", ".join(FORMS)}')
    rows = parser.parse_args().rows
    if not all(row.count('=') == 1 for row in rows):
        parser.error(f'write MODULE.CLASS=FORM; got {" ".join(rows)}')
    given = dict(row.split('=') for row in rows)
    found = forwards()
    hashes = {name: hash_of(forward) for name, forward in found.items()}
    wrong = {*(given.keys() - hashes.keys()), *(set(given.values()) - FORMS.keys())}
    if wrong:
        parser.error(f'neither a class of transformers {transformers.__version__} nor a form: {sorted(wrong)}')
    rows = {name: row for name, row in CLASSES.items() if hashes.get(name) == row[1]}
    rows |= {name: (form, hashes[name]) for name, form in given.items()}
    for name in sorted(CLASSES.keys() - rows.keys()):
        print(f'{name} ({CLASSES[name][0]}) has another forward' if name in found else f'{name} is gone')
    for name in sorted(found.keys() - CLASSES.keys() - rows.keys()):
        if 'cache' not in ast.unparse(found[name]):
            print(f'{name} is not in the table{": " + LEFT_OUT[name] if name in LEFT_OUT else ""}')
    if given:
        TABLE.write_text(written(rows))


if __name__ == '__main__':
    main()

"""Write the tables of configs in configs/*/README.md from the metafiles.

python tools/dev/config_tables.py    writes them; tests/test_metafiles.py holds the pages to the metafiles
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
METAFILES = sorted(ROOT.glob('configs/*/metafile.yml'))
TABLE = re.compile(r'(?<=<!-- configs: python tools/dev/config_tables.py -->\n)(.*?)(?=<!-- end -->)', re.DOTALL)
HEADER = '| folder | configs, with million parameters | training |\n|---|---|---|\n'


def fill(page: str, folder: Path, models: Sequence[Mapping[str, Any]]) -> str:
    """Return a page with its table of a folder's configs: a row for each folder in it and way to train."""
    rows: dict[tuple[str, str], list[str]] = {}
    for model in models:
        path = Path(model['Config']).relative_to(folder)
        data = model['Metadata']
        length = f'{data["Epochs"]} epochs' if 'Epochs' in data else f'{data["Iterations"]:,} iterations'
        training = f'{data["Training Data"]}, {length} of {data["Batch Size"]} images'
        link = f'[{_short(path, folder.name)}]({path}) {data["Parameters"] / 1e6:.1f}'
        rows.setdefault((str(path.parent), training), []).append(link)
    lines = [f'| `{place}/` | {", ".join(links)} | {training} |\n' for (place, training), links in sorted(rows.items())]
    filled, found = TABLE.subn(lambda _: f'\n{HEADER}{"".join(lines)}\n', page)
    if found != 1:
        raise ValueError(f'{folder}/README.md has {found} places for a table of configs, not one.')
    return filled


def _short(path: Path, method: str) -> str:
    """Return a config's name without what its folder and the table's last column say."""
    name = re.sub(r'_(\d+xb\d+-[a-z0-9-]+|[13]x)_[a-z0-9]+|_ms-crop(?=-[13]x)|_coco', '', path.stem)
    name = re.sub(r'-\d+x\d+$', '', name)
    name = name.removeprefix(f'{method.replace("_", "-")}-')
    for folder in path.parts[:-1]:
        name = name.replace(f'{folder.replace("_", "-")}_', '').replace(f'{folder.replace("_", "-")}-', '')
    return name


def pages() -> dict[Path, str]:
    """Return each README with its table, by its path."""
    found = {}
    for metafile in METAFILES:
        readme = metafile.parent / 'README.md'
        models = yaml.safe_load(metafile.read_text())['Models']
        found[readme] = fill(readme.read_text(), metafile.parent.relative_to(ROOT), models)
    return found


if __name__ == '__main__':
    for path, text in pages().items():
        path.write_text(text)

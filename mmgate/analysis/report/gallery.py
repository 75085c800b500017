"""A page of pictures and tables in one file that needs no network: what a report is made of."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark; --line: #8884; --soft: #888; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; }
h1 { font-size: 1.6rem; }
h2 { border-top: 1px solid var(--line); font-size: 1.25rem; margin-top: 2.5rem; padding-top: 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
figure { margin: 1rem 0; } figcaption { color: var(--soft); font-size: .9rem; overflow-wrap: anywhere; }
img { background: #fff; border: 1px solid var(--line); box-sizing: border-box; height: auto; max-width: 100%; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .8rem .3rem 0; text-align: right; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; } code { overflow-wrap: anywhere; }
"""


@dataclass(frozen=True)
class Section:
    """A part of a page.

    Attributes:
        title: Its heading, once in a page.
        text: What one sees in it, plain text.
        pictures: PNG or JPEG files with their captions.
        table: Rows of equal keys, the header.
        command: What made it.
    """

    title: str
    text: str = ''
    pictures: Sequence[tuple[Path, str]] = ()
    table: Sequence[Mapping[str, Any]] = field(default=())
    command: str = ''


def write_gallery(out: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write ``out/index.html`` with every picture inside it, and return the path.

    Args:
        out: Folder of the page; it is made.
        title: Of the page.
        sections: What stands in it, in this order.

    Raises:
        ValueError: Two sections have one title, or a table's rows have different keys.
        FileNotFoundError: A picture is not there.
    """
    titles = [section.title for section in sections]
    if len(set(titles)) != len(titles):
        raise ValueError(f'titles of sections must differ, got {", ".join(titles)}.')
    links = ''.join(f'<a href="#s{number}">{html.escape(name)}</a>' for number, name in enumerate(titles))
    body = '\n'.join(_section(f's{number}', section) for number, section in enumerate(sections))
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n'
        f'<body><h1>{html.escape(title)}</h1><nav>{links}</nav>\n{body}\n</body></html>\n'
    )
    out.mkdir(parents=True, exist_ok=True)
    path = out / 'index.html'
    path.write_text(page, encoding='utf-8')
    return path


def _section(anchor: str, section: Section) -> str:
    parts = [f'<section id="{anchor}"><h2>{html.escape(section.title)}</h2>']
    if section.text:
        parts.append(f'<p>{html.escape(section.text)}</p>')
    parts += [_picture(path, caption) for path, caption in section.pictures]
    if section.table:
        parts.append(_table(section.table))
    if section.command:
        parts.append(f'<p><code>{html.escape(section.command)}</code></p>')
    return '\n'.join([*parts, '</section>'])


def _picture(path: Path, caption: str) -> str:
    kind = 'png' if path.suffix == '.png' else 'jpeg'
    data = base64.b64encode(path.read_bytes()).decode()
    text = html.escape(caption)
    return f'<figure><img alt="{text}" src="data:image/{kind};base64,{data}"><figcaption>{text}</figcaption></figure>'


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = list(rows[0])
    if any(list(row) != header for row in rows):
        raise ValueError(f"a table's rows must all have the keys {', '.join(header)}.")
    cells = [''.join(f'<th>{html.escape(str(key))}</th>' for key in header)]
    cells += [''.join(f'<td>{_cell(value)}</td>' for value in row.values()) for row in rows]
    return f'<div class="wide"><table>{"".join(f"<tr>{row}</tr>" for row in cells)}</table></div>'


def _cell(value: Any) -> str:
    return f'{value:.4g}' if isinstance(value, float) else html.escape(str(value))

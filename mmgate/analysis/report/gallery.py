"""A page of pictures and tables in one file that needs no network: what a report is made of."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; }
h2 { border-top: 1px solid #8884; margin-top: 2.5rem; padding-top: 1rem; }
nav { display: flex; flex-wrap: wrap; gap: .25rem 1rem; }
figure { margin: 1rem 0; } figcaption, code { overflow-wrap: anywhere; }
img { background: #fff; height: auto; max-width: 100%; }
.wide { overflow-x: auto; } th, td { padding: .3rem .8rem .3rem 0; text-align: left; white-space: nowrap; }
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
    escape = html.escape
    parts = [f'<section id="{anchor}"><h2>{escape(section.title)}</h2>', f'<p>{escape(section.text)}</p>']
    for path, caption in section.pictures:
        kind, data = 'png' if path.suffix == '.png' else 'jpeg', base64.b64encode(path.read_bytes()).decode()
        picture = f'<img alt="{escape(caption)}" src="data:image/{kind};base64,{data}">'
        parts.append(f'<figure>{picture}<figcaption>{escape(caption)}</figcaption></figure>')
    if section.table:
        parts.append(_table(section.table))
    return '\n'.join([*parts, f'<p><code>{escape(section.command)}</code></p></section>'])


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    header = list(rows[0])
    if any(list(row) != header for row in rows):
        raise ValueError(f"a table's rows must all have the keys {', '.join(header)}.")
    shown = [[f'{x:.4g}' if isinstance(x, float) else html.escape(str(x)) for x in row.values()] for row in rows]
    lines = [''.join(f'<th>{html.escape(str(key))}</th>' for key in header)]
    lines += [''.join(f'<td>{cell}</td>' for cell in row) for row in shown]
    return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'

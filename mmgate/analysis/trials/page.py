"""Write texts, tables and pictures into one HTML page that needs no network."""

from __future__ import annotations

import base64
import html
from collections.abc import Mapping, Sequence
from pathlib import Path

STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; max-width: 72rem; padding: 1rem; }
h2 { border-top: 1px solid #8884; margin-top: 2.5rem; padding-top: 1rem; }
figure { margin: 1rem 0; } figcaption, code { overflow-wrap: anywhere; }
img { background: #fff; height: auto; max-width: 100%; }
.wide { overflow-x: auto; } th, td { padding: .3rem .8rem .3rem 0; text-align: left; white-space: nowrap; }
"""


def write_page(path: Path, title: str, sections: Mapping[str, Sequence[str | Path]]) -> Path:
    """Write a page and return its path.

    Args:
        path: The HTML file.
        title: Its heading.
        sections: By heading: paragraphs, Markdown tables, commands (which begin with ``python``), and PNG files, which
            are put inside the page with their name as caption.
    """
    body = [f'<h1>{html.escape(title)}</h1>']
    for heading, parts in sections.items():
        body += [f'<h2>{html.escape(heading)}</h2>', *map(_part, parts)]
    head = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
    )
    text = '\n'.join([f'{head}<title>{html.escape(title)}</title><style>{STYLE}</style></head><body>', *body])
    path.write_text(f'{text}\n</body></html>\n', encoding='utf-8')
    return path


def _part(part: str | Path) -> str:
    if isinstance(part, Path):
        data = base64.b64encode(part.read_bytes()).decode()
        caption = html.escape(part.stem.replace('_', ' '))
        picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        return f'<figure>{picture}<figcaption>{caption}</figcaption></figure>'
    if part.startswith('|'):
        header, _, *rows = (line.strip('|').split('|') for line in part.splitlines())
        lines = [''.join(f'<th>{html.escape(cell.strip())}</th>' for cell in header)]
        lines += [''.join(f'<td>{html.escape(cell.strip())}</td>' for cell in row) for row in rows]
        return f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>'
    text = html.escape(part)
    return f'<p><code>{text}</code></p>' if part.startswith('python ') else f'<p>{text}</p>'

"""Write pictures, tables and their commands into one HTML page that needs no network."""

import base64
import html
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from children import ending

from mmgate.errors import ConfigError

TOOLS = Path(__file__).resolve().parent
LINES = 15  # of the output of a command that failed
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
    """A part of the page.

    Attributes:
        title: Heading.
        text: Paragraphs, with empty lines between them.
        command: Command line that made it; empty if there is none.
        pictures: PNG files.
        table: Rows with the same keys.
        captions: Captions of pictures, by the stem of the file; by default that stem.
        notes: Paragraphs below the table.
    """

    title: str
    text: str
    command: str
    pictures: Sequence[Path]
    table: Sequence[Mapping[str, str]] = ()
    captions: Mapping[str, str] = field(default_factory=dict)
    notes: str = ''


def draw(title: str, text: str, command: list[str], out: Path, *, verbose: bool) -> Section:
    """Run a tool of this folder and return its pictures; pictures of an earlier page are deleted.

    Args:
        title: Heading of the section.
        text: Its text.
        command: Name of the tool, and its arguments without ``--out``.
        out: Folder for the pictures.
        verbose: True shows the tool's output, else the output is shown only if the tool fails.

    Raises:
        ConfigError: The tool failed.
    """
    for old in (*out.glob('*.png'), *out.glob('*.csv')):
        old.unlink()
    run([*command, '--out', str(out)], verbose=verbose)
    shown = f'python tools/analysis_tools/{command[0]}.py {shlex.join(command[1:])} --out DIR'
    return Section(title, text, shown, sorted(out.glob('*.png')))


def run(command: list[str], *, verbose: bool) -> None:
    """Run a tool of this folder; raise ConfigError with the end of its output if it fails."""
    tool, *arguments = command
    piped = None if verbose else subprocess.PIPE
    call = [sys.executable, '-W', 'ignore', str(TOOLS / f'{tool}.py'), *arguments]
    with ending():
        done = subprocess.run(call, check=False, stdout=piped, stderr=piped and subprocess.STDOUT, text=True)
    if done.returncode:
        last = '\n'.join((done.stdout or '').splitlines()[-LINES:])
        raise ConfigError(f'{tool} ended with {done.returncode}:\n{last}')


def write_page(out: Path, title: str, sections: Sequence[Section]) -> Path:
    """Write ``out/index.html`` with every picture inside it, and return the path."""
    links = ''.join(f'<a href="#s{n}">{html.escape(section.title)}</a>' for n, section in enumerate(sections))
    body = '\n'.join(_section(f's{number}', section) for number, section in enumerate(sections))
    page = (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1"><link rel="icon" href="data:,">'
        f'<title>{html.escape(title)}</title><style>{STYLE}</style></head>\n'
        f'<body><h1>{html.escape(title)}</h1><nav>{links}</nav>\n{body}\n</body></html>\n'
    )
    path = out / 'index.html'
    path.write_text(page, encoding='utf-8')
    return path


def _section(anchor: str, section: Section) -> str:
    parts = [f'<section id="{anchor}"><h2>{html.escape(section.title)}</h2>', *_paragraphs(section.text)]
    for path in section.pictures:
        data = base64.b64encode(path.read_bytes()).decode()
        caption = html.escape(section.captions.get(path.stem, path.stem))
        picture = f'<img alt="{caption}" src="data:image/png;base64,{data}">'
        parts.append(f'<figure>{picture}<figcaption>{caption}</figcaption></figure>')
    if section.table:
        lines = [''.join(f'<th>{html.escape(key)}</th>' for key in section.table[0])]
        lines += [''.join(f'<td>{html.escape(cell)}</td>' for cell in row.values()) for row in section.table]
        parts.append(f'<div class="wide"><table>{"".join(f"<tr>{line}</tr>" for line in lines)}</table></div>')
    parts += _paragraphs(section.notes)
    if section.command:
        parts.append(f'<p><code>{html.escape(section.command)}</code></p>')
    return '\n'.join([*parts, '</section>'])


def _paragraphs(text: str) -> list[str]:
    return [f'<p>{html.escape(part)}</p>' for part in text.split('\n\n') if part]

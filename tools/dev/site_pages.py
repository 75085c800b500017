"""A hook of MkDocs: pages in the code's folders, at their paths, with the files they link; formulas as MathML."""

from __future__ import annotations

import re
from pathlib import Path

from latex2mathml.converter import convert
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
PAGES = ('*.md', 'configs/**/*.md', 'mmgate/**/*.md', 'projects/*/README.md', 'tools/**/*.md', 'tests/README.md')
LINK = re.compile(r'\]\(([^)#:\s]+)')


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Set blocks of ``math``, which GitHub shows as formulas, as browsers show them without a script."""
    fence = dict(name='math', **{'class': 'math'}, format=lambda source, *_, **__: convert(source, display='block'))
    config.mdx_configs.setdefault('pymdownx.superfences', {})['custom_fences'] = [fence]
    return config


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Give every page its path in the repository, and add files that pages link to."""
    pages = [path for pattern in PAGES for path in ROOT.glob(pattern) if '.mim' not in path.parts]
    for file in [file for file in files if Path(str(file.abs_src_path)).is_relative_to(config.docs_dir)]:
        files.remove(file)
        pages.append(Path(str(file.abs_src_path)))
    texts = {page: page.read_text() for page in pages if page.suffix == '.md'}
    linked = {(page.parent / link).resolve() for page, text in texts.items() for link in LINK.findall(text)}
    for path in sorted({*pages, *(path for path in linked if path.is_file())}):
        files.append(File.generated(config, path.relative_to(ROOT).as_posix(), abs_src_path=str(path)))
    return files

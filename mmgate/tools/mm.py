"""Run a tool that mmdet or mmseg ships, with mmgate imported: ``python -m mmgate.tools.mm [NAME [ARGUMENTS]]``.

NAME is a file's name (``print_config``), its path (``analysis_tools/confusion_matrix.py``) or either of them behind its
package (``mmseg:browse_dataset``). A tool that both packages have is taken from the one whose config is among the
arguments; configs may be given as ``package::path``. Without a NAME: a list.
"""

from __future__ import annotations

import ast
import difflib
import os.path as osp
import runpy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import read_config

HOSTS = ('mmdet', 'mmseg')
PACKAGES = (*HOSTS, 'mmgate')


@dataclass(frozen=True)
class Tool:
    """A script of a package.

    Attributes:
        package: The package that ships it.
        name: Its path below the package's tools, without ``.py``.
        path: The file.
    """

    package: str
    name: str
    path: Path

    def __str__(self) -> str:
        return f'{self.package}:{self.name}'


def main() -> int:
    """Run the command line and return its exit status."""
    return cli.main(run)


def run(argv: list[str]) -> None:
    """Run the tool ``argv[0]`` in this process, with the rest of ``argv`` as its arguments; without any, list them."""
    if not argv or argv[0] in ('-h', '--help'):
        print(__doc__ if argv else listing())
        return
    tool = find(argv[0], argv[1:])
    arguments = [read_config(argument).filename if _is_external(argument) else argument for argument in argv[1:]]
    print(f'{tool} ({tool.path})', file=sys.stderr)
    sys.argv = [str(tool.path), *arguments]
    sys.path.insert(0, str(tool.path.parent))  # as Python does for a script; some import their neighbours
    try:
        runpy.run_path(str(tool.path), run_name='__main__')
    except ModuleNotFoundError as error:
        raise ConfigError(f'{tool}: {error}. Install what provides it.') from error


def package_folder(package: str) -> Path | None:
    """Return the folder of an installed package, without importing it, or None."""
    spec = find_spec(package)
    return Path(spec.origin).parent if spec is not None and spec.origin else None


def tools_of(package: str) -> list[Tool]:
    """Return the scripts of a package, those of the top folder first.

    Raises:
        ConfigError: The package is not installed, or came without its tools.
    """
    folder = package_folder(package)
    if folder is None:
        raise ConfigError(f'{package} is not installed.')
    # an editable install has them in the checkout, beside the package
    places = (folder / '.mim/tools', folder.parent / 'tools')
    root = next((place for place in places if (place / 'train.py').exists()), None)
    if root is None:
        raise ConfigError(
            f'{package} came without its tools: neither {places[0]} nor {places[1]} has them. '
            'Install a wheel of it, or run the tool of a checkout.'
        )
    paths = [path.relative_to(root) for path in root.rglob('*.py')]
    paths.sort(key=lambda path: (len(path.parts), path))
    return [
        Tool(package, path.with_suffix('').as_posix(), root / path)
        for path in paths
        if path.name != '__init__.py' and path.parts[0] != 'dev'
    ]


def find(name: str, arguments: Sequence[str] = ()) -> Tool:
    """Return the tool that is meant by ``name``.

    Args:
        name: A file's name or path, with or without ``.py``, with or without ``package:`` before it.
        arguments: Those of the tool. A config among them decides where mmdet and mmseg both have a tool of that name.

    Raises:
        ConfigError: There is no such tool, or there are two and nothing decides.
    """
    package, _, wanted = name.rpartition(':')
    wanted = wanted.removesuffix('.py').removeprefix('tools/')
    if package and package not in PACKAGES:
        raise ConfigError(f'{name}: tools are looked for in {", ".join(PACKAGES)}, not in {package}.')
    tools, problems = [], []
    for each in [package] if package else PACKAGES:
        try:
            tools += tools_of(each)
        except ConfigError as problem:
            problems.append(str(problem))
    if not tools:
        raise ConfigError(' '.join(problems))
    found: dict[str, Tool] = {}
    for tool in tools:
        if f'/{tool.name}'.endswith(f'/{wanted}'):
            found.setdefault(tool.package, tool)
    hosts = [tool for tool in found.values() if tool.package in HOSTS]
    if len(hosts) > 1:
        scope = _scope(arguments)
        hosts = [found[scope]] if scope in found else hosts
    if len(hosts) > 1:
        raise ConfigError(f'{name} is a tool of both packages: say {" or ".join(map(str, hosts))}.')
    if found:
        return hosts[0] if hosts else found['mmgate']
    names = {each: tool.name for tool in tools for each in (osp.basename(tool.name), tool.name)}
    near = [names[match] for match in difflib.get_close_matches(wanted, names, n=3)]
    hint = f' Did you mean {" or ".join(dict.fromkeys(near))}?' if near else ''
    raise ConfigError(' '.join([f'There is no tool {name}.{hint}', *problems]))


def listing() -> str:
    """Return the tools of all packages, with what each says of itself."""
    lines = []
    for package in PACKAGES:
        try:
            tools = tools_of(package)
        except ConfigError as problem:
            lines += [f'{package}', f'  {problem}']
            continue
        lines.append(f'{package} ({tools[0].path.parent})')
        width = max(len(tool.name) for tool in tools)
        lines += [f'  {tool.name:{width}}  {_description(tool.path)}'.rstrip() for tool in tools]
    return '\n'.join(lines)


def _description(path: Path) -> str:
    """Return the first line of a script's docstring, or else of its argument parser's description."""
    tree = ast.parse(path.read_bytes())
    texts = [ast.get_docstring(tree) or '']
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith('ArgumentParser'):
            given = [*node.args, *(keyword.value for keyword in node.keywords if keyword.arg == 'description')]
            texts += [each.value for each in given if isinstance(each, ast.Constant) and isinstance(each.value, str)]
    return next((' '.join(text.strip().splitlines()[0].split()) for text in texts if text.strip()), '')


def _is_external(argument: str) -> bool:
    return '::' in argument and argument.endswith('.py')


def _scope(arguments: Sequence[str]) -> str | None:
    """Return the default scope of the config among ``arguments``."""
    config = next((a for a in arguments if a.endswith('.py') and (_is_external(a) or osp.isfile(a))), None)
    return read_config(config).get('default_scope') if config else None


if __name__ == '__main__':
    sys.exit(main())

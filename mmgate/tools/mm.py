"""Run a script of mmdet or mmseg with mmgate imported: ``python -m mmgate.tools.mm [NAME [ARGUMENTS]]``.

NAME is a file's name (``print_config``) or its path (``analysis_tools/confusion_matrix.py``), and may begin with its
package (``mmseg:browse_dataset``). A tool that both packages have is taken from the one whose config is among the
arguments; configs may be given as ``package::path``. Without a NAME the command lists all tools.
"""

from __future__ import annotations

import os.path as osp
import runpy
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from mmgate.errors import ConfigError
from mmgate.mm import cli
from mmgate.mm.config_file import package_of, read_config

PACKAGES = ('mmdet', 'mmseg', 'mmgate')


def main() -> int:
    """Run the command line of ``python -m mmgate.tools.mm`` and return its exit status."""
    return cli.main(run)


def run(argv: list[str]) -> None:
    """Run a tool of mmdet or mmseg in this process: its name and arguments are in ``argv``; list tools if empty."""
    if not argv:
        for package in PACKAGES:
            print(package, *tools_of(package), sep='\n  ')
    elif argv[0] in ('-h', '--help'):
        print(__doc__)
    else:
        path = find(argv[0], argv[1:])
        print(path, file=sys.stderr)
        sys.argv = [str(path), *(read_config(given).filename if _is_external(given) else given for given in argv[1:])]
        # Python does this for a script, too, and some tools import modules of their folder.
        sys.path.insert(0, str(path.parent))
        runpy.run_path(str(path), run_name='__main__')


def tools_of(package: str) -> dict[str, Path]:
    """Return the tool scripts that an mm package ships, by their path below its folder ``tools``, top folder first.

    The result is empty if the package is not installed, or has come without its tools.
    """
    spec = find_spec(package)
    if spec is None or not spec.origin:
        return {}
    folder = Path(spec.origin).parent
    # An editable install has the tools in the checkout, beside the package.
    root = folder / '.mim/tools' if (folder / '.mim/tools').is_dir() else folder.parent / 'tools'
    paths = [path.relative_to(root) for path in root.rglob('*.py')] if (root / 'train.py').is_file() else []
    return {
        path.with_suffix('').as_posix(): root / path
        for path in sorted(paths, key=lambda path: (len(path.parts), path))
        if path.name != '__init__.py' and path.parts[0] != 'dev'
    }


def find(name: str, arguments: Sequence[str] = ()) -> Path:
    """Return the path of the script that has this tool name.

    Args:
        name: A file's name or path, with or without ``.py``, with or without ``package:`` before it.
        arguments: The tool's arguments. If mmdet and mmseg both have such a tool, a config among them decides.

    Raises:
        ConfigError: There is no such tool, or there are two and no config decides.
    """
    package, _, wanted = name.rpartition(':')
    wanted = wanted.removesuffix('.py').removeprefix('tools/')
    found: dict[str, Path] = {}
    for each in [package] if package else PACKAGES:
        for tool, path in tools_of(each).items():
            if f'/{tool}'.endswith(f'/{wanted}'):
                found.setdefault(each, path)
    if not found:
        where = package or ', '.join(PACKAGES)
        raise ConfigError(f'There is no tool {wanted} in {where}; python tools/mm.py lists them.')
    packages = [each for each in PACKAGES[:2] if each in found]
    if len(packages) == 2:
        config = next((a for a in arguments if a.endswith('.py') and (_is_external(a) or osp.isfile(a))), None)
        scope = package_of(read_config(config)) if config else None
        if scope not in packages:
            raise ConfigError(f'{name} is a tool of both packages: write mmdet:{wanted} or mmseg:{wanted}.')
        return found[scope]
    return found[packages[0] if packages else next(iter(found))]


def _is_external(argument: str) -> bool:
    return '::' in argument and argument.endswith('.py')


if __name__ == '__main__':
    sys.exit(main())

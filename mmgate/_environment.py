"""Whether the mm packages that mmgate plugs into are there and fit to be used."""

from __future__ import annotations

import functools
import importlib
import logging
import os

INSTALL = (
    'mmgate plugs into mmengine, mmcv (with compiled operators) and mmdet or mmseg. Where there are none of '
    'them, type\n    pip install torch==2.13.0 && pip install --no-build-isolation "mmgate[mm]"\n'
    "which compiles mmcv's operators (about 12 minutes on 2 cores). Where the OpenMMLab packages are installed, "
    'repair those instead: the extra "mm" installs maintained forks under the same import names.'
)
HOSTS = ('mmdet', 'mmseg')
EXTRAS = ('mmpretrain',)  # hosts that nothing else needs
MM = ('mmengine', 'mmcv', *HOSTS, *EXTRAS)


def check_environment() -> None:
    """Raise ImportError, once and with everything that is wrong, if mmgate cannot work here.

    One host of the two is enough; one that is there and broken is left out with a warning.

    Raises:
        ImportError: mmengine or mmcv's operators cannot be imported, or neither mmdet nor mmseg can.
    """
    found = [problem for problem in map(why_not, ('mmengine', 'mmcv', 'mmcv.ops')) if problem]
    hosts = {name: why_not(name) for name in (*HOSTS, *EXTRAS)}
    if all(hosts[name] for name in HOSTS):
        found += filter(None, (hosts[name] for name in HOSTS))
    if found:
        raise ImportError('\n'.join(['mmgate cannot be used here:', *(f'  - {line}' for line in found), INSTALL]))
    for name, problem in hosts.items():
        if problem and not problem.endswith(_not_installed(name)):
            log(f'mmgate goes on without {problem}', logging.WARNING)


def torch_alone() -> bool:
    """Return whether mmengine is not installed: there are operators, layers and swaps then, and no configs.

    ``MMGATE_TORCH_ALONE=1`` says so where it is, for processes that need no mm package and shall start quickly.
    """
    asked = os.environ.get('MMGATE_TORCH_ALONE') == '1'
    return asked or why_not('mmengine') == f'mmengine: {_not_installed("mmengine")}'


def available(package: str) -> bool:
    """Return whether ``package`` can be imported and is to be used, see :func:`torch_alone`."""
    return not (package in MM and torch_alone()) and why_not(package) is None


def log(message: str, level: int = logging.INFO) -> None:
    """Say something by mmengine's current logger, or by Python's logger ``mmgate`` where there is no mmengine."""
    if torch_alone():
        logging.getLogger('mmgate').log(level, message)
    else:
        from mmengine.logging import print_log

        print_log(message, logger='current', level=level)


@functools.cache
def why_not(package: str) -> str | None:
    """Return why ``package`` cannot be used, None if it can; of a host its models, without which it imports nothing."""
    module = package
    try:
        importlib.import_module(module)
        if package in HOSTS + EXTRAS:
            module = f'{package}.models'
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        why = ' (mmcv was built without its operators)' if missing == 'mmcv._ext' else ''
        return f'{module}: {_not_installed(missing)}{why}'
    # most often operators compiled against another torch; versions asserted at import; a torchvision of another torch
    except (ImportError, AssertionError, RuntimeError) as error:
        return f'{module}: {error}'
    return None


def _not_installed(module: str) -> str:
    return f'no module named {module!r}'

"""Whether the mm packages that mmgate plugs into are there and fit to be used."""

from __future__ import annotations

import importlib

INSTALL = (
    'mmgate plugs into mmengine, mmcv (with compiled operators) and mmdet or mmseg. Where there are none of '
    'them, type\n    pip install torch==2.13.0 && pip install --no-build-isolation "mmgate[mm]"\n'
    "which compiles mmcv's operators (about 12 minutes on 2 cores). Where the OpenMMLab packages are installed, "
    'repair those instead: the extra "mm" installs maintained forks under the same import names.'
)


def check_environment() -> None:
    """Raise ImportError, once and with everything that is wrong, if mmgate cannot work here.

    Raises:
        ImportError: mmengine or mmcv's operators cannot be imported, or neither mmdet nor mmseg can.
    """
    problems = [_problem(name) for name in ('mmengine', 'mmcv', 'mmcv.ops')]
    hosts = [_problem(name) for name in ('mmdet', 'mmseg')]
    if all(hosts):
        problems += hosts
    found = [problem for problem in problems if problem]
    if found:
        raise ImportError('\n'.join(['mmgate cannot be used here:', *(f'  - {line}' for line in found), INSTALL]))


def _problem(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        missing = error.name or module
        why = ' (mmcv was built without its operators)' if missing == 'mmcv._ext' else ''
        return f'{module}: no module named {missing!r}{why}'
    except ImportError as error:  # most often operators compiled against another torch
        return f'{module}: {error}'
    except AssertionError as error:  # mmdet and mmseg assert the version of mmcv at import
        return f'{module}: {error}'
    return None

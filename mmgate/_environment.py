"""Whether the mm packages that mmgate plugs into are there and fit to be used."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version

INSTALL = (
    'mmgate plugs into mmengine, mmcv (with compiled operators) and mmdet or mmseg. Where there are none of '
    'them, type\n    pip install torch==2.13.0 && pip install --no-build-isolation "mmgate[mm]"\n'
    "which compiles mmcv's operators (about 12 minutes on 2 cores). Where the OpenMMLab packages are installed, "
    'repair those instead: the extra "mm" installs maintained forks under the same import names.'
)
HOSTS = ('mmdet', 'mmseg')
EXTRAS = ('mmpretrain',)  # hosts that nothing else needs
MM = ('mmengine', 'mmcv', *HOSTS, *EXTRAS)
MULTIMODAL = 'mmpretrain.utils.dependency'  # says whether mmpretrain imports its multimodal models


def check_environment() -> None:
    """Raise ImportError, once and with everything that is wrong, if mmgate cannot work here.

    One host of the two is enough; one that is there and broken is left out with a warning, and so is mmpretrain.

    Raises:
        ImportError: mmengine or mmcv's operators cannot be imported, or neither mmdet nor mmseg can.
    """
    found = [problem for problem in map(why_not, ('mmengine', 'mmcv', 'mmcv.ops')) if problem]
    _leave_multimodal_models_out()
    hosts = {}
    for name in (*EXTRAS, *HOSTS):  # the hosts import the extras
        hosts[name] = why_not(name)
        if name in EXTRAS and _is_broken(name, hosts[name]):
            # hosts go on where it is not there; by any other error than an ImportError they would fail with it
            sys.modules.setdefault(f'{name}.models', None)  # type: ignore[arg-type]
    if all(hosts[name] for name in HOSTS):
        found += filter(None, (hosts[name] for name in HOSTS))
    if found:
        raise ImportError('\n'.join(['mmgate cannot be used here:', *(f'  - {line}' for line in found), INSTALL]))
    for name, problem in hosts.items():
        if _is_broken(name, problem):
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
    except Exception as error:  # of a class whose base was to be imported and is None, say
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f'{module}: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})'
    return None


def _leave_multimodal_models_out() -> None:
    """Keep mmpretrain from importing its multimodal models beside a transformers that is too new for them.

    The import would end in a TypeError, and with it that of mmpretrain, mmdet and mmseg.
    """
    try:
        found = version('transformers')
    except PackageNotFoundError:
        return
    if int(found.split('.')[0]) < 5 or 'mmpretrain.models' in sys.modules or why_not(MULTIMODAL):
        return
    sys.modules[MULTIMODAL].WITH_MULTIMODAL = False  # type: ignore[attr-defined]
    log(
        f"mmgate goes on without mmpretrain's multimodal models (BLIP, CLIP, OFA, ...): they need transformers below "
        f'5, and transformers {found} is installed. All else of mmpretrain works.',
        logging.WARNING,
    )


def _is_broken(package: str, problem: str | None) -> bool:
    return problem is not None and not problem.endswith(_not_installed(package))


def _not_installed(module: str) -> str:
    return f'no module named {module!r}'

"""Tell which packages are installed and can be imported."""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
import traceback
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec

CANNOT = (
    'mmgate cannot be used here:\n{}\n'
    'mmgate plugs into mmengine, mmcv and mmdet or mmseg. Where there are none of them, type\n'
    '    pip install torch==2.13.0 && pip install "mmgate[mm]"\n'
    'Where the OpenMMLab packages are installed, repair those instead: the extra "mm" installs maintained forks under '
    'the same import names.'
)
EITHER = ('mmdet', 'mmseg')  # of which one has to be there
EXTRAS = ('mmpretrain',)  # optional packages
MM = ('mmengine', 'mmcv', *EITHER, *EXTRAS)
MULTIMODAL = 'mmpretrain.utils.dependency'  # has the flag by which mmpretrain imports its multimodal models


def check_environment() -> None:
    """Raise ImportError if mmgate cannot work here: without mmengine and mmcv, or with neither mmdet nor mmseg.

    Packages are looked for, and not imported.

    Raises:
        ImportError: Packages are missing; the message lists all.
    """
    missing = [name for name in ('mmengine', 'mmcv') if find_spec(name) is None]
    if not any(find_spec(name) for name in EITHER):
        missing += EITHER
    if missing:
        raise ImportError(CANNOT.format('\n'.join(f'  - {name}: {_not_installed(name)}' for name in missing)))
    _leave_multimodal_models_out()


def check_mmcv() -> None:
    """Import mmcv with its operators.

    Raises:
        ImportError: mmengine, mmcv or ``mmcv.ops`` cannot be imported; the message lists the reasons.
    """
    found = [problem for problem in map(why_not, ('mmengine', 'mmcv', 'mmcv.ops')) if problem]
    if found:
        raise ImportError(CANNOT.format('\n'.join(f'  - {problem}' for problem in found)))


def without_mmengine() -> bool:
    """Return True if mmengine is not installed: then operators, layers and ``swap_attention`` work, but no configs.

    ``MMGATE_TORCH_ALONE=1`` acts as if it were not, for processes that need no mm package and have to start quickly.
    """
    asked = os.environ.get('MMGATE_TORCH_ALONE') == '1'
    return asked or why_not('mmengine') == f'mmengine: {_not_installed("mmengine")}'


def available(package: str) -> bool:
    """Return True if the Python package of this name can be imported, and :func:`without_mmengine` leaves it in."""
    return not (package in MM and without_mmengine()) and why_not(package) is None


def log(message: str, level: int = logging.INFO) -> None:
    """Write a message to mmengine's current logger or, without mmengine, to Python's logger named ``mmgate``."""
    if without_mmengine():
        logging.getLogger('mmgate').log(level, message)
    else:
        from mmengine.logging import print_log

        print_log(message, logger='current', level=level)


@functools.cache
def why_not(package: str) -> str | None:
    """Return the reason why a package (of an mm package, also its ``models``) cannot be imported, or None if it can."""
    module = package
    try:
        importlib.import_module(module)
        if package in EITHER + EXTRAS:
            module = f'{package}.models'
            importlib.import_module(module)
    except ModuleNotFoundError as error:
        return f'{module}: {_not_installed(error.name or module)}'
    # Causes are operators or a torchvision for another torch, and versions that are asserted at import.
    except (ImportError, AssertionError, RuntimeError) as error:
        return f'{module}: {error}'
    except Exception as error:  # for example, a base class could not be imported and is None
        place = traceback.extract_tb(error.__traceback__)[-1]
        return f'{module}: {type(error).__name__}: {error} ({place.filename}, line {place.lineno})'
    return None


def _leave_multimodal_models_out() -> None:
    """Keep mmpretrain from importing its multimodal models if the installed transformers is too new for them.

    The import would raise a TypeError, so that mmpretrain, mmdet and mmseg could not be imported either.
    """
    try:
        found = version('transformers')
    except PackageNotFoundError:
        return
    if int(found.split('.')[0]) < 5 or 'mmpretrain.models' in sys.modules or find_spec('mmpretrain') is None:
        return
    if why_not(MULTIMODAL):
        return
    sys.modules[MULTIMODAL].WITH_MULTIMODAL = False  # type: ignore[attr-defined]
    log(
        f"mmgate goes on without mmpretrain's multimodal models (BLIP, CLIP, OFA, ...): they need transformers below "
        f'5, and transformers {found} is installed. All else of mmpretrain works.',
        logging.WARNING,
    )


def _not_installed(module: str) -> str:
    return f'no module named {module!r}'

"""mmcv's compiled operators to compare ours with, and processes in which they are hidden."""

from __future__ import annotations

from types import ModuleType

import pytest

from mmgate import mmcv_ext

# At the start of a script: mmcv._ext is not found, as where mmcv was installed without it.
HIDDEN = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == 'mmcv._ext' else find(name, *rest))
"""


def compiled() -> ModuleType:
    """Return mmcv's compiled module, or skip the test where there is none."""
    module = pytest.importorskip('mmcv._ext')
    if mmcv_ext.provided():
        pytest.skip('mmcv has no compiled operators here')
    return module

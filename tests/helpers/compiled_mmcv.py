"""mmcv's compiled operators to compare ours with, and processes in which they are hidden."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import TypeVar

import pytest

from mmgate import mmcv_ext

# At the start of a script: mmcv._ext is not found, as where mmcv was installed without it.
HIDDEN = """
from importlib.machinery import PathFinder
find = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name == 'mmcv._ext' else find(name, *rest))
"""
Result = TypeVar('Result')


def compiled() -> ModuleType:
    """Return mmcv's compiled module, or skip the test where there is none."""
    module = pytest.importorskip('mmcv._ext')
    if mmcv_ext.provided():
        pytest.skip('mmcv has no compiled operators here')
    return module


def by_both(monkeypatch: pytest.MonkeyPatch, wrapper: str, compute: Callable[[], Result]) -> tuple[Result, Result]:
    """Return what ``compute`` returns with mmcv's compiled operators in a module of ``mmcv.ops``, then with ours."""
    compiled()
    from mmgate.mmcv_ext import extension

    expected = compute()
    monkeypatch.setattr(importlib.import_module(f'mmcv.ops.{wrapper}'), 'ext_module', extension)
    return compute(), expected

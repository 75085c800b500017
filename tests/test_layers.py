"""Imports that mmgate 0.2 documented work until 0.4, with a warning."""

from __future__ import annotations

import importlib
import sys

import pytest

import mmgate
from mmgate import gates


def test_former_names_are_the_same_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name == 'mmgate.layers' or name.startswith('mmgate.layers.')]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.warns(FutureWarning, match='mmgate.layers is mmgate.gates now'):
        former = importlib.import_module('mmgate.layers')
    assert former.MultiScaleDeformableAttention is gates.MultiScaleDeformableAttention
    assert importlib.import_module('mmgate.layers.base.dense').DenseGate is mmgate.DenseGate
    assert importlib.import_module('mmgate.layers.base.gated').GatedModule is mmgate.Adapter
    assert importlib.import_module('mmgate.layers.base.dense').DenseHost is mmgate.DenseAdapter
    with pytest.raises(ModuleNotFoundError, match='mmgate.layers.plug'):
        importlib.import_module('mmgate.layers.plug')

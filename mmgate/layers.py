"""Former name of :mod:`mmgate.gates` and of the modules in it, for imports that mmgate 0.2 documented; goes in 0.4."""

import sys
import warnings
from typing import Any

from mmgate import gate, gates, gating
from mmgate.gates.base import deformable, dense, map

warnings.warn('mmgate.layers is mmgate.gates now, and goes in 0.4.', FutureWarning, stacklevel=2)
_BASE = {'gate': gate, 'dense': dense, 'deformable': deformable, 'map': map, 'gated': gating}
sys.modules.update({f'{__name__}.base.{name}': module for name, module in _BASE.items()})
sys.modules[f'{__name__}.base'] = gates.base
_ADAPTERS = {
    'gated': ('GatedModule', gating.Adapter),
    'dense': ('DenseHost', dense.DenseAdapter),
    'deformable': ('DeformableHost', deformable.DeformableAdapter),
    'map': ('MapHost', map.MapAdapter),
}
for module, (name, adapter) in _ADAPTERS.items():
    setattr(_BASE[module], name, adapter)
# Imports of modules inside look for them here.
__path__: list[str] = []


def __getattr__(name: str) -> Any:
    return getattr(gates, name)

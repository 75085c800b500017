"""PVT, PVTv2 and Swin with the attention that a config names, and FLatten-Swin's blocks."""

from __future__ import annotations

from mmgate import MODELS
from mmgate.backbones import PVT, PVTv2, Swin


@MODELS.register_module(force=True)
class LinearPVT(PVT):
    """Backbone PVT with the attention that ``attention`` names, or its own; arguments as :class:`mmgate.backbones.PVT`.

    Any attention over a map may be named, also :class:`mmgate.gates.AgentAttention`.
    """


@MODELS.register_module(force=True)
class LinearPVTv2(PVTv2):
    """Backbone PVTv2 with the attention that ``attention`` names, or its own."""


@MODELS.register_module(force=True)
class LinearSwin(Swin):
    """Backbone Swin with the attention that ``attention`` names in stages 1 and 2, as in FLatten-Swin.

    Arguments as :class:`mmgate.backbones.Swin`; by default every block has Swin's own windows.
    """

    swapped_blocks = {arch: (2, 2, 0, 0) for arch in ('tiny', 'small', 'base')}

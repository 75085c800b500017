"""Starts that a host does not overwrite.

mmdet and mmseg initialise by what a parameter looks like: detectors and Mask2Former draw everything of two dimensions
or more from xavier's distribution, PVT and Swin every ``nn.Linear`` from a narrow normal one, PVT every ``nn.Conv2d``
by its fan-out. What starts otherwise says so as an :class:`OwnStart`, and :func:`keep_starts` gives it the last word.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn


class OwnStart:
    """Base, before ``nn.Module``, of a module some of whose parameters have a start of their own.

    Attributes:
        own: Names of those parameters, or of the children that hold them.
        start_loaded: Whether a state dict has filled any of them; then no initialisation draws them anew.
    """

    own: tuple[str, ...] = ()
    start_loaded = False

    def reset_start(self) -> None:
        """Draw the parameters in ``own`` anew."""
        raise TypeError(f'{type(self).__name__} says nothing about its start.')

    def init_weights(self) -> None:
        """Set the start unless a state dict has set it; mmengine's recursion calls this."""
        if not self.start_loaded:
            self.reset_start()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = tuple(f'{prefix}{name}' for name in self.own)
        if any(key in own or key.startswith(tuple(f'{name}.' for name in own)) for key in state_dict):
            self.start_loaded = True
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


def keep_starts(model: nn.Module) -> None:
    """Let ``model.init_weights()`` end with the start of every :class:`OwnStart` in ``model``.

    Hosts run their pass over all parameters after the ``init_weights`` of their children, so that nothing inside a
    model comes last; hence an attribute of this one model, which copies and pickles with it. Swapping attention calls
    this.
    """
    if hasattr(model, 'init_weights') and 'init_weights' not in vars(model):
        vars(model)['init_weights'] = partial(_init_weights, model)


def _init_weights(model: Any) -> None:
    type(model).init_weights(model)
    for module in model.modules():
        if isinstance(module, OwnStart) and not module.start_loaded:
            module.reset_start()

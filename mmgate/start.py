"""Initialise gated models so that all but the gates gets the vanilla model's values, bit for bit.

Gates are drawn from separate random streams.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from mmgate.adapter import Adapter, gated_modules
from mmgate.gate import gates_hidden, initialise_gate


def wrap_init_weights(model: nn.Module) -> None:
    """Change ``model.init_weights`` in place: it initialises the vanilla model first, and then the gates.

    Under one seed every parameter that the two models share gets the same numbers bit for bit, and the global random
    generators continue as they do in the vanilla model.

    Models draw in passes over all of their parameters, from which the gates are hidden meanwhile. The method becomes an
    attribute of this model, which copies and pickles take along. A model whose ``init_weights`` draws the parameters of
    its parts itself, as DETR's does, has to be swapped as a whole, not just its encoder.
    """
    own = vars(model).get('init_weights')
    if hasattr(model, 'init_weights') and getattr(own, 'func', None) is not _init_weights:
        vars(model)['init_weights'] = partial(_init_weights, model, own)


def unwrap_init_weights(model: nn.Module) -> None:
    """Give a model the ``init_weights`` that it had before :func:`wrap_init_weights`."""
    planted: Any = vars(model).get('init_weights')
    if getattr(planted, 'func', None) is _init_weights:
        own = planted.args[1]
        if own is None:
            del vars(model)['init_weights']
        else:
            vars(model)['init_weights'] = own


def _init_weights(model: Any, own: Any, *args: Any, **kwargs: Any) -> None:
    """Initialise the vanilla model by its ``init_weights``, which may take arguments, then the gates."""
    again = getattr(model, 'is_init', False)
    initialise = partial(type(model).init_weights, model) if own is None else own
    with gates_hidden():
        initialise(*args, **kwargs)
    # mmengine initialises a model once, and further calls draw nothing.
    if again:
        return
    for _, module in gated_modules(model):
        initialise_again(module)
    # A gates file may also hold parameters of the host, which has just drawn them anew.
    if 'after_init_weights' in vars(model):
        vars(model)['after_init_weights']()


def initialise_again(module: Adapter) -> None:
    """Initialise the gates of a gated module that no state dict has filled, from the streams that they had at first."""
    for gate in module.gates():
        initialise_gate(gate.stream, gate)

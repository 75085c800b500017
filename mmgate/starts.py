"""Starts of gated models: shared parameters as in the vanilla partner, gates from random streams of their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from mmgate.layers.base.gate import INITIALISERS, Gate, draw_gate
from mmgate.layers.base.gated import gated_modules, is_on, switch_off, switch_on, switched_off

REPORT = '_params_init_info'  # by parameter, what mmengine logs of its start


def initialise_gates_last(model: nn.Module) -> None:
    """Let ``model.init_weights()`` initialise the vanilla model and then draw the gates.

    Under one seed every parameter that the two models share gets the same numbers bit for bit, and the global random
    numbers go on as they do in the vanilla model. Hosts draw in passes over all of their parameters, so that this has
    to surround them: it is an attribute of this one model, which copies and pickles with it. So is ``apply``, through
    which the ``init_cfg`` of a model around this one reaches in. A model whose ``init_weights`` goes through the
    parameters of its parts by itself, as DETR's does, has to be the one that is swapped, not its encoder alone.
    """
    if hasattr(model, 'init_weights'):
        vars(model).setdefault('init_weights', partial(_init_weights, model))
    vars(model).setdefault('apply', partial(_apply, model))


def own_gated_modules(model: nn.Module) -> list[Any]:
    """Return the modules that rules for ``model`` have gated, not those for a model inside it, where they still are."""
    return [module for name, module in gated_modules(model) if module.gating.name == name]


@contextmanager
def gates_in_place(model: nn.Module) -> Iterator[None]:
    """Switch the gates of a model whose host initialises on, so that a checkpoint of theirs fills them."""
    modules = [module for module in own_gated_modules(model) if not is_on(module)]
    for module in modules:
        switch_on(module)
    try:
        yield
    finally:
        for module in modules:
            switch_off(module)


def _init_weights(model: Any) -> None:
    modules = own_gated_modules(model)
    again = getattr(model, 'is_init', False)
    with _vanilla(model, modules):
        type(model).init_weights(model)
    for module in () if again else modules:  # mmengine initialises once
        draw_gates(f'{_place(model)}{module.gating.name}', module)
    if not again and 'after_init_weights' in vars(model):  # a file of gates also filled what the host has just drawn
        vars(model)['after_init_weights']()


def draw_gates(name: str, module: Any) -> None:
    """Draw the gates of a gated module called ``name``, those that no state dict has filled."""
    for inner, part in module.gate.named_modules():
        if isinstance(part, Gate):
            draw_gate(f'{name}.{inner}', part)


def _apply(model: Any, function: Callable[[nn.Module], None]) -> nn.Module:
    initialises = REPORT in vars(model) or getattr(function, '__module__', '') == INITIALISERS
    modules = own_gated_modules(model) if initialises else []
    with _vanilla(model, modules):
        return type(model).apply(model, function)


def _place(model: nn.Module) -> str:
    """Return what tells the names in ``model`` from those in its twin, where a model around them initialises both."""
    first = next(model.parameters(), None)
    number = next((i for i, parameter in enumerate(vars(model).get(REPORT, ())) if parameter is first), 0)
    return f'{number}.' if number else ''


@contextmanager
def _vanilla(model: nn.Module, modules: Sequence[Any]) -> Iterator[None]:
    """Let modules be vanilla while their host initialises; a checkpoint that it loads meanwhile finds the gates."""
    with ExitStack() as undo:
        undo.enter_context(switched_off(*modules))
        for module in modules:
            undo.enter_context(_reported(model, module))
        holders: dict[int, tuple[nn.Module, list[Any]]] = {}
        for module in modules:
            holder = model.get_submodule(module.gating.name.rpartition('.')[0])
            holders.setdefault(id(holder), (holder, []))[1].append(module)
        for holder, inside in holders.values():
            undo.callback(holder._register_load_state_dict_pre_hook(partial(_each, switch_on, inside)).remove)
            undo.callback(holder.register_load_state_dict_post_hook(partial(_each, switch_off, inside)).remove)
        yield


def _each(switch: Callable[[Any], None], modules: Sequence[Any], *_: Any) -> None:
    for module in modules:
        switch(module)


@contextmanager
def _reported(model: nn.Module, vanilla: nn.Module) -> Iterator[None]:
    """Enter a vanilla module into the report that mmengine keeps of an initialisation in progress around ``model``."""
    report = vars(model).get(REPORT)
    if report is None:
        yield
        return
    for parameter in vanilla.parameters():
        report.setdefault(parameter, dict(init_info='', tmp_mean_value=parameter.data.mean().cpu()))
    entered = [module for module in vanilla.modules() if REPORT not in vars(module)]  # left out while it was gated
    for module in entered:
        vars(module)[REPORT] = report
    try:
        yield
    finally:
        for module in entered:
            del vars(module)[REPORT]

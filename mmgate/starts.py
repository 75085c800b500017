"""Initialise gated models so that all but the gates gets the vanilla model's values, bit for bit.

Gates are drawn from separate random streams.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from torch import nn

from mmgate.layers.base.gate import INITIALISERS, Gate, draw_gate
from mmgate.layers.base.gated import GatedModule, gated_modules, is_on, switch_off, switch_on, switched_off

# Attribute in which mmengine keeps, by parameter, the text that it logs of an initialisation.
REPORT = '_params_init_info'
# Attribute of a model with the modules that rules for it have gated.
GATED = 'gated_by_rules'


def initialise_gates_last(model: nn.Module) -> None:
    """Change ``model.init_weights`` in place: it initialises the vanilla model first, and then the gates.

    Under one seed every parameter that the two models share gets the same numbers bit for bit, and the global random
    generators continue as they do in the vanilla model.

    Hosts draw in passes over all of their parameters, in ``init_weights`` and, for the ``init_cfg`` of a model around
    this one, in ``apply``. The two methods become attributes of this model, which copies and pickles take along. A
    model whose ``init_weights`` draws the parameters of its parts itself, as DETR's does, has to be swapped as a whole,
    not just its encoder.
    """
    if hasattr(model, 'init_weights'):
        vars(model).setdefault('init_weights', partial(_init_weights, model))
    vars(model).setdefault('apply', partial(_apply, model))


def forget_initialisation(model: nn.Module) -> None:
    """Give a model the methods of its class again; methods that somebody else put there stay."""
    for name, ours in (('init_weights', _init_weights), ('apply', _apply)):
        if getattr(vars(model).get(name), 'func', None) is ours:
            del vars(model)[name]


def own_gated_modules(model: nn.Module) -> list[Any]:
    """Return the modules gated by rules for this model, without those gated by rules for a model inside it."""
    noted = {id(record) for record in vars(model).get(GATED, ())}
    return [module for _, module in gated_modules(model) if id(module.gating) in noted]


def note_gated(model: nn.Module, module: Any) -> None:
    """Note that a rule for this model has gated a module.

    It is noted by its record, as wrappers may rename the module, and another model's rule may gate it later.
    """
    vars(model).setdefault(GATED, []).append(module.gating)


@contextmanager
def gates_in_place(model: nn.Module) -> Iterator[None]:
    """Switch a model's gates on inside a ``with`` block, during an initialisation that has switched them off.

    A gated checkpoint that is loaded in the context fills the gates, too.
    """
    modules = [module for module in own_gated_modules(model) if not is_on(module)]
    for module in modules:
        switch_on(module)
    try:
        yield
    finally:
        for module in modules:
            switch_off(module)


def _init_weights(model: Any, *args: Any, **kwargs: Any) -> None:
    """Initialise the vanilla model by its class's ``init_weights``, which may take arguments, then the gates."""
    modules = own_gated_modules(model)
    again = getattr(model, 'is_init', False)
    with _vanilla(model, modules):
        type(model).init_weights(model, *args, **kwargs)
    # mmengine initialises a model once, and further calls draw nothing.
    if again:
        return
    for module in modules:
        draw_gates(f'{_place(model)}{module.gating.name}', module)
    # A gates file may also hold parameters of the host, which has just drawn them anew.
    if 'after_init_weights' in vars(model):
        vars(model)['after_init_weights']()


def draw_gates(name: str, module: GatedModule) -> None:
    """Initialise the gates of a gated module that no state dict has filled, from streams that depend on its name."""
    for inner, part in module.gate.named_modules():
        if isinstance(part, Gate):
            draw_gate(f'{name}.{inner}', part)


def _apply(model: Any, function: Callable[[nn.Module], None]) -> nn.Module:
    """Apply a function to all modules, as ``Module.apply``; an initialiser sees them without their gates."""
    initialises = REPORT in vars(model) or getattr(function, '__module__', '') == INITIALISERS
    modules = own_gated_modules(model) if initialises else []
    with _vanilla(model, modules):
        return type(model).apply(model, function)


def _place(model: nn.Module) -> str:
    """Return a prefix for a model's gate names that differs between models which are initialised together.

    A model around both initialises them, such as a teacher and a student.
    """
    first = next(model.parameters(), None)
    number = next((i for i, parameter in enumerate(vars(model).get(REPORT, ())) if parameter is first), 0)
    return f'{number}.' if number else ''


@contextmanager
def _vanilla(model: nn.Module, modules: Sequence[Any]) -> Iterator[None]:
    """Switch gates off inside a ``with`` block for initialisation, except while a checkpoint is loaded."""
    with ExitStack() as undo:
        undo.enter_context(switched_off(*modules))
        for module in modules:
            undo.enter_context(_reported(model, module))
        holders: dict[int, tuple[nn.Module, list[Any]]] = {}
        around: dict[int, nn.Module] = {}
        for parent in model.modules():
            for child in parent.children():
                around.setdefault(id(child), parent)
        for module in modules:
            holder = around[id(module)]
            _, inside = holders.setdefault(id(holder), (holder, []))
            inside.append(module)
        for holder, inside in holders.values():
            before = holder._register_load_state_dict_pre_hook(partial(_each, switch_on, inside))
            undo.callback(before.remove)
            after = holder.register_load_state_dict_post_hook(partial(_each, switch_off, inside))
            undo.callback(after.remove)
        yield


def _each(switch: Callable[[Any], None], modules: Sequence[Any], *_: object) -> None:
    """Apply a switch (on or off) to all modules; a hook, so that further arguments are ignored."""
    for module in modules:
        switch(module)


@contextmanager
def _reported(model: nn.Module, vanilla: nn.Module) -> Iterator[None]:
    """Add a vanilla module's parameters to mmengine's report on how a model was initialised."""
    report = vars(model).get(REPORT)
    if report is None:
        yield
        return
    for parameter in vanilla.parameters():
        report.setdefault(parameter, dict(init_info='', tmp_mean_value=parameter.data.mean().cpu()))
    # Parts that a gated module leaves out were not in the model when mmengine began its report.
    entered = [module for module in vanilla.modules() if REPORT not in vars(module)]
    for module in entered:
        vars(module)[REPORT] = report
    try:
        yield
    finally:
        for module in entered:
            del vars(module)[REPORT]

"""How a gated model is initialised: as its vanilla partner, and gates from random numbers of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import nn

from mmgate.errors import ConfigError
from mmgate.layers.base.init import GateInit, random_stream

INITIALISERS = 'mmengine.model.weight_init'  # whose functions an init_cfg applies to every module
REPORT = '_params_init_info'  # by parameter, what mmengine logs of its start


@dataclass
class Swap:
    """A module of a host model and the gate in its place, which hold the same parameters.

    Attributes:
        name: Where they stand in the model.
        vanilla: The host's module.
        gate: Ours.
        shared: Names of the tensors that both hold, first the host's.
    """

    name: str
    vanilla: nn.Module
    gate: nn.Module
    shared: list[tuple[str, str]] = field(init=False)

    def __post_init__(self) -> None:
        ours = {id(tensor): name for name, tensor in _tensors(self.gate)}
        self.shared = [(name, ours[id(tensor)]) for name, tensor in _tensors(self.vanilla) if id(tensor) in ours]

    def put(self, model: nn.Module, module: nn.Module) -> None:
        """Let ``module`` stand in the model."""
        setattr(self.holder(model), self.name.rpartition('.')[2], module)

    @contextmanager
    def disabled(self, model: nn.Module) -> Iterator[None]:
        """Let the host's module compute for a while; a mode that it is given meanwhile is the gate's, too."""
        self.put_vanilla(model)
        before = self.vanilla.training
        try:
            yield
        finally:
            if self.vanilla.training != before:
                self.gate.train(self.vanilla.training)
            self.put_gate(model)

    def put_vanilla(self, model: nn.Module) -> None:
        """Let the host's module stand there, with what it shares with the gate as it is now, and in the gate's mode."""
        self.follow()
        self.vanilla.train(self.gate.training)  # some return nothing
        self.put(model, self.vanilla)

    def put_gate(self, model: nn.Module) -> None:
        """Let the gate stand there, with the tensors that the host's initialisation may have put in those places."""
        self.put(model, self.gate)
        _hand_over(self.vanilla, self.gate, self.shared)

    def stands(self, model: nn.Module) -> bool:
        """Return whether the gate is still where it was put; someone may have wrapped, moved or removed it."""
        module: Any = model
        for part in self.name.split('.'):
            module = getattr(module, '_modules', {}).get(part)
        return module is self.gate

    def holder(self, model: nn.Module) -> nn.Module:
        """Return the module in which they stand."""
        return model.get_submodule(self.name.rpartition('.')[0])

    def follow(self) -> None:
        """Give the host's module the gate's device, dtype and shared tensors, which may have changed since."""
        like = next(self.gate.parameters())
        shared = dict(self.shared)
        if not like.is_meta and any(t.is_meta for name, t in _tensors(self.vanilla) if name not in shared):
            self.vanilla.to_empty(device=like.device)
        _hand_over(self.gate, self.vanilla, [(ours, theirs) for theirs, ours in self.shared])
        for name, tensor in _tensors(self.vanilla):
            if name not in shared:
                tensor.data = tensor.data.to(like.device, like.dtype if tensor.is_floating_point() else tensor.dtype)


def init_gate(name: str, gate: nn.Module) -> None:
    """Draw the parameters of a gate called ``name`` from a stream of their own, unless a state dict filled them."""
    device = next((parameter.device for parameter in gate.parameters()), None)
    for inner, module in gate.named_modules():
        if isinstance(module, GateInit) and not module.gate_loaded:
            with random_stream(f'{name}.{inner}', device):
                module.reset_gate()


def initialise_gates_last(model: nn.Module, swaps: Sequence[Swap]) -> None:
    """Let ``model.init_weights()`` initialise the vanilla model and then start the gates.

    Under one seed every parameter that the two models share gets the same numbers bit for bit, and the global random
    numbers go on as they do in the vanilla model. Hosts draw in passes over all of their parameters, so that this has
    to surround them: it is an attribute of this one model, which copies and pickles with it. So is ``apply``, through
    which the ``init_cfg`` of a model around this one reaches in. A model whose ``init_weights`` goes through the
    parameters of its parts by itself, as DETR's does, has to be the one that is swapped, not its encoder alone.

    Args:
        model: With the gates in place.
        swaps: What was replaced, after what was replaced before.
    """
    vars(model).setdefault('attention_swaps', []).extend(swaps)
    if hasattr(model, 'init_weights'):
        vars(model).setdefault('init_weights', partial(_init_weights, model))
    vars(model).setdefault('apply', partial(_apply, model))


@contextmanager
def gates_in_place(model: nn.Module) -> Iterator[None]:
    """Put the gates back into a model whose host initialises, so that a checkpoint of theirs fills them."""
    swaps = [swap for swap in vars(model).get('attention_swaps', []) if model.get_submodule(swap.name) is swap.vanilla]
    _put_gates(model, swaps)
    try:
        yield
    finally:
        _put_vanilla(model, swaps)


def _init_weights(model: Any) -> None:
    swaps, again = standing_swaps(model), getattr(model, 'is_init', False)
    with _vanilla_in_place(model, swaps):
        type(model).init_weights(model)
    for swap in () if again else swaps:  # mmengine initialises once
        init_gate(f'{_place(model)}{swap.name}', swap.gate)
    if not again and 'after_init_weights' in vars(model):  # a file of gates also filled what the host has just drawn
        vars(model)['after_init_weights']()


def _apply(model: Any, function: Callable[[nn.Module], None]) -> nn.Module:
    initialises = REPORT in vars(model) or getattr(function, '__module__', '') == INITIALISERS
    swaps = standing_swaps(model) if initialises else []
    with _vanilla_in_place(model, swaps):
        return type(model).apply(model, function)


def _place(model: nn.Module) -> str:
    """Return what tells the names in ``model`` from those in its twin, where a model around them initialises both."""
    first = next(model.parameters(), None)
    number = next((i for i, parameter in enumerate(vars(model).get(REPORT, ())) if parameter is first), 0)
    return f'{number}.' if number else ''


def standing_swaps(model: nn.Module) -> list[Swap]:
    """Return the swaps of a model, not of those inside, whose gates still stand where they were put."""
    return [swap for swap in vars(model).get('attention_swaps', []) if swap.stands(model)]


@contextmanager
def _vanilla_in_place(model: nn.Module, swaps: Sequence[Swap]) -> Iterator[None]:
    with ExitStack() as undo:
        for swap in swaps:
            swap.follow()
            undo.callback(swap.put_gate, model)
            swap.put(model, swap.vanilla)
            undo.enter_context(_reported(model, swap.vanilla))
        holders = {id(holder): holder for holder in (swap.holder(model) for swap in swaps)}
        for holder in holders.values():  # checkpoints that the host's initialisation loads find the gates
            inside = [swap for swap in swaps if swap.holder(model) is holder]
            undo.callback(holder._register_load_state_dict_pre_hook(partial(_put_gates, model, inside)).remove)
            undo.callback(holder.register_load_state_dict_post_hook(partial(_put_vanilla, model, inside)).remove)
        yield


def _put_gates(model: nn.Module, swaps: Sequence[Swap], *_: Any) -> None:
    for swap in swaps:
        swap.put_gate(model)


def _put_vanilla(model: nn.Module, swaps: Sequence[Swap], *_: Any) -> None:
    for swap in swaps:
        swap.put(model, swap.vanilla)


@contextmanager
def _reported(model: nn.Module, vanilla: nn.Module) -> Iterator[None]:
    """Enter a vanilla module into the report that mmengine keeps of an initialisation in progress around ``model``."""
    report = vars(model).get(REPORT)
    if report is None:
        yield
        return
    for parameter in vanilla.parameters():
        report.setdefault(parameter, dict(init_info='', tmp_mean_value=parameter.data.mean().cpu()))
    entered = [module for module in vanilla.modules() if REPORT not in vars(module)]  # others are the gate's, too
    for module in entered:
        vars(module)[REPORT] = report
    try:
        yield
    finally:
        for module in entered:
            del vars(module)[REPORT]


def _tensors(module: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from module.named_parameters(remove_duplicate=False)
    yield from module.named_buffers(remove_duplicate=False)


def _hand_over(source: nn.Module, target: nn.Module, names: Sequence[tuple[str, str]]) -> None:
    """Set tensors of ``source`` in ``target``; ``names`` are pairs of the name there and here."""
    tensors = dict(_tensors(source))
    for name, other in names:
        if name not in tensors:
            raise ConfigError(
                f'{name} of {type(source).__name__} is gone, which {type(target).__name__} held as {other}; '
                'initialise, save or restore before parameters are wrapped or parametrized, or take that off first '
                '(torch.nn.utils.parametrize.remove_parametrizations).'
            )
        parent, _, leaf = other.rpartition('.')
        holder = target.get_submodule(parent)
        if getattr(holder, leaf) is not tensors[name]:
            setattr(holder, leaf, tensors[name])

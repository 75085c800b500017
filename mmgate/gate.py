"""Base class of gates (child modules that an attention receives), what their classes declare, and initial values.

mmdet and mmseg initialise by the shape of a parameter: detectors and Mask2Former draw everything of two dimensions or
more from xavier's distribution, PVT and Swin every ``nn.Linear`` from a narrow normal one. A gate in the model would
be drawn by them and would shift the random numbers of all that follows, so that a gated model could not be compared
with its vanilla partner. :func:`~mmgate.swap.swap_attention` therefore hides the gates from the model's initialisation
and then draws every :class:`Gate` from a random stream of the gate's name.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.former import OF_GATES, refuse_former
from mmgate.registry import MODELS
from mmgate.wrappers import name_in_states

# The attribute of a gated module that is its gate.
GATE_NAME = 'gate'

StateDict = dict[str, Tensor]
_of_thread = threading.local()


@dataclass(frozen=True)
class Sizes:
    """Sizes of an attention module, such as channels and heads, from which a gate for it is made.

    Attributes:
        channels: Channels C of all heads together.
        heads: Heads H.
        inputs: Channels of the query, key and value inputs; C each by default.
        output: Channels of the output; C by default.
        dropout: Probability of dropping an attention weight.
        scale: Factor of the logits; ``1 / sqrt(d)`` by default.
        bias: True if the host's projections of query, key and value have a bias.
        levels: Feature levels L of deformable attention.
        points: Sampling points P of a head and level, of deformable attention; one number for each level if they
            differ.
        query_width: Channels of a query and of a key in one head; d by default.
        why_whole_heads: Why a gate may neither split heads nor add queries, the end of a message; empty if it may.
        why_no_gate: Why no gate fits, but only attention without a gate, with which the host is recorded: a whole
            message; empty if gates do.
        over_channels: True if the channels of a head attend to each other, not the tokens.
        shifted: True if the host shifts its windows over the map.
        host_map: Height and width of the map that the host sees at the image size which the model around it keeps;
            None if it keeps none.
        stride: Pixels of an image, along a side, for each token of the map; None if the model does not tell.
        class_tokens: Number of tokens before the map's: a class token, registers.
    """

    channels: int
    heads: int
    inputs: tuple[int, int, int] | None = None
    output: int | None = None
    dropout: float = 0.0
    scale: float | None = None
    bias: bool = True
    levels: int = 1
    points: int | tuple[int, ...] = 1
    query_width: int | None = None
    why_whole_heads: str = ''
    why_no_gate: str = ''
    over_channels: bool = False
    shifted: bool = False
    host_map: tuple[int, int] | None = None
    stride: int | None = None
    class_tokens: int = 0

    @property
    def head_dim(self) -> int:
        """Number of channels d of one head."""
        return self.channels // self.heads

    @property
    def input_widths(self) -> tuple[int, int, int]:
        """Number of channels of the query, key and value inputs before projection."""
        return self.inputs or (self.channels, self.channels, self.channels)

    @property
    def output_width(self) -> int:
        """Number of channels of the output."""
        return self.channels if self.output is None else self.output


class Gate(nn.Module):
    """Base class of all gates: modules that hold the parameters that an attention gains, and no others.

    A subclass takes :class:`Sizes` and keyword-only options; a rule may set these options and nothing else. There
    are three kinds, each a base class with the one method that acts: ``modulate`` of
    :class:`~mmgate.gates.base.deformable.DeformableGate`, ``attend`` of :class:`~mmgate.gates.base.dense.DenseGate` and
    ``mix`` of :class:`~mmgate.gates.base.map.MapGate`. Without another method each computes attention without a gate.
    A package may add a kind: a subclass of this class, whose method its own adapters call. Figures show
    what the method hands to :func:`mmgate.note`.

    Args:
        sizes: Sizes of the host's attention.

    Raises:
        ConfigError: The channels are no multiple of the heads.

    Attributes:
        undecayed: Names of the parameters, or of the children with parameters, without weight decay: scalars, norms,
            position terms, biases of logits, and biases that hold the gate's start. Linear layers and convolutions
            decay, weight and bias, as the host's do.
        identity_start: True if, by default, the gated attention computes at first what the vanilla one does.
        backend: Backend of the operator that is asked for.
        loaded: True once a state dict has filled any parameter of the gate. No initialisation then draws it anew.
        stream: Name of the random stream that the gate was last drawn from.
    """

    undecayed: tuple[str, ...] = ()
    identity_start = False
    backend = 'auto'
    loaded = False
    stream = ''

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        refuse_former(cls, OF_GATES)

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        if sizes.channels % sizes.heads:
            raise ConfigError(f'embed_dims={sizes.channels} is not a multiple of num_heads={sizes.heads}.')
        self.embed_dims = sizes.channels
        self.num_heads = sizes.heads
        self.head_dim = sizes.head_dim
        self.dropout = sizes.dropout

    def reset(self) -> None:
        """Initialise the gate's parameters; every subclass with parameters overrides this."""
        if any(True for _ in self.parameters()):
            raise TypeError(f'{type(self).__name__} does not say how its gate starts: write its method reset.')

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield the gate and its children as ``Module.named_modules`` does; nothing while gates are hidden."""
        if not are_hidden():
            yield from super().named_modules(*args, **kwargs)

    def _apply(self, *args: Any, **kwargs: Any) -> Gate:
        """Draw the gate once ``to_empty`` has given it memory in place of the device ``meta``."""
        before = any(parameter.is_meta for parameter in self.parameters())
        super()._apply(*args, **kwargs)
        if before and not any(parameter.is_meta for parameter in self.parameters()):
            initialise_gate(self.stream, self)
        return self

    def split_heads(self, x: Tensor) -> Tensor:
        """Split the channels of tokens ``(B, N, H * d)`` into heads ``(B, H, N, d)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def merge_heads(self, x: Tensor) -> Tensor:
        """Merge heads ``(B, H, N, d)`` into tokens ``(B, N, H * d)``."""
        return x.transpose(1, 2).flatten(2)

    @property
    def drop_rate(self) -> float:
        """The probability of dropping an attention weight; 0 in eval mode."""
        return self.dropout if self.training else 0.0

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        if any(key.startswith(prefix) for key in state_dict):
            self.loaded = True
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def refuse_to_split(sizes: Sizes, how: str) -> None:
    """Raise ConfigError for a gate that splits heads or adds queries, if its host needs whole heads.

    Args:
        sizes: Sizes of the host's attention.
        how: Words for the message, such as ``'splits heads in two'``.
    """
    if sizes.why_whole_heads:
        raise ConfigError(f'the gate {how}, but {sizes.why_whole_heads}.')


def refuse_other_output(sizes: Sizes) -> None:
    """Raise ConfigError for a gate that acts after the output projection, if its output is not as wide as the heads."""
    if sizes.output_width != sizes.channels:
        raise ConfigError(
            'the gate acts after an output projection as wide as the heads, but this one goes from '
            f'{sizes.channels} to {sizes.output_width} channels.'
        )


def named_gate_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name, as in state dicts, and parameter for each parameter that gates add to a model.

    Args:
        model: A gated model, or a part of one.
        remove_duplicate: True yields a gate that several layers share once, under its first name.
    """
    seen: set[int] = set()
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        if not isinstance(module, Gate):
            continue
        for name, parameter in module.named_parameters(remove_duplicate=remove_duplicate):
            if remove_duplicate and id(parameter) in seen:
                continue
            seen.add(id(parameter))
            yield name_in_states(f'{prefix}.{name}'.lstrip('.')), parameter


def gate_classes(base: type[Gate] = Gate) -> Iterator[type[Gate]]:
    """Yield a class of gates and all classes that are derived from it."""
    yield base
    for derived in base.__subclasses__():
        yield from gate_classes(derived)


def gate_options(rule_type: Any) -> dict[str, inspect.Parameter]:
    """Return the options that a rule of a type may set: keyword-only arguments of its gate and of that one's bases."""
    found: dict[str, inspect.Parameter] = {}
    for cls in (gate_of_type(rule_type) or rule_type).__mro__:
        if '__init__' in vars(cls):
            taken = inspect.signature(cls).parameters
            found = {**{name: one for name, one in taken.items() if one.kind is one.KEYWORD_ONLY}, **found}
            if all(one.kind is not one.VAR_KEYWORD for one in taken.values()):
                break
    return found


def gate_of_type(rule_type: Any) -> type[Gate] | None:
    """Return the class of the gate that a rule's ``type`` says, or None if the type has no gate.

    Args:
        rule_type: A gate's class, or a registered function or class that builds attention with a gate, whose
            ``gate_type`` is the class of that gate.
    """
    found = getattr(rule_type, 'gate_type', rule_type)
    return found if inspect.isclass(found) and issubclass(found, Gate) else None


def registered_gates() -> Iterator[Any]:
    """Yield what is registered and may be a rule's ``type``: gates, and functions that build attention with one."""
    MODELS.import_from_location()
    for registered in MODELS.module_dict.values():
        if gate_of_type(registered) is not None:
            yield registered


def is_gate_key(key: str) -> bool:
    """Return True if a key of a state dict is the name of a gate's tensor."""
    return GATE_NAME in key.split('.')


def undecayed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter for each parameter of a model's gates that gets no weight decay.

    They are those that gates list in ``undecayed``.
    """
    for prefix, module in model.named_modules():
        if not isinstance(module, Gate) or not module.undecayed:
            continue
        for name, parameter in module.named_parameters():
            if name in module.undecayed or name.partition('.')[0] in module.undecayed:
                yield f'{prefix}.{name}'.lstrip('.'), parameter


def initialise_gate(name: str, gate: Gate) -> None:
    """Initialise a gate from a random stream that depends on its name, unless a state dict has filled it.

    It is drawn on the CPU, so that the numbers are the same on every device.
    """
    if gate.loaded:
        return
    gate.stream = name
    device = next((parameter.device for parameter in gate.parameters()), None)
    with random_stream(name):
        if device is None or device.type in ('cpu', 'meta'):
            gate.reset()
        else:
            gate.to('cpu').reset()
            gate.to(device)


def initialise_gates(name: str, gates: nn.Module) -> None:
    """Initialise the gates in a module, each from the random stream of a name and its own name in the module."""
    for inner, part in gates.named_modules():
        if isinstance(part, Gate):
            initialise_gate(f'{name}.{inner}', part)


@contextmanager
def gates_hidden(hidden: bool = True) -> Iterator[None]:
    """Hide all gates from ``parameters()``, ``modules()`` and ``apply`` in this thread; state dicts still have them.

    Args:
        hidden: False shows them again, inside of a block that hides them.
    """
    before = are_hidden()
    _of_thread.hidden = hidden
    try:
        yield
    finally:
        _of_thread.hidden = before


def are_hidden() -> bool:
    """Return True if gates are hidden in this thread, see :func:`gates_hidden`."""
    return getattr(_of_thread, 'hidden', False)


def start_linear(*layers: nn.Linear | nn.Conv2d | None) -> None:
    """Initialise linear layers as vision transformers do: truncated normal weights (std 0.02), biases 0.

    The public code of PVT, Swin and DeiT starts every linear layer like this.
    """
    for layer in layers:
        if layer is not None:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def random_stream(name: str) -> Iterator[None]:
    """Draw the CPU's random numbers in a ``with`` block from a stream that depends on torch's seed and a name.

    Afterwards the global generator continues as if nothing had been drawn.
    """
    generator = torch.default_generator
    before = generator.get_state()
    try:
        generator.manual_seed((torch.initial_seed() + crc32(name.encode())) % 2**63)
        yield
    finally:
        generator.set_state(before)

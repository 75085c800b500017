"""What a gate's class declares, and how gates start: after their host, by random numbers of their own.

mmdet and mmseg initialise by what a parameter looks like: detectors and Mask2Former draw everything of two dimensions
or more from xavier's distribution, PVT and Swin every ``nn.Linear`` from a narrow normal one. A gate that stood in the
model meanwhile would be drawn likewise and would shift the random numbers of all that follows, so that a gated model
could not be compared with its vanilla partner. :func:`~mmgate.swap.swap_attention` therefore lets the host
initialise with its own modules in place, and then every :class:`GateInit`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import Tensor, nn


class GateInit:
    """Base, before ``nn.Module``, of a module with parameters that no host has; a subclass declares all about them.

    Attributes:
        gate_parameters: Names of those parameters, or of the children that hold them.
        undecayed: Names, likewise, of what weight decay would only pull to zero: scalars, biases, positions, norms.
        gate_readings: What figures and statistics show of the gate: by the name of a reading what its values belong to,
            ``'pairs'`` of queries and keys, ``'levels'``, ``'heads'`` or ``'channels'``. :meth:`read_gate` computes it.
        identity_start: Whether, by default, it starts as the attention that it replaces.
        is_vanilla: Whether the parameters are those of a backbone's own attention (CSwin's), and no gate's.
        in_vit: Whether the host is a vision transformer, whose authors start linear layers otherwise than a detector's;
            a swap sets it.
        gate_loaded: Whether a state dict has filled any of the gate's parameters; then no initialisation draws them
            anew.
    """

    gate_parameters: tuple[str, ...] = ()
    undecayed: tuple[str, ...] = ()
    gate_readings: Mapping[str, str] = {}
    identity_start = False
    is_vanilla = False
    in_vit = False
    gate_loaded = False

    def reset_gate(self) -> None:
        """Draw the gate's parameters anew."""
        raise TypeError(f'{type(self).__name__} does not say how its gate starts.')

    def read_gate(self, name: str, *inputs: Tensor) -> Tensor:
        """Return the gate called ``name`` in :attr:`gate_readings`.

        Args:
            name: Of the reading.
            *inputs: What the gate is made from: query, key and value before their projection ``(B, N|M, C)``, of an
                attention over a map its tokens, of a deformable one the query with its position.
        """
        raise TypeError(f'{type(self).__name__} does not say how its gate is read.')

    def init_weights(self) -> None:
        """Draw them unless a state dict has filled them; mmengine calls this where a gate was built without a swap."""
        if not self.gate_loaded:
            self.reset_gate()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = tuple(f'{prefix}{name}' for name in self.gate_parameters)
        if any(key in own or key.startswith(tuple(f'{name}.' for name in own)) for key in state_dict):
            self.gate_loaded = True
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


def gate_parameters(model: nn.Module, *, remove_duplicate: bool = True) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of all that gates add to ``model``, as their classes declare it.

    Args:
        model: A gated model, or a part of one.
        remove_duplicate: Whether a gate that several layers share comes once, under its first name.
    """
    yield from _declared(model, lambda gate: () if gate.is_vanilla else gate.gate_parameters, remove_duplicate)


def gate_names() -> set[str]:
    """Return what the classes of gates call their parameters: parts of the keys that gates have in a checkpoint."""
    kinds: list[type[GateInit]] = [GateInit]
    for kind in kinds:
        kinds += kind.__subclasses__()
    return {name for kind in kinds if not kind.is_vanilla for name in kind.gate_parameters}


def undecayed_parameters(model: nn.Module) -> Iterator[tuple[str, nn.Parameter]]:
    """Yield name and parameter of what the classes of gates exempt from weight decay; gate projections decay."""
    yield from _declared(model, lambda gate: gate.undecayed, True)


def _declared(
    model: nn.Module, names_of: Callable[[GateInit], tuple[str, ...]], remove_duplicate: bool
) -> Iterator[tuple[str, nn.Parameter]]:
    for prefix, module in model.named_modules(remove_duplicate=remove_duplicate):
        names = names_of(module) if isinstance(module, GateInit) else ()
        for name, parameter in module.named_parameters() if names else ():
            if name.partition('.')[0] in names:
                yield f'{prefix}.{name}'.lstrip('.'), parameter


def start_linear(*layers: nn.Linear | nn.Conv2d | None) -> None:
    """Draw weights from a normal distribution of deviation 0.02, truncated at 2, and set biases to 0.

    What the public code of PVT, Swin and DeiT does with every linear layer.
    """
    for layer in layers:
        if layer is not None:
            nn.init.trunc_normal_(layer.weight, std=0.02)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


@contextmanager
def random_stream(name: str, device: torch.device | None = None) -> Iterator[None]:
    """Draw, on the CPU and on ``device``, random numbers that the seed and ``name`` determine; the global ones stay."""
    seed = (torch.initial_seed() + crc32(name.encode())) % 2**63
    generators = [torch.default_generator]
    if device is not None and device.type == 'cuda':
        index = torch.cuda.current_device() if device.index is None else device.index
        generators.append(torch.cuda.default_generators[index])
    before = [generator.get_state() for generator in generators]
    try:
        for generator in generators:
            generator.manual_seed(seed)
        yield
    finally:
        for generator, state in zip(generators, before, strict=True):
            generator.set_state(state)

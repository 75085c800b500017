"""How gates start: after their host, by random numbers of their own.

mmdet and mmseg initialise by what a parameter looks like: detectors and Mask2Former draw everything of two dimensions
or more from xavier's distribution, PVT and Swin every ``nn.Linear`` from a narrow normal one. A gate that stood in the
model meanwhile would be drawn likewise and would shift the random numbers of all that follows, so that a gated model
could not be compared with its vanilla partner. :func:`~mmgate.swap.swap_attention` therefore lets the host
initialise with its own modules in place, and then every :class:`GateInit`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from zlib import crc32

import torch
from torch import nn


class GateInit:
    """Base, before ``nn.Module``, of a module with parameters that no host has.

    Attributes:
        gate_parameters: Names of those parameters, or of the children that hold them.
        gate_loaded: Whether a state dict has filled any of them; then no initialisation draws them anew.
    """

    gate_parameters: tuple[str, ...] = ()
    gate_loaded = False

    def reset_gate(self) -> None:
        """Draw the gate's parameters anew."""
        raise TypeError(f'{type(self).__name__} does not say how its gate starts.')

    def init_weights(self) -> None:
        """Draw them unless a state dict has filled them; mmengine calls this where a gate was built without a swap."""
        if not self.gate_loaded:
            self.reset_gate()

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        own = tuple(f'{prefix}{name}' for name in self.gate_parameters)
        if any(key in own or key.startswith(tuple(f'{name}.' for name in own)) for key in state_dict):
            self.gate_loaded = True
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


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
    """Draw from a stream of random numbers that the seed and ``name`` determine; the global one stays where it was.

    Args:
        name: Of the module that starts.
        device: Where its parameters are.
    """
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

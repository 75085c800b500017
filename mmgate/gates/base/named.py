"""Names of gates: as the ``type`` of a rule a name says which gate; as that of a config it builds a host, too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

import torch
from torch import nn

from mmgate.adapter import Adapter, Record, initialised_gate
from mmgate.gate import Gate, gate_options
from mmgate.gating import gate_module
from mmgate.registry import MODELS
from mmgate.start import wrap_init_weights


def attention_named(
    name: str,
    gate: type[Gate],
    host: str,
    build: Callable[..., nn.Module],
    adapter: type[Adapter],
    child: str = '',
    force: bool = False,
) -> Callable[..., nn.Module]:
    """Register and return a function that builds attention (the host) and puts a gate into it, as a rule does.

    Args:
        name: The registered name.
        gate: Class of the gate, which a rule with this name as its ``type`` puts into other hosts.
        host: Words for the host.
        build: Builds the host; the function takes its arguments, and the options of the gate.
        adapter: Adapter of the host.
        child: Path, in the host, of the module that is gated; empty for the host itself.
        force: True replaces what is registered under the name.
    """

    def build_gated(*args: Any, **options: Any) -> nn.Module:
        own = {option: options.pop(option) for option in gate_options(gate) if option in options}
        built = build(*args, **options)
        gate_alone(built.get_submodule(child), adapter, gate, dict(own, type=name, path=''), child, **own)
        wrap_init_weights(built)
        return built

    build_gated.__name__ = build_gated.__qualname__ = name
    build_gated.__module__ = gate.__module__
    build_gated.__doc__ = (
        f'Build {host} with a :class:`{gate.__name__}` in it; a rule names the gate by this ``type``.\n\n'
        f'    It takes the arguments of {host}, and the options of :class:`{gate.__name__}`.'
    )
    build_gated.gate_type = gate  # type: ignore[attr-defined]
    return MODELS.register_module(force=force)(build_gated)


def gate_alone(
    host: Any, adapter: type[Adapter], gate: type[Gate], rule: dict[str, Any], child: str = '', /, **options: Any
) -> Any:
    """Gate a module that belongs to no model yet, and return it.

    Args:
        host: Module to be gated.
        adapter: Adapter of its class.
        gate: Class of the gate.
        rule: Rule that would gate it.
        child: Its path from the module that such a rule would name.
        **options: Options of the gate.

    Raises:
        ConfigError: The gate does not fit.
    """
    # It has no name yet. Layers that are built one after the other find other numbers here.
    stream = f'{child}.{crc32(torch.get_rng_state().numpy().data)}'
    made = initialised_gate(adapter, host, gate, stream, **options)
    gate_module(host, adapter, made, Record(adapter, child, rule, child))
    return host

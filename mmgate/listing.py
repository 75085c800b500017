"""List the attention modules that a model has, with the gates that fit them or that they have."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mmgate.adapter import Adapter, host_class, record_of
from mmgate.errors import full_name
from mmgate.gate import gate_of_type
from mmgate.hosts.table import adapter_for, gates_for, held_attention
from mmgate.wrappers import named_parts, own_model

# The names that packages give to the sizes of attention.
SIZES = (
    *('embed_dims', 'embed_dim', 'hidden_size', 'd_model', 'num_heads', 'num_attention_heads', 'n_heads', 'head_dim'),
    *('num_levels', 'n_levels', 'num_points', 'num_points_list', 'n_points', 'window_size', 'sr_ratio'),
)


def attention_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield name and module of each attention in a model.

    An attention is a module that is gated, that a gate fits, or whose class is called so. A module such as mmcv's
    ``MultiheadAttention`` and the attention in it, where its gate is put, are yielded once, by the name that a rule
    takes or has taken.
    """
    held: set[str] = set()
    hosts: list[str] = []
    for name, module in named_parts(model):
        is_host = isinstance(module, Adapter) or bool(gates_for(module))
        if name in held or not (is_host or looks_like_attention(module)):
            continue
        # transformers' deformable attention holds its operator as a module.
        inner = any(name.startswith(f'{host}.') for host in hosts) and next(module.parameters(), None) is None
        if inner and not is_host:
            continue
        if is_host:
            hosts.append(name)
        inside = dict(held_attention(module))
        if any(_was_chosen(part) for part in inside.values()):
            continue
        fits = bool(dict(held_attention(module, exactly=True)))
        held.update(
            f'{name}.{child}'.lstrip('.') for child, part in inside.items() if fits or isinstance(part, Adapter)
        )
        yield name, module


def looks_like_attention(module: nn.Module) -> bool:
    """Return True if the name of a module's class ends as those of attention do."""
    return re.search(r'Attention$|Attn$|MSA$', type(module).__name__) is not None


@dataclass(frozen=True)
class Attention:
    """Description of one attention module in a model: path, class, sizes, its gate or the gates that fit.

    Attributes:
        path: Its name in the model.
        class_name: Name of its class; of a gated module, the vanilla class.
        sizes: The attributes in :data:`SIZES` that it has, by the names that its package gives them; ``embed_dims`` and
            ``num_heads`` where its package gives its heads no name and a gate fits.
        gates: Names that rules may give as ``type`` for it. Whether the sizes fit as well, as M-DGSA's heads have to be
            split, the gate says when it is put in.
        gate: Name of the class of its gate, or None.
    """

    path: str
    class_name: str
    sizes: dict[str, Any]
    gates: tuple[str, ...]
    gate: str | None = None


def list_attention(model: nn.Module) -> list[Attention]:
    """Return a description of each attention module of a model, with the path that a rule takes.

    Args:
        model: Any module, of an mm package, of transformers, timm or another, gated or not.
    """
    listed = []
    for path, module in attention_modules(own_model(model)):
        sizes = {size: getattr(module, size) for size in SIZES if hasattr(module, size)}
        gates = gates_for(module)
        if not any('heads' in size for size in sizes):
            sizes.update(_sizes_of_heads(module, gates))
        names = tuple(gate.__name__ for gate in gates)
        listed.append(Attention(path, host_class(module).__name__, sizes, names, names_of_gates(module) or None))
    return listed


def _sizes_of_heads(attention: nn.Module, gates: Sequence[type]) -> dict[str, int]:
    """Return an attention's channels and number of heads, from its gate or from the adapter of a gate that fits."""
    if isinstance(attention, Adapter):
        first: Any = attention.gates()[0]
        return dict(embed_dims=first.embed_dims, num_heads=first.num_heads)
    gate = gate_of_type(gates[0]) if gates else None
    found = None if gate is None else adapter_for(gate, attention)
    if found is None:
        return {}
    adapter, child = found
    sizes = adapter.sizes(attention.get_submodule(child))
    if isinstance(sizes, dict):
        sizes = next(iter(sizes.values()))
    return dict(embed_dims=sizes.channels, num_heads=sizes.heads)


def names_of_gates(attention: nn.Module) -> str:
    """Return the class names of an attention's gates, joined by commas; empty if it is vanilla.

    Args:
        attention: A gated module, or the module around it that a rule has chosen.
    """
    gated = [part for part in (attention, *dict(held_attention(attention)).values()) if isinstance(part, Adapter)]
    return ', '.join(dict.fromkeys(type(gate).__name__ for gate in (gated[0].gates() if gated else ())))


def _was_chosen(module: nn.Module) -> bool:
    """Return True if a rule named a gated module itself rather than the module that holds it."""
    record = record_of(module)
    return record is not None and not record.inner


def attention_in_words(model: nn.Module) -> str:
    """Return lines for an error message: each attention of a model with its class, and its gate or gates that fit."""
    lines = []
    for name, module in attention_modules(model):
        gates = names_of_gates(module)
        fits = ', '.join(rule_type.__name__ for rule_type in gates_for(module)) or 'none'
        state = f'gated by {gates}' if gates else f'fits: {fits}'
        path = name or "the model itself, which no path names (nn.ModuleDict(dict(attn=model)) makes it 'attn')"
        lines.append(f'  {path}: {full_name(host_class(module))}, {state}')
    if not lines:
        return f'{type(model).__name__} has no attention modules.'
    return '\n'.join([f'The attention modules of {type(model).__name__} are', *lines])

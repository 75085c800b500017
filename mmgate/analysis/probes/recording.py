"""Record what attention does while a model runs, without touching its forward code.

``with record(model, ('gate', 'attention')) as recording: model.test_step(batch)`` leaves the tensors in
``recording['encoder.layers.0.self_attn']['gate'].tensors``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.analysis.probes.attention import GATES, NAMES, PLACES, bind, is_alone, probe_for
from mmgate.analysis.probes.hosts import gate_in_host
from mmgate.analysis.probes.statistics import Accumulator, Kept
from mmgate.errors import ConfigError
from mmgate.hosts.window import GatedWindowMSA

from . import hosts, whole_maps  # noqa: F401  (registers)

ACTIVATION = 'activation'
_ATTENTION = re.compile(r'(Attention|Attn|MSA)$')
# what readings are called in messages, and the tools that draw them
WORDS = {
    'attention': 'attention weights',
    'locations': 'sampling points',
    'kv': 'a map K^T V (linear attention)',
    'agents': 'agent tokens',
    **{name: 'gates' for name in GATES},
}
TOOLS = {
    'attention': ('plot_rollout.py', 'plot_cka.py', 'plot_attention_sink.py'),
    'locations': ('plot_sampling_points.py',),
    'kv': ('plot_kv_rank.py',),
    'agents': ('plot_agents.py',),
    **{name: ('plot_gates.py',) for name in GATES},
}
Recording = dict[str, dict[str, Any]]  # path of the module: name of the reading: its accumulator


@contextmanager
def record(
    model: nn.Module,
    names: Iterable[str],
    *,
    accumulate: Callable[[], Accumulator] | Mapping[str, Callable[[], Accumulator]] = Kept,
    paths: Callable[[str], bool] = lambda path: True,
) -> Iterator[Recording]:
    """Record readings of every attention module that has them, while the context is open.

    The readings are computed from the modules' inputs, without gradients and dropout, after the module has run: the
    model's output and the random numbers that it gets stay the same, bit by bit. Outside of the context nothing is left
    behind. A module that runs twice (in a shared layer, or in activation checkpointing) is recorded twice; one inside a
    compiled graph is not.

    Args:
        model: Any model; wrappers such as DistributedDataParallel have to be taken off.
        names: What to record, of :data:`~mmgate.analysis.probes.attention.NAMES` (shapes in the probes' docstrings) and
            ``'activation'``: the output of the layer around the attention, what the paper calls hidden states.
        accumulate: Makes what takes the tensors of one module: one for all names, or by name (default: kept).
        paths: Which modules, by their dotted name.

    Yields:
        By the module's name and the reading's, its accumulator; a module that did not run is not in it.

    Raises:
        ValueError: A name is unknown.
    """
    wanted = tuple(names)
    unknown = sorted(set(wanted) - {*NAMES, ACTIVATION})
    if unknown:
        raise ValueError(f'{", ".join(unknown)} cannot be recorded; there are {", ".join((*NAMES, ACTIVATION))}.')
    recording: Recording = {}

    def take(path: str, name: str, reading: Tensor) -> None:
        make = accumulate.get(name, Kept) if isinstance(accumulate, Mapping) else accumulate
        of_module = recording.setdefault(path, {})
        if name not in of_module:
            of_module[name] = make()
        of_module[name].add(reading)

    handles = []
    try:
        for path, called, probe, found in _readable(model):
            chosen = tuple(name for name in found if name in wanted)
            if chosen and paths(path):
                hook = _reader(path, probe, chosen, take)
                handles.append(model.get_submodule(called).register_forward_hook(hook, with_kwargs=True))
        if ACTIVATION in wanted:
            attention = [path for path, _, _, found in _readable(model) if not set(found) <= set(PLACES)]
            for path in dict.fromkeys(_layer(model, path) for path in attention):
                if paths(path):
                    handles.append(model.get_submodule(path).register_forward_hook(_activation(path, take)))
        yield recording
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def record_with_head(
    model: nn.Module,
    names: Iterable[str],
    heads: Iterable[str],
    read: Callable[[nn.Module, Any], Any],
    *,
    accumulate: Callable[[], Accumulator] | Mapping[str, Callable[[], Accumulator]] = Kept,
) -> Iterator[dict[str, Any]]:
    """Record as :func:`record` does, and what a head returns.

    Args:
        model: Likewise.
        names: Likewise.
        heads: Attributes of the model, those of them that it has.
        read: Takes a head and its output to what is kept, None to keep nothing.
        accumulate: Likewise.

    Yields:
        ``layers``: a recording; ``head``: what was kept of the last forward pass, or None.
    """
    found: dict[str, Any] = dict(layers={}, head=None)

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        kept = read(module, output)
        found['head'] = found['head'] if kept is None else kept

    there = [head for head in (getattr(model, name, None) for name in heads) if head is not None]
    handles = [head.register_forward_hook(keep) for head in there]
    try:
        with record(model, names, accumulate=accumulate) as found['layers']:
            yield found
    finally:
        for handle in handles:
            handle.remove()


def readable(model: nn.Module) -> dict[str, list[str]]:
    """Return, by name of a reading, the paths of the modules that have it."""
    found: dict[str, list[str]] = {}
    for path, _, _, names in _readable(model):
        for name in names:
            found.setdefault(name, []).append(path)
    return found


def class_tokens(model: nn.Module, keys: Mapping[str, int]) -> dict[str, int]:
    """Return, by path, how many tokens stand before those of the image: a class token, DeiT's distillation token, too.

    Args:
        model: The model; a class token is its ``cls_token``, or that of a part.
        keys: The number of keys of the attentions, by path, in the order in which they run. Only those with as many as
            the last have the token: T2T-ViT's first attentions run before it joins.
    """
    found: dict[str, int] = {}
    for owner, module in _with_class_token(model):
        inside = [path for path in keys if path.startswith(f'{owner}.' if owner else '')]
        count = getattr(module, 'num_extra_tokens', 1)
        found.update({path: count for path in inside if keys[path] == keys[inside[-1]]})
    return found


def has_class_token(model: nn.Module) -> bool:
    """Whether a class token stands before the image's tokens somewhere in the model."""
    return any(True for _ in _with_class_token(model))


def _with_class_token(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    for path, module in model.named_modules():
        if getattr(module, 'cls_token', None) is not None and getattr(module, 'with_cls_token', True):
            yield path, module


def require(model: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raise ConfigError unless the model has one of ``names``, with what it has.

    Args:
        model: The model.
        names: Readings, any of which is enough.
        purpose: What they are needed for, as the subject of the message.
    """
    has, wanted = readable(model), tuple(names)
    if any(name in has for name in wanted):
        return
    seen = {what: has[name] for name, what in WORDS.items() if name in has}
    listed = '; '.join(f'{what} ({len(paths)} modules, first {paths[0]})' for what, paths in seen.items())
    tools = sorted({tool for name in has for tool in TOOLS.get(name, ())})
    raise ConfigError(
        f'{purpose} needs a model with {" or ".join(dict.fromkeys(WORDS[name] for name in wanted))}; '
        f'{type(model).__name__} has {listed or "no attention that can be read"}. '
        + (f'What can draw it: {", ".join(tools)}.' if tools else 'list_attention.py lists the attention of a config.')
    )


def _readable(model: nn.Module) -> Iterator[tuple[str, str, Any, tuple[str, ...]]]:
    """Yield the path of what can be read, that of the module whose call shows it, the probe, and what it reads."""
    windowed = {f'{path}.attn' for path, module in model.named_modules() if isinstance(module, GatedWindowMSA)}
    for path, module in model.named_modules():
        found = probe_for(module)
        if found is None or not found[1] or path in windowed:  # that is not called, and read where its windows are
            continue
        if is_alone(module):
            host, _, name = path.rpartition('.')
            if getattr(model.get_submodule(host), 'over_channels', False):
                continue
            yield path, host, partial(gate_in_host, name), found[1]
        else:
            yield path, path, *found


def _reader(path: str, probe: Any, names: tuple[str, ...], take: Callable[[str, str, Tensor], None]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        with torch.no_grad():
            readings = probe(module, **bind(module, args, kwargs))
            for name in names:
                take(path, name, readings[name]())

    return hook


def _layer(model: nn.Module, path: str) -> str:
    """Return the path of what holds the attention at ``path``: its layer, past attentions around attentions."""
    path = path.rpartition('.')[0]
    while path and _ATTENTION.search(type(model.get_submodule(path)).__name__):
        path = path.rpartition('.')[0]
    return path


def _activation(path: str, take: Callable[[str, str, Tensor], None]) -> Any:
    def hook(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        first = output[0] if isinstance(output, (tuple, list)) else output
        if isinstance(first, Tensor):
            take(path, ACTIVATION, first)

    return hook

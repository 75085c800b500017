"""Record gates, attention weights and sampling points of a running model with hooks, without changing its code.

``with record(model, ('gate', 'attention')) as recording: model.test_step(batch)`` leaves the tensors in
``recording[path]['gate'].tensors``. The path is that of the module with the gate: ``'encoder.layers.0.self_attn'`` for
deformable attention, and ``'encoder.layers.0.self_attn.attn'`` for mmdet's dense attention, where mmcv's module holds
torch's and the gate is in torch's. :func:`readable` returns all paths.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.attention import (
    ACTIVATION,
    GATES,
    NAMES,
    PLACES,
    PREDICTIONS,
    bind,
    gated_reads,
)
from mmgate.analysis.probes.statistics import Kept
from mmgate.errors import ConfigError
from mmgate.hosts.readings import Read, readings_of
from mmgate.hosts.table import gate_of_type, registered_gates
from mmgate.layers.base.gate import Gate
from mmgate.layers.base.gated import GatedModule, is_off

HEADS = ('panoptic_head', 'decode_head', 'bbox_head')  # of detectors and segmentors that predict by query
# Words for the readings, with the tools that draw them.
DRAWN = {
    'attention': 'attention weights (plot_rollout.py, plot_cka.py, plot_attention_sink.py)',
    'locations': 'sampling points (plot_sampling_points.py)',
    'kv': 'a map K^T V of linear attention (plot_kv_rank.py)',
    'agents': 'agent tokens (plot_agents.py)',
    GATES: 'gates (plot_gates.py)',
}
_ATTENTION = re.compile(r'(Attention|Attn|MSA)$')


class Sample(Protocol):
    """Protocol of mmengine's data sample: the fields of an image that the figures need."""

    @property
    def img_path(self) -> str:
        """Path of the image file."""

    @property
    def ori_shape(self) -> tuple[int, ...]:
        """Height and width of the image on disk, in pixels."""

    @property
    def img_shape(self) -> tuple[int, ...]:
        """Height and width of the image as the model gets it, after resizing and without padding."""

    def get(self, name: str) -> Any:
        """Return a field of the sample by its name, such as ``batch_input_shape``, or None."""


Recording = dict[str, dict[str, Any]]  # accumulators, by path of the module and name of the reading


@contextmanager
def record(
    model: nn.Module, names: Iterable[str], *, accumulate: Callable[[str, str], Any] = lambda path, name: Kept()
) -> Iterator[Recording]:
    """Record what is asked for (gates, attention weights, ...) of every attention module that runs in a ``with`` block.

    The readings are computed from the modules' inputs, without gradients and dropout, after the module has run: the
    model's output and the random numbers that it gets stay the same, bit by bit. No hook is left after the context. A
    module that runs twice (in a shared layer, or in activation checkpointing) is recorded twice; one inside a compiled
    graph is not.

    Args:
        model: Any model; wrappers such as DistributedDataParallel have to be taken off.
        names: Readings to record: those that gates declare in :attr:`.Gate.gate_readings`, such as ``'gate'``, or all
            of them by ``'gates'``; those of :data:`~mmgate.analysis.probes.attention.NAMES` (shapes in the probes'
            docstrings); ``'activation'``, the output of the layer around the attention, which the paper calls hidden
            states; ``'predictions'``, a head's classes and places of each query, see :func:`predicted`.
        accumulate: Returns an accumulator, whose ``add`` gets the tensors, for a module's path and a reading's name; by
            default one that keeps them.

    Yields:
        The accumulators by path of the module and name of the reading; a module that did not run is missing.

    Raises:
        ValueError: A name is unknown: no gate of the model declares it, nor any registered gate.
    """
    wanted = set(names)
    of_gates = gate_names(model)
    known = dict.fromkeys((*of_gates, *_registered_names(), GATES, *NAMES, ACTIVATION, PREDICTIONS))
    unknown = sorted(wanted - set(known))
    if unknown:
        raise ValueError(f'{", ".join(unknown)} cannot be recorded; there are {", ".join(known)}.')
    if GATES in wanted:
        wanted.update(of_gates)
    recording: Recording = {}

    def hook(path: str, read: Callable[..., Mapping[str, Tensor]]) -> Callable[..., None]:
        def take(*call: Any) -> None:
            with torch.no_grad():
                for name, x in read(*call).items():
                    of_module = recording.setdefault(path, {})
                    if name not in of_module:
                        of_module[name] = accumulate(path, name)
                    of_module[name].add(x)

        return take

    readings = list(_readable(model))
    # Path of the reading, path of the module that is hooked, and the function that reads.
    reads: list[tuple[str, str, Any]] = []
    for path, called, has in readings:
        chosen = {name: how for name, how in has.items() if name in wanted}
        if chosen:
            reads.append((path, called, partial(_of_inputs, chosen)))
    if ACTIVATION in wanted:
        layers = dict.fromkeys(_layer(model, path) for path, _, has in readings if not set(has) <= set(PLACES))
        reads += [(path, path, _activation) for path in layers]
    if PREDICTIONS in wanted:
        reads += [(path, path, _scores_and_places) for path in HEADS if getattr(model, path, None) is not None]
    with ExitStack() as hooks:
        for path, called, read in reads:
            hooks.enter_context(model.get_submodule(called).register_forward_hook(hook(path, read), with_kwargs=True))
        yield recording


def _of_inputs(
    chosen: Mapping[str, Read], module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> dict[str, Tensor]:
    given = bind(module, args, kwargs)
    return {name: how(module, given) for name, how in chosen.items()}


def _activation(layer: Any, args: Any, kwargs: Any, output: Any) -> dict[str, Tensor]:
    first = output[0] if isinstance(output, (tuple, list)) else output
    return {ACTIVATION: first} if isinstance(first, Tensor) else {}


def _scores_and_places(head: Any, args: Any, kwargs: Any, output: Any) -> dict[str, Tensor]:
    parts = output[:2] if isinstance(output, tuple) else ()
    found = [part[-1] for part in parts if isinstance(part, (Tensor, list, tuple)) and len(part)]  # of the last layer
    if len(found) < 2 or not all(isinstance(part, Tensor) for part in found):
        return {}
    classes, places = (part.float() for part in found)
    sigmoid = getattr(getattr(head, 'loss_cls', None), 'use_sigmoid', False)
    return dict(scores=classes.sigmoid() if sigmoid else classes.softmax(-1)[..., :-1], places=places)


def predicted(recording: Recording) -> tuple[Tensor, Tensor] | None:
    """Return the recorded predictions of a query-based head: scores ``(B, Q, classes)``, and boxes or masks.

    Boxes have the shape ``(B, Q, 4)``, logits of masks ``(B, Q, h, w)``. It is None if the model has no such head.

    They are those of the decoder's last layer in the last forward pass.
    """
    heads = [recording[head] for head in HEADS if 'scores' in recording.get(head, {})]
    return (heads[0]['scores'].last, heads[0]['places'].last) if heads else None


def best_queries(recording: Recording, image: int, top_k: int) -> np.ndarray:
    """Return the ``top_k`` queries of an image whose best class scores highest; without scores, the first ``top_k``."""
    head = predicted(recording)
    if head is None:
        return np.arange(top_k)
    scores = head[0][image].max(-1).values
    return scores.topk(min(top_k, len(scores))).indices.numpy()


def nearest(recording: Recording, path: str, name: str) -> Any:
    """Return the reading ``name`` of the module at ``path`` or, if it has none, of the nearest module around it."""
    names = path.split('.')
    around = ('.'.join(names[:count]) for count in range(len(names), -1, -1))
    return next((recording[p][name] for p in around if name in recording.get(p, {})), None)


def predict(model: Any, batch: dict[str, Any]) -> Any:
    """Run ``test_step`` on a batch of one image without gradients, and return its result, or None if it has none."""
    with torch.no_grad():
        found = model.test_step(batch)
    return found[0] if found else None


def readable(model: nn.Module) -> dict[str, list[str]]:
    """Return for each reading (gate, attention, ...) the paths of the modules of which it can be recorded."""
    found: dict[str, list[str]] = {}
    for path, _, names in _readable(model):
        for name in names:
            found.setdefault(name, []).append(path)
    return found


def gate_names(model: nn.Module) -> tuple[str, ...]:
    """Return the names under which the gates of a model can be recorded, as their classes declare them."""
    gates = (module for module in model.modules() if isinstance(module, Gate))
    return tuple(dict.fromkeys(name for gate in gates for name in gate.gate_readings))


def _registered_names() -> Iterator[str]:
    """Yield the names of readings that any registered gate declares, so that a vanilla model may be asked for them."""
    for registered in registered_gates():
        gate = gate_of_type(registered)
        if gate is not None:
            yield from gate.gate_readings


def require(model: nn.Module, names: Iterable[str], purpose: str) -> None:
    """Raise ConfigError unless the model has one of the readings ``names``; the message lists those that it has.

    Args:
        model: Model.
        names: Keys of :data:`DRAWN`, one of which suffices.
        purpose: Beginning of the message.
    """
    of_gates = gate_names(model)
    has = dict.fromkeys(GATES if name in of_gates else name for name in readable(model))
    wanted = tuple(names)
    if not any(name in has for name in wanted):
        needed = ' or '.join(dict.fromkeys(DRAWN[name] for name in wanted))
        found = ', '.join(dict.fromkeys(DRAWN[name] for name in has if name in DRAWN))
        found = found or 'no attention that can be read'
        raise ConfigError(f'{purpose} needs a model with {needed}; {type(model).__name__} has {found}.')


def class_tokens(model: nn.Module, keys: Mapping[str, int]) -> dict[str, int]:
    """Return for each attention the number of tokens before the image's: class, distillation and register tokens.

    Args:
        model: Model.
        keys: Number of keys of each attention, by path, in the order in which they run. Only attentions with as many
            keys as the last have the token: T2T-ViT's first attentions run before it joins.
    """
    found: dict[str, int] = {}
    for owner, module in model.named_modules():
        if getattr(module, 'cls_token', None) is None or not getattr(module, 'with_cls_token', True):
            continue
        inside = [path for path in keys if path.startswith(f'{owner}.' if owner else '')]
        count = getattr(module, 'num_extra_tokens', getattr(module, 'num_prefix_tokens', 1))  # mmpretrain's, timm's
        found.update({path: count for path in inside if keys[path] == keys[inside[-1]]})
    return found


def _readable(model: nn.Module) -> Iterator[tuple[str, str, dict[str, Read]]]:
    """Yield for each attention its path, the path of the module to hook, and the functions that compute readings."""
    for path, module in model.named_modules():
        if isinstance(module, GatedModule) and not is_off(module):
            for name, found in gated_reads(module).items():
                if found:
                    yield f'{path}.gate.{name}' if name else path, path, found
        elif found := readings_of(module):
            yield path, path, found


def _layer(model: nn.Module, path: str) -> str:
    """Return the path of the transformer layer that holds the attention at ``path``, past wrappers around it."""
    path = path.rpartition('.')[0]
    while path and _ATTENTION.search(type(model.get_submodule(path)).__name__):
        path = path.rpartition('.')[0]
    return path

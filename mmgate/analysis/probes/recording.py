"""Record what figures and statistics need of a running model: notes of its attention, places, states, predictions.

:func:`record` is :func:`mmgate.record`, and adds by forward hooks what attention does not compute: where its windows or
reduced keys lie on the map, the hidden states after each layer, and a head's predictions.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import mmgate.recording
from mmgate.adapter import Adapter, host_class, is_off
from mmgate.errors import ConfigError, full_name
from mmgate.gate import Gate
from mmgate.gates.base.map import MapAdapter
from mmgate.notes import GATES, Kept, Note, Recording, note
from mmgate.recording import vanilla_adapter

GEOMETRY = 'geometry'
ACTIVATION = 'activation'
PREDICTIONS = 'predictions'
HEADS = ('panoptic_head', 'decode_head', 'bbox_head')  # of detectors and segmentors that predict by query
# Words for the notes, with the tools that draw them.
DRAWN = {
    'attention': 'attention weights (plot_rollout.py, plot_cka.py, plot_attention_sink.py)',
    'locations': 'sampling points (plot_sampling_points.py)',
    'kv': 'a map K^T V of linear attention (plot_kv_rank.py)',
    'agents': 'agent tokens (plot_agents.py)',
    GATES: 'gates (plot_gates.py)',
}
_ATTENTION = re.compile(r'(Attention|Attn|MSA)$')
Given = Mapping[str, Any]


def _reduced(module: Any, given: Given) -> list[int]:
    return [*given['hw_shape'], module.sr_ratio]


def _windows(module: Any, given: Given) -> list[int]:
    return [*given['hw_shape'], module.window_size, 0]


def _shifted_windows(module: Any, given: Given) -> list[int]:
    size = given['hw_shape']
    shift = module.shift_at(size) if hasattr(module, 'shift_at') else module.shift_size
    if min(size) == module.window_size and not getattr(module, 'pad_small_map', True):
        shift = 0  # in mmpretrain one window then holds the smaller side
    return [*size, module.window_size, shift]


# The modules that know where tokens lie, by the end of the class's dotted name (a subclass is called as its base), with
# the function of a module and the arguments of its call that returns the geometry: (height, width, window, shift),
# (height, width, window height, window width, shift) or, where keys are reduced, (height, width, ratio). A module that
# is not in the table, or a gate, may note ``'geometry'`` itself.
PLACES: dict[str, Callable[[Any, Given], list[int]]] = {
    'backbones.swin.ShiftWindowMSA': _shifted_windows,
    'utils.attention.ShiftWindowMSA': _shifted_windows,
    'backbones.pvt.SpatialReductionAttention': _reduced,
    'backbones.mit.EfficientMultiheadAttention': _reduced,
    'backbones.twins.GlobalSubsampledAttention': _reduced,
    'backbones.twins.LocallyGroupedSelfAttention': _windows,
    'backbones.tinyvit.TinyViTBlock': lambda module, given: [*module.img_size, module.window_size, 0],
    'gcvit.GlobalContextVitBlock': lambda module, given: [*given['x'].shape[1:3], *module.window_size, 0],
}


@contextmanager
def record(
    model: nn.Module,
    names: str | Iterable[str] | None = None,
    *,
    accumulate: Callable[[Note], Any] = lambda first: Kept(),
) -> Iterator[Recording]:
    """Record notes of attention, as :func:`mmgate.record` does, and places, hidden states and predictions.

    Args:
        model: Any model; wrappers such as DistributedDataParallel have to be taken off.
        names: Names of notes as in :func:`mmgate.record`; ``'geometry'``, see :data:`PLACES`; ``'activation'``, the
            output of the layer around the attention, which the paper calls hidden states; and ``'predictions'``, a
            head's classes and places of each query, see :func:`predicted`. By default all but the last two.
        accumulate: See :func:`mmgate.record`.

    Yields:
        The accumulators by path of the module and name; what did not run is missing.
    """
    wanted = None if names is None else {*([names] if isinstance(names, str) else names)}
    hooks: dict[str, Any] = {}
    for path, module in model.named_modules():
        if (wanted is None or GEOMETRY in wanted) and _place_of(module):
            hooks[path] = _note_geometry
        if wanted and PREDICTIONS in wanted and path in HEADS:
            hooks[path] = _note_predictions
            wanted |= {'scores', 'places'}
    states = [path for path, module in model.named_modules() if wanted and ACTIVATION in wanted and _attends(module)]
    with ExitStack() as stack:
        recording = stack.enter_context(mmgate.recording.record(model, wanted, accumulate=accumulate))
        layers = dict.fromkeys((_layer(model, path), _note_activation) for path in states)
        for path, hook in [*hooks.items(), *layers]:
            stack.enter_context(model.get_submodule(path).register_forward_hook(hook, with_kwargs=True))
        yield recording


def _place_of(module: nn.Module) -> Callable[[Any, Given], list[int]] | None:
    if isinstance(module, MapAdapter) and not is_off(module):  # whose gate attends over the whole map instead
        return None
    known: Any = host_class(module)
    names = (f'.{full_name(base)}' for base in known.__mro__)
    return next((read for name in names for end, read in PLACES.items() if name.endswith(f'.{end}')), None)


def _note_geometry(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    read = _place_of(module)
    # A function set on the module may take any arguments.
    bound = inspect.signature(MethodType(type(module).forward, module)).bind(*args, **kwargs)
    if read is not None:
        given = {**bound.arguments.pop('kwargs', {}), **bound.arguments}
        note(module, GEOMETRY, lambda: torch.tensor(read(module, given)))


def _attends(module: nn.Module) -> bool:
    """Return True for a module that attends, of which anything may be noted."""
    gated = isinstance(module, Adapter) or any(isinstance(child, Gate) for child in module.children())
    return gated or bool(_ATTENTION.search(type(module).__name__)) or vanilla_adapter(module) is not None


def _layer(model: nn.Module, path: str) -> str:
    """Return the path of the transformer layer that holds the attention at ``path``, past wrappers around it."""
    path = path.rpartition('.')[0]
    while path and _ATTENTION.search(type(model.get_submodule(path)).__name__):
        path = path.rpartition('.')[0]
    return path


def _note_activation(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
    first = output[0] if isinstance(output, (tuple, list)) else output
    if isinstance(first, Tensor):
        note(layer, ACTIVATION, first)


def _note_predictions(head: Any, args: Any, kwargs: Any, output: Any) -> None:
    parts = output[:2] if isinstance(output, tuple) else ()
    found = [part[-1] for part in parts if isinstance(part, (Tensor, list, tuple)) and len(part)]  # of the last layer
    if len(found) < 2 or not all(isinstance(part, Tensor) for part in found):
        return
    classes, places = (part.float() for part in found)
    sigmoid = getattr(getattr(head, 'loss_cls', None), 'use_sigmoid', False)
    note(head, 'scores', classes.sigmoid() if sigmoid else classes.softmax(-1)[..., :-1])
    note(head, 'places', places)


def predicted(recording: Recording) -> tuple[Tensor, Tensor] | None:
    """Return the predictions of a query-based head's last layer in the last forward pass, or None without such a head.

    Scores have the shape ``(B, Q, classes)``, boxes ``(B, Q, 4)``, logits of masks ``(B, Q, h, w)``.
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
    """Return what is recorded as ``name`` of the module at ``path``, else of the nearest module around it."""
    names = path.split('.')
    around = ('.'.join(names[:count]) for count in range(len(names), -1, -1))
    return next((recording[p][name] for p in around if name in recording.get(p, {})), None)


def predict(model: Any, batch: dict[str, Any]) -> Any:
    """Run ``test_step`` on a batch of one image without gradients, and return its result, or None if it has none."""
    with torch.no_grad():
        found = model.test_step(batch)
    return found[0] if found else None


def require(model: Any, batch: dict[str, Any], names: Iterable[str], purpose: str) -> None:
    """Run a batch, and raise ConfigError unless anything is noted by one of ``names``; the message lists what is.

    Args:
        model: Model.
        batch: Batch for its ``test_step``.
        names: Keys of :data:`DRAWN`, one of which suffices.
        purpose: Beginning of the message.
    """
    has: dict[str, None] = {}

    def accumulate(first: Note) -> Kept:
        has[GATES if first.axes else first.name] = None
        return Kept(lambda x: x.new_empty(0))

    with mmgate.recording.record(model, accumulate=accumulate):
        predict(model, batch)
    wanted = tuple(names)
    if not any(name in has for name in wanted):
        needed = ' or '.join(dict.fromkeys(DRAWN[name] for name in wanted))
        found = ', '.join(DRAWN[name] for name in has if name in DRAWN) or 'no attention that notes anything'
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


def padded_size(sample: Any) -> tuple[int, int]:
    """Return height and width of the padded input in which the model got the image of a data sample."""
    return tuple(sample.get('batch_input_shape') or sample.img_shape[:2])


def map_shape(tokens: int, size: tuple[int, int]) -> tuple[int, int] | None:
    """Return height and width of the map of so many tokens that an integer stride makes of an image, or None."""
    for stride in range(1, max(size) + 1):
        for shape in ((-(-size[0] // stride), -(-size[1] // stride)), (size[0] // stride, size[1] // stride)):
            if shape[0] * shape[1] == tokens:
                return shape
    return None

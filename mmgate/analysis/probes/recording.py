"""Record what figures and statistics need of a running model: notes of its attention, places, states, predictions.

:func:`record` is :func:`mmgate.record`, and adds by forward hooks what attention does not compute: where its tokens lie
on the image, the hidden states after each layer, and a head's predictions.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

import mmgate.recording
from mmgate.adapter import Adapter
from mmgate.analysis.probes.places import note_place, place_of
from mmgate.errors import ConfigError
from mmgate.gate import Gate
from mmgate.notes import GATES, Kept, Note, Recording, note
from mmgate.recording import vanilla_adapter

ACTIVATION = 'activation'
PREDICTIONS = 'predictions'
_PREDICTED = ('scores', 'places')
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
        names: Names of notes as in :func:`mmgate.record`; ``'geometry'`` and ``'map_size'``, see :mod:`.places`;
            ``'activation'``, the output of the layer around the attention, which the paper calls hidden states; and
            ``'predictions'``, a head's classes and places of each query, see :func:`predicted`. By default all but the
            last two.
        accumulate: See :func:`mmgate.record`.

    Yields:
        The accumulators by path of the module and name; what did not run is missing.
    """
    wanted = None if names is None else {*([names] if isinstance(names, str) else names)}
    hooks: list[tuple[nn.Module, Callable[..., None]]] = []
    for path, module in model.named_modules():
        place = place_of(module)
        if place is not None and (wanted is None or place in wanted):
            hooks.append((module, note_place))
        if wanted and PREDICTIONS in wanted and path in HEADS:
            hooks.append((module, _note_predictions))
    if wanted and PREDICTIONS in wanted:
        wanted.update(_PREDICTED)
    if wanted and ACTIVATION in wanted:
        layers = dict.fromkeys(_layer(model, path) for path, module in model.named_modules() if _attends(module))
        hooks += [(model.get_submodule(path), _note_activation) for path in layers]
    with ExitStack() as stack:
        recording = stack.enter_context(mmgate.recording.record(model, wanted, accumulate=accumulate))
        for module, hook in hooks:
            stack.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        yield recording


def _attends(module: nn.Module) -> bool:
    """Return True for a module that attends, of which anything may be noted."""
    gated = isinstance(module, Adapter) or any(isinstance(child, Gate) for child in module.children())
    return gated or bool(_ATTENTION.search(type(module).__name__)) or vanilla_adapter(module) is not None


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
    """Return what is recorded as ``name`` of the module at ``path``, else of the nearest module around it."""
    names = path.split('.')
    around = ('.'.join(names[:count]) for count in range(len(names), -1, -1))
    return next((recording[p][name] for p in around if name in recording.get(p, {})), None)


def predict(model: Any, batch: dict[str, Any]) -> Any:
    """Run ``test_step`` on a batch of one image without gradients, and return its result, or None if it has none."""
    with torch.no_grad():
        found = model.test_step(batch)
    return found[0] if found else None


class _Nothing:
    """Accumulator that keeps nothing."""

    def add(self, x: Tensor) -> None:
        """Forget a tensor."""


def require(model: Any, batch: dict[str, Any], names: Iterable[str], purpose: str) -> None:
    """Run a batch, and raise ConfigError unless anything is noted by one of ``names``; the message lists what is.

    Args:
        model: Model.
        batch: Batch for its ``test_step``.
        names: Keys of :data:`DRAWN`, one of which suffices.
        purpose: Beginning of the message.
    """
    has: dict[str, None] = {}

    def accumulate(first: Note) -> _Nothing:
        has[GATES if first.axes else first.name] = None
        return _Nothing()

    with record(model, accumulate=accumulate):
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


def _layer(model: nn.Module, path: str) -> str:
    """Return the path of the transformer layer that holds the attention at ``path``, past wrappers around it."""
    path = path.rpartition('.')[0]
    while path and _ATTENTION.search(type(model.get_submodule(path)).__name__):
        path = path.rpartition('.')[0]
    return path

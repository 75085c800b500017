"""Let transformers' DETR-like detectors match all layers and images of a training step at once."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from .pairs import BroadcastDistances, match_pairs, to_device

Model = TypeVar('Model', bound=nn.Module)
Targets = list[dict[str, Tensor]]
# A layer's ``logits`` and ``pred_boxes``, among others.
Layer = dict[str, Any]
# The pairs of an image: predictions and their objects, (N,) each.
Pairs = tuple[Tensor, Tensor]

# Arguments of Tensor.to as Module.to calls it: the tensor, device, dtype and non_blocking.
TO_ARGUMENTS = 4
# RfDetrForSegmentationLoss is missing: its matcher draws random points of masks, and here would draw others.
LOSSES = (
    'ForObjectDetectionLoss',
    'ForSegmentationLoss',
    'DeformableDetrForObjectDetectionLoss',
    'DeformableDetrForSegmentationLoss',
    'RTDetrForObjectDetectionLoss',
    'DFineForObjectDetectionLoss',
    'Deimv2ForObjectDetectionLoss',
    'LwDetrForObjectDetectionLoss',
    'GroundingDinoForObjectDetectionLoss',
)


def match_once(model: Model) -> Model:
    """Change a transformers detector's loss so that matching all layers and images takes one GPU synchronisation.

    Losses and gradients are transformers' bit for bit, because transformers' code computes them. It waits four times
    for each layer to see if boxes are valid and once to match, and copies the pairs of every image separately. Here
    all costs and checks are copied in one transfer. Parts with their own waits keep them: the local losses of D-FINE
    and DEIMv2, DEIMv2's dense matching, Grounding DINO's choice of valid tokens and the matching of its encoder. In a
    process group (torchrun) the number of objects waits as well. Boxes of denoising queries are not checked.

    ``del model._loss_function`` undoes it. The state dict does not change.

    Args:
        model: A detector of transformers', whose loss is one of :data:`LOSSES`: that of DETR (and with masks),
            Conditional, DAB and Deformable DETR, RT-DETR (v1, v2), D-FINE, DEIMv2, LW-DETR, RF-DETR, YOLOS, Grounding
            DINO or MM Grounding DINO.

    Returns:
        The model.

    Raises:
        TypeError: The model has another loss.
    """
    loss = getattr(model, 'loss_function', None)
    if not isinstance(loss, MatchedOnceLoss):
        model.loss_function = MatchedOnceLoss(loss)  # type: ignore[assignment]
    return model


class MatchedOnceLoss:
    """Loss function of a transformers detector that matches all layers and images at once.

    Args:
        loss: The function, one of :data:`LOSSES`.

    Raises:
        TypeError: It is none of them.
    """

    def __init__(self, loss: Any) -> None:
        name = getattr(loss, '__name__', type(loss).__name__)
        module = str(getattr(loss, '__module__', ''))
        if name not in LOSSES or not module.startswith('transformers.loss.'):
            raise TypeError(
                f'match_once: {name} of {module} is no loss that matches once; those are {", ".join(LOSSES)}.'
            )
        self.loss = loss
        self._matched = _with_criteria(loss)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by transformers' own function, because ours can be found by name in no Python module."""
        return type(self), (self.loss,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the loss; arguments and result are those of transformers' function."""
        with WithoutWaits(), BroadcastDistances():
            return self._matched(*args, **kwargs)


def _with_criteria(loss: FunctionType) -> FunctionType:
    """Return a copy of a transformers loss function that builds our criteria instead of transformers'.

    It runs the code of ``loss`` with other global names, so that nothing of transformers changes.
    """
    names = {name: loss.__globals__.get(name) for name in loss.__code__.co_names}
    criteria = {name: _derived(kind) for name, kind in names.items() if hasattr(kind, 'get_loss')}
    return FunctionType(loss.__code__, {**loss.__globals__, **criteria}, loss.__name__, loss.__defaults__)


@functools.cache
def _derived(criterion: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a transformers criterion that matches all layers at once."""
    return type(f'MatchedOnce{criterion.__name__}', (MatchedOnceCriterion, criterion), {})


class MatchedOnceCriterion(nn.Module):
    """Mixin for a transformers criterion: it matches all layers first, and the criterion's code then takes the pairs.

    Attributes:
        matcher: The criterion's matcher, whose costs are transformers'.
    """

    matcher: Any

    def forward(self, outputs: Layer, targets: Targets) -> dict[str, Tensor]:
        """Match all layers at once, then compute the criterion's losses from the pairs.

        Args:
            outputs: The last layer, with the other layers in ``auxiliary_outputs`` and the encoder's in
                ``enc_outputs``, if there are any.
            targets: For each image ``class_labels`` ``(G,)`` and ``boxes`` ``(G, 4)``.

        Raises:
            ValueError: A predicted box or that of an object has a negative width or height, or is NaN.
        """
        layers = [*outputs.get('auxiliary_outputs', ()), outputs]
        if 'enc_outputs' in outputs:
            layers.append(outputs['enc_outputs'])
        costs = _on_host(self.matcher, layers, targets)
        # DEIMv2's dense matching takes the pairs one by one on the host.
        device = 'cpu' if getattr(self, 'use_dense_one_to_one', False) else outputs['logits'].device

        def match(layer: Layer, targets: Targets, group_detr: int = 1) -> list[Pairs]:
            sizes = [len(target['boxes']) for target in targets]
            return _pairs(costs[_key(layer)], sizes, group_detr, device)

        # The criterion has been built for this call alone.
        self.matcher.forward = match
        # Boxes of the layers have been checked with their costs.
        with DeferredChecks():
            return super().forward(outputs, targets)


def _key(layer: Layer) -> tuple[int, int]:
    """Return a key that identifies the predictions of a layer during one step."""
    return id(layer['logits']), id(layer['pred_boxes'])


def _on_host(matcher: Any, layers: Sequence[Layer], targets: Targets) -> dict[tuple[int, int], Tensor]:
    """Compute the matching costs ``(B, Q, G)`` of all layers and copy them to the CPU in one synchronisation.

    Raises:
        ValueError: A box is not valid.
    """
    with DeferredChecks() as checks:
        costs = {_key(layer): _costs(matcher, layer, targets) for layer in layers}
    numbers = [cost.flatten() for cost in costs.values()]
    valid = torch.stack(checks.found) if checks.found else torch.ones(1, dtype=torch.bool)
    on_host = torch.cat([*numbers, valid.to(numbers[0])]).cpu()
    *pieces, valid = on_host.split([*(len(cost) for cost in numbers), len(valid)])
    if not valid.all():
        raise ValueError(
            'pred_boxes and boxes must be (cx, cy, w, h) with w and h of at least 0, and no number may be NaN.'
        )
    return {key: piece.view(cost.shape) for (key, cost), piece in zip(costs.items(), pieces, strict=True)}


def _costs(matcher: Any, layer: Layer, targets: Targets) -> Tensor:
    """Compute the matching costs ``(B, Q, G)`` of one layer on its device, by the code of transformers' matcher."""
    forward = type(matcher).forward
    # Groups share the costs, and differ by their pairs.
    groups = dict(group_detr=1) if 'group_detr' in inspect.signature(forward).parameters else {}
    try:
        with _UntilTheyAreCopied():
            forward(matcher, layer, targets, **groups)
    except _Costs as found:
        return found.costs
    raise TypeError(f'match_once: {type(matcher).__name__} does not copy its costs to the host to match them.')


class _Costs(Exception):
    """Raised to end a matcher of transformers when it would copy its costs to the CPU; it carries the costs."""

    def __init__(self, costs: Tensor) -> None:
        super().__init__()
        self.costs = costs


class _UntilTheyAreCopied(TorchFunctionMode):
    """Torch function mode that raises :class:`_Costs` when a tensor is copied to the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is Tensor.cpu:
            raise _Costs(args[0])
        return func(*args, **(kwargs or {}))


def _pairs(cost: Tensor, sizes: Sequence[int], groups: int, device: torch.device | str) -> list[Pairs]:
    """Match each image's predictions and objects on the CPU, and move all pairs to a device in one copy.

    Args:
        cost: Costs ``(B, Q, G)`` of all images' predictions and all images' objects, on the CPU.
        sizes: Number of objects of each image.
        groups: Number of groups of queries that are matched separately.
        device: Device of the pairs.
    """
    width = cost.shape[1] // groups
    found = []
    for image, own in enumerate(cost.split(list(sizes), -1)):
        parts = [match_pairs(part) for part in own[image, : width * groups].split(width)]
        found.append(np.concatenate([part + [[width * group], [0]] for group, part in enumerate(parts)], 1))
    moved = to_device(torch.from_numpy(np.concatenate(found, 1)), device)
    return [(rows, columns) for rows, columns in moved.split([pairs.shape[1] for pairs in found], 1)]


class DeferredChecks(TorchFunctionMode):
    """Torch function mode in which ``mask.all()`` returns True without waiting, and its result is kept for later.

    transformers' overlaps of boxes ask in this way if boxes are valid, which waits for the device.

    Attributes:
        found: What would have been, ``()`` each, on the device.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Tensor] = []

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; if it is ``all`` over a whole tensor, keep its result and return True."""
        result = func(*args, **(kwargs or {}))
        if func is not Tensor.all or len(args) > 1 or kwargs:
            return result
        self.found.append(result)
        return True


class WithoutWaits(TorchFunctionMode):
    """Torch function mode in which numbers and modules are copied to the GPU without waiting for it."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function; a copy of numbers or of a module's tensors to a device does not wait for the GPU."""
        kwargs = dict(kwargs or {})
        if func is torch.as_tensor and 'device' in kwargs and not isinstance(args[0], Tensor):
            device = kwargs.pop('device')
            numbers = func(*args, **kwargs)
            # The number of objects, which the criterion takes back to the host, unless it adds up that of all
            # processes on the device.
            if kwargs.get('dtype') == torch.float and not _in_process_group():
                return numbers
            return to_device(numbers, device)
        if func is Tensor.to and len(args) == TO_ARGUMENTS and args[0].device.type == 'cpu':
            return func(*args[:3], True, **kwargs)
        return func(*args, **kwargs)


def _in_process_group() -> bool:
    """Return True if there is a process group, over which the number of objects is summed on the device."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()

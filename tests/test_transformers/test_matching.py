"""transformers' losses with one wait for the device at a step."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

import transformers
from helpers.hub_models import build, feed
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mmgate.speed.matching import transformers as matching
from mmgate.speed.matching.transformers import LOSSES, MatchedOnceLoss, match_once

REAL_TIME = dict(num_denoising=10)
GROUPS = dict(group_detr=2)
DETECTORS: dict[str, tuple[str, dict[str, Any]]] = {
    'detr': ('detr', dict(auxiliary_loss=True)),
    'detr_one_layer': ('detr', {}),
    'deformable_detr': ('deformable_detr', dict(auxiliary_loss=True)),
    'rt_detr': ('rt_detr', REAL_TIME),
    'rt_detr_without_denoising': ('rt_detr', {}),
    'rt_detr_softmax': ('rt_detr', dict(use_focal_loss=False)),
    'rt_detr_v2': ('rt_detr_v2', REAL_TIME),
    'd_fine': ('d_fine', REAL_TIME),
    'deimv2': ('deimv2', REAL_TIME),
    'deimv2_dense': ('deimv2', dict(use_dense_one_to_one=True)),
    'lw_detr': ('lw_detr', {}),
    'lw_detr_groups': ('lw_detr', GROUPS),
    'rf_detr': ('rf_detr', GROUPS),
    'grounding_dino': ('grounding_dino', dict(auxiliary_loss=True)),
    'mm_grounding_dino': ('mm_grounding_dino', dict(auxiliary_loss=True)),
}
# Objects of each of two images.
COUNTS = {'usual': (3, 5), 'one_without': (4, 0), 'none': (0, 0), 'more_than_queries': (14, 2)}


def labels(name: str, counts: tuple[int, ...]) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    classes = 1 if 'grounding' in name else 3
    return [
        dict(
            class_labels=torch.randint(classes, (count,), generator=generator),
            boxes=torch.rand(count, 4, generator=generator) * 0.4 + 0.1,
        )
        for count in counts
    ]


def step(name: str, counts: tuple[int, ...], once: bool) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """Return loss, losses and gradients of a training step."""
    kind, options = DETECTORS[name]
    model = build(kind, **options).train()
    if once:
        assert match_once(model) is model
    torch.manual_seed(2)
    found = model(**feed(kind), labels=labels(kind, counts))
    found.loss.backward()
    grads = {key: p.grad for key, p in model.named_parameters() if p.grad is not None}
    return found.loss.detach(), {key: x.detach() for key, x in found.loss_dict.items()}, grads


@pytest.mark.parametrize('case', COUNTS)
@pytest.mark.parametrize('name', DETECTORS)
def test_losses_and_gradients_are_transformers_bit_for_bit(name: str, case: str) -> None:
    theirs, ours = (step(name, COUNTS[case], once) for once in (False, True))
    assert ours[1].keys() == theirs[1].keys() and ours[2].keys() == theirs[2].keys()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert len(theirs[2]) > 20


@pytest.mark.parametrize('name', ['ForSegmentationLoss', 'DeformableDetrForSegmentationLoss'])
def test_losses_of_masks_are_transformers_bit_for_bit(name: str) -> None:
    from transformers.loss import loss_utils

    loss = getattr(loss_utils, name)
    config = transformers.DeformableDetrConfig(num_labels=3, auxiliary_loss=True, decoder_layers=2)
    targets = labels('detr', (3, 2))
    for target in targets:
        target['masks'] = (torch.rand(len(target['boxes']), 16, 16) > 0.5).float()
    found = []
    shapes = dict(logits=(2, 8, 4), boxes=(2, 8, 4), masks=(2, 8, 4, 4), classes=(2, 2, 8, 4), coordinates=(2, 2, 8, 4))
    given = {key: torch.rand(*shape) for key, shape in shapes.items()}
    if name.startswith('Deformable'):
        given['logits'] = given['logits'][..., :3]
        given['classes'] = given['classes'][..., :3]
    for function in (loss, MatchedOnceLoss(loss)):
        logits, boxes, masks, *layers = [x.clone().requires_grad_() for x in given.values()]
        total, losses, _ = function(logits, targets, torch.device('cpu'), boxes, masks, config, *layers)
        grads = torch.autograd.grad(total, [logits, boxes, masks, *layers])
        found.append((total, losses, grads))
    torch.testing.assert_close(*found, rtol=0, atol=0)


class OnDevice(Tensor):
    """A tensor as on a device: it counts what would wait for it."""

    waits: ClassVar[Counter[str]] = Counter()
    always = ('cpu', 'numpy', 'item', 'tolist', '__bool__', '__int__', '__float__', 'masked_select', 'nonzero', 'equal')

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        index = args[1] if name in ('__getitem__', '__setitem__') else ()
        chosen = [x for x in (index if isinstance(index, tuple) else (index,)) if isinstance(x, Tensor)]
        copied = any(type(x) is Tensor for x in chosen)
        if name in cls.always or copied or any(x.dtype == torch.bool for x in chosen):
            cls.waits[name] += 1
        found = super().__torch_function__(func, types, args, kwargs)
        return found.as_subclass(Tensor) if name == 'cpu' else found


class MadeThere(TorchFunctionMode):
    """Mode in which tensors that are made on a device count as there."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found.as_subclass(OnDevice) if func in (torch.arange, torch.zeros, torch.full) else found


def waits(name: str, once: bool, monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Return what waits for the device while a detector's loss is computed."""
    kind, options = DETECTORS[name]
    model = build(kind, **options).train()
    if once:
        match_once(model)
    loss = model.loss_function

    def on_device(*args: Any, **kwargs: Any) -> Any:
        moved = tree_map(lambda x: x.as_subclass(OnDevice) if isinstance(x, Tensor) else x, (args, kwargs))
        OnDevice.waits = Counter()
        with MadeThere():
            return loss(*moved[0], **moved[1])

    model.loss_function = on_device
    usual = matching.to_device
    monkeypatch.setattr(matching, 'to_device', lambda x, device: usual(x, device).as_subclass(OnDevice))
    model(**feed(kind), labels=labels(kind, (3, 5)))
    return OnDevice.waits


def test_in_a_process_group_the_number_of_objects_waits_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added up over the processes on the device."""
    monkeypatch.setattr(matching, '_in_process_group', lambda: True)
    assert waits('deformable_detr', True, monkeypatch) == {'cpu': 1, 'item': 1}


WAITING = {'d_fine', 'deimv2', 'deimv2_dense', 'grounding_dino', 'mm_grounding_dino'}


@pytest.mark.parametrize('name', sorted(set(DETECTORS) - WAITING))
def test_a_step_waits_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert waits(name, True, monkeypatch) == {'cpu': 1}
    # a matrix of costs and four checks for each layer, and indices of each image
    assert waits(name, False, monkeypatch).total() > 5


@pytest.mark.parametrize('name', sorted(WAITING))
def test_parts_with_their_own_waits_keep_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They match once all the same, Grounding DINO's encoder a second time."""
    ours = waits(name, True, monkeypatch)
    theirs = waits(name, False, monkeypatch)
    assert ours['cpu'] == (2 if 'grounding' in name else 1) < theirs['cpu']
    assert ours.total() < theirs.total()


@pytest.mark.parametrize('value', [-0.1, torch.nan], ids=str)
@pytest.mark.parametrize('where', ['boxes', 'pred_boxes'])
def test_boxes_that_are_not_valid_are_refused_as_before(where: str, value: float) -> None:
    logits = torch.randn(2, 6, 4)
    given = dict(pred_boxes=torch.rand(2, 6, 4), boxes=torch.rand(2, 4))
    given[where].view(-1, 4)[1, 2] = value
    targets = [dict(class_labels=torch.tensor([0, 2]), boxes=given['boxes']) for _ in range(2)]
    loss = build('detr').loss_function
    for function in (loss, MatchedOnceLoss(loss)):
        with pytest.raises(ValueError, match='boxes'):
            function(logits, targets, torch.device('cpu'), given['pred_boxes'], transformers.DetrConfig(num_labels=3))


def test_costs_are_summed_without_cdist(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch._VF, 'cdist', lambda *_: pytest.fail('torch.cdist was called'))
    step('detr', (3, 5), True)


def test_a_model_stays_itself() -> None:
    """Matched twice it is matched once; it can be copied and pickled; and it can be as it was again."""
    model = build('detr', auxiliary_loss=True)
    vanilla = model.loss_function
    keys = list(model.state_dict())
    matched = match_once(model).loss_function
    assert match_once(model).loss_function is matched and matched.loss is vanilla
    assert list(model.state_dict()) == keys
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    assert isinstance(copied.loss_function, MatchedOnceLoss)
    fed = dict(feed('detr'), labels=labels('detr', (3, 5)))
    assert torch.equal(copied.eval()(**fed).loss, model.eval()(**fed).loss)
    del model._loss_function
    assert model.loss_function is vanilla


@pytest.mark.parametrize('model', [nn.Linear(1, 1), 'vit', 'mask2former'], ids=['no_loss', 'vit', 'mask2former'])
def test_other_losses_are_refused(model: Any) -> None:
    with pytest.raises(TypeError, match='is no loss that matches once; those are ForObjectDetectionLoss'):
        match_once(build(model) if isinstance(model, str) else model)


def test_every_loss_of_detectors_is_known() -> None:
    """But the one whose matcher draws random points."""
    from transformers.loss.loss_utils import LOSS_MAPPING

    names = {loss.__name__ for loss in LOSS_MAPPING.values()}
    detect = {name for name in names if 'ObjectDetection' in name or 'Detr' in name or name == 'ForSegmentationLoss'}
    assert detect - {'RfDetrForSegmentationLoss'} == set(LOSSES)

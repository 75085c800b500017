"""Heads of DETR's family and Mask2Former's have mmdet's and mmseg's losses with one wait for the device at a step."""

from __future__ import annotations

import pickle
from copy import deepcopy
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from helpers.matching import Waits, objects
from helpers.memory import Memory
from mmdet.models.dense_heads import detr_head, dino_head, mask2former_head, maskformer_head
from mmdet.models.task_modules.assigners import HungarianAssigner, MaxIoUAssigner
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import Tensor, nn

import mmgate  # noqa: F401
from mmgate.errors import ConfigError
from mmgate.mm.config_file import read_config
from mmgate.speed.hooks import MatchOnceHook
from mmgate.speed.matching import head as heads
from mmgate.speed.matching import masks
from mmgate.speed.matching.model import match_once

CLASSES, QUERIES, LAYERS = 5, 20, 3
SEGMENTOR = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'
OF_SCORES = dict(type='FocalLossCost', weight=2.0)
OF_BOXES = [dict(type='BBoxL1Cost', weight=5.0, box_format='xywh'), dict(type='IoUCost', iou_mode='giou', weight=2.0)]
FOCAL = dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0)
SOFTMAX = dict(type='CrossEntropyLoss', bg_cls_weight=0.1, use_sigmoid=False, class_weight=1.0)
QUALITY = dict(type='QualityFocalLoss', use_sigmoid=True, beta=2.0, loss_weight=1.0)


def of_detector(kind: str, costs: Any = (OF_SCORES, *OF_BOXES), **options: Any) -> dict[str, Any]:
    assigner = dict(type='HungarianAssigner', match_costs=costs if isinstance(costs, dict) else [*costs])
    shared = dict(num_classes=CLASSES, embed_dims=16, loss_cls=FOCAL, train_cfg=dict(assigner=assigner))
    return dict(shared, type=f'mmdet.{kind}', **options)


TWO_STAGE = dict(as_two_stage=True, num_pred_layer=LAYERS + 1, sync_cls_avg_factor=True)
HEADS = {
    'DETR': of_detector('DETRHead', [dict(type='ClassificationCost'), *OF_BOXES]) | dict(loss_cls=SOFTMAX),
    'Conditional': of_detector('ConditionalDETRHead', dict(type='BBoxL1Cost')),
    'DAB': of_detector('DABDETRHead', [dict(type='BBoxL1Cost'), dict(type='IoUCost', iou_mode='iou')]),
    'Deformable': of_detector('DeformableDETRHead', num_pred_layer=LAYERS),
    'Deformable_twostage': of_detector('DeformableDETRHead', **TWO_STAGE),
    'DINO': of_detector('DINOHead', **TWO_STAGE),
    'Mask2Former': {},
}


def build(name: str, *, matched: bool) -> Any:
    cfg = deepcopy(HEADS[name])
    init_default_scope('mmdet')
    if name == 'Mask2Former':
        init_default_scope('mmseg')
        cfg = read_config(SEGMENTOR).model.decode_head
        cfg.update(type='mmseg.Mask2FormerHead', num_queries=QUERIES, num_classes=CLASSES)
        cfg.loss_cls.class_weight = [1.0] * CLASSES + [0.1]
        cfg.train_cfg.num_points = 40
    torch.manual_seed(0)
    head = MODELS.build(cfg | dict(type='mmgate.MatchedOnce', host=cfg['type']) if matched else cfg)
    head.init_weights()
    return head


def loss_inputs(name: str, counts: tuple[int, ...]) -> tuple[list[Tensor], list[Any]]:
    """Return predictions that have gradients, and the rest of what ``loss_by_feat`` takes; images differ in size."""
    generator = torch.Generator().manual_seed(len(counts))

    def predicted(*shape: int) -> list[Tensor]:
        scores = torch.randn(*shape, CLASSES + (name in ('DETR', 'Mask2Former')), generator=generator)
        places = torch.rand(*shape, 4, generator=generator) * 0.5 + 0.25
        if name == 'Mask2Former':
            places = torch.randn(*shape, 8, 9, generator=generator)
        return [scores.requires_grad_(), places.requires_grad_()]

    truth: list[Any] = [objects(generator, count, CLASSES) for count in counts]
    metas = [dict(img_shape=(64 + number, 96), img_id=number) for number in range(len(counts))]
    noised = max(counts) * 4 if name == 'DINO' else 0
    layers = predicted(LAYERS, len(counts), QUERIES + noised)
    if name == 'Deformable':
        return layers, [None, None, truth, metas]
    if 'DINO' not in name and 'twostage' not in name:
        return layers, [truth, metas]
    denoising = [dict(num_denoising_queries=noised, num_denoising_groups=2)] if noised or name == 'DINO' else []
    return [*layers, *predicted(len(counts), 40)], [truth, metas, *denoising]


def losses_of(head: Any, name: str, counts: tuple[int, ...]) -> tuple[dict[str, Tensor], list[Any]]:
    """Return the losses of a head, whose points are drawn from one seed, and the gradients of its predictions."""
    leaves, rest = loss_inputs(name, counts)
    torch.manual_seed(0)
    losses = head.loss_by_feat(*leaves, *rest)
    sum(loss.sum() for loss in losses.values()).backward()
    return {name: loss.detach().view(()) for name, loss in losses.items()}, [leaf.grad for leaf in leaves]


@pytest.mark.parametrize('counts', [(3, 0, 5), (30, 2), (1,), (0, 0)], ids=['usual', 'many', 'one', 'none'])
@pytest.mark.parametrize('name', HEADS)
def test_losses_are_mmdets(name: str, counts: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside other processes, too, whose mean is another number, and which wait for one that has no object."""
    for module in (detr_head, dino_head, maskformer_head, mask2former_head):
        monkeypatch.setattr(module, 'reduce_mean', lambda own: 3 * own + 0.5, raising=False)
    ours = Mock(side_effect=lambda own: 3 * own + 0.5)
    for module in (heads, masks):
        monkeypatch.setattr(module, 'reduce_mean', ours)
    expected, actual = (losses_of(build(name, matched=matched), name, counts) for matched in (False, True))
    assert list(actual[0]) == list(expected[0])
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    assert ours.call_count == 1


@pytest.mark.parametrize('subclass', [False, True])
@pytest.mark.parametrize('name', ['DETR', 'Deformable_twostage', 'DINO', 'Mask2Former'])
def test_a_step_waits_once(name: str, subclass: bool) -> None:
    head = build(name, matched=True)
    if subclass:
        head.__class__ = type('Another', (type(head),), {})
    leaves, rest = loss_inputs(name, (3, 0, 5))
    with Waits() as waits:
        head.loss_by_feat(*leaves, *rest)
    assert waits.counts == {'cpu': 1}


@pytest.mark.parametrize('count', [10, 300])
def test_mask2former_needs_no_more_memory(count: int) -> None:
    """Its layers follow each other, because the points of all would take much more."""
    _, rest = loss_inputs('Mask2Former', (count, count))
    leaves = [torch.randn(6, 2, QUERIES, *shape, requires_grad=True) for shape in ((CLASSES + 1,), (16, 16))]
    peaks = []
    for matched in (False, True):
        head = build('Mask2Former', matched=matched)
        head.num_points = 512
        with Memory() as memory:
            sum(head.loss_by_feat(*leaves, *rest).values()).sum().backward()
        peaks.append(memory.peak)
    assert peaks[1] <= 1.05 * peaks[0], peaks


@pytest.mark.parametrize('value', [torch.nan, -torch.inf, torch.inf])
def test_a_cost_that_is_no_number_is_named_with_layer_and_image(value: float) -> None:
    head = build('Conditional', matched=True)
    (scores, boxes), (truth, metas) = loss_inputs('Conditional', (3, 0, 5))
    metas = [dict(meta, img_path=f'{number}.jpg') for number, meta in enumerate(metas)]
    boxes = boxes.detach()
    boxes[1, 2, 4:, 0] = value
    said = rf'layer 2 of {LAYERS}, image 2\.jpg cannot be .*: BBoxL1Cost is NaN or infinite in 80 of 100.* bfloat16'
    with pytest.raises(ConfigError, match=said):
        head.loss_by_feat(scores, boxes, truth, metas)
    # One that leaves a match is no error.
    boxes[1, 2, 4, 0] = 0.5
    boxes[1, 2, 5:, 0] = torch.inf
    head.loss_by_feat(scores, boxes, truth, metas)


def test_classes_become_masks_as_in_mmseg() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for classes in (3, CLASSES, 1):
        labels = torch.randint(classes, (1, 8, 9), generator=generator)
        labels[torch.rand(1, 8, 9, generator=generator) > 0.7] = 255
        samples.append(SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=dict(img_shape=(8, 9))))
    samples.append(SegDataSample(gt_sem_seg=PixelData(data=torch.full((1, 8, 9), 255))))
    expected, _ = build('Mask2Former', matched=False)._seg_data_to_instance_data(samples)
    with Waits() as waits:
        actual, metas = build('Mask2Former', matched=True)._seg_data_to_instance_data(samples)
    assert metas == [sample.metainfo for sample in samples]
    for one, two in zip(actual, expected, strict=True):
        order = two.labels.argsort()
        assert torch.equal(one.labels, two.labels[order]) and torch.equal(one.masks, two.masks[order])
        assert one.masks.dtype == two.masks.dtype and one.labels.dtype == two.labels.dtype
    assert waits.counts['cpu'] == 1


def test_the_result_is_the_host() -> None:
    head, plain = (build('DETR', matched=matched) for matched in (True, False))
    assert isinstance(head, type(plain)) and list(head.state_dict()) == list(plain.state_dict())
    assert head.bg_cls_weight == plain.bg_cls_weight != 0
    assert type(deepcopy(head)) is type(pickle.loads(pickle.dumps(head))) is type(head) is type(match_once(head))
    layers, rest = loss_inputs('DETR', (3, 0, 5))
    single = [x[-1] for x in layers]  # as someone's own head may call it
    torch.testing.assert_close(*(one.loss_by_feat_single(*single, *rest) for one in (head, plain)))


def overridden(head: Any, name: str, change: Any) -> Any:
    """Give a head a subclass of its class, whose method changes the result of its base's."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        return change(getattr(super(cls, self), name)(*args, **kwargs))

    cls: Any = type('Another', (type(head),), {name: method})
    head.__class__ = cls
    return head


OVERRIDDEN = {
    'losses': ('DETR', 'loss_by_feat_single', lambda losses: tuple(2 * loss for loss in losses)),
    'targets': ('DETR', '_get_targets_single', lambda found: (found[0], 0.5 * found[1], *found[2:])),
    'of masks': ('Mask2Former', '_loss_by_feat_single', lambda losses: tuple(3 * loss for loss in losses)),
}


@pytest.mark.parametrize('part', OVERRIDDEN)
def test_what_a_subclass_of_a_changed_head_overrides_is_called(part: str) -> None:
    name, method, change = OVERRIDDEN[part]
    changed, expected = (overridden(build(name, matched=matched), method, change) for matched in (True, False))
    torch.testing.assert_close(losses_of(changed, name, (3, 0, 5)), losses_of(expected, name, (3, 0, 5)))


class OtherAssigner(HungarianAssigner):
    def assign(self, *args: Any, **kwargs: Any) -> Any: ...


def with_part(name: str, part: str, value: Any) -> Any:
    head = build(name, matched=False)
    setattr(head, part, value())
    return head


UNFIT = {
    'no such head': lambda: MODELS.build(dict(type='mmdet.RetinaHead', num_classes=3, in_channels=4)),
    'a loss': lambda: with_part('DINO', 'loss_cls', lambda: MODELS.build(QUALITY)),
    'an assigner': lambda: with_part('DETR', 'assigner', lambda: MaxIoUAssigner(0.5, 0.4)),
    'its assignment': lambda: with_part('DETR', 'assigner', lambda: OtherAssigner(dict(type='BBoxL1Cost'))),
    'computing with losses': lambda: overridden(build('Deformable', matched=False), 'loss_by_feat', dict),
    'losses of masks': lambda: overridden(build('Mask2Former', matched=False), '_loss_by_feat_single', tuple),
}


@pytest.mark.parametrize('name', UNFIT)
def test_what_does_not_fit_stays_as_it_is_which_the_log_says(name: str) -> None:
    init_default_scope('mmdet')
    head = UNFIT[name]()
    kind = type(head)
    message = 'no head that derives from mmdet' if name == 'no such head' else "than mmdet's usual ones, or does not"
    with pytest.raises(TypeError, match=message):
        match_once(head)
    said: list[str] = []
    run: Any = SimpleNamespace(model=nn.ModuleDict(dict(head=head)), logger=SimpleNamespace(info=said.append))
    MatchOnceHook().before_train(run)
    assert type(head) is kind and len(said) == 1 and message in said[0]

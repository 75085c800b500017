"""mmdet's losses with one wait for the device at a step."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.matching import CLASSES, COSTS, LAYERS, META, QUERIES, Waits, objects
from mmdet.models.dense_heads import DeformableDETRHead, detr_head
from mmdet.models.task_modules.assigners import HungarianAssigner
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor

import mmgate  # noqa: F401
from mmgate.errors import ConfigError
from mmgate.speed.matching import head as heads
from mmgate.speed.matching.model import match_once

FOCAL = dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0)
PLAIN = dict(num_classes=CLASSES, embed_dims=16)
SOFTMAX = dict(PLAIN, loss_cls=dict(type='CrossEntropyLoss', bg_cls_weight=0.1, use_sigmoid=False, class_weight=1.0))
SIGMOID = dict(
    **PLAIN,
    loss_cls=FOCAL,
    train_cfg=dict(assigner=dict(type='HungarianAssigner', match_costs=COSTS['focal'])),
)


QUALITY = dict(type='QualityFocalLoss', use_sigmoid=True, beta=2.0, loss_weight=1.0)
TWO_STAGE = dict(SIGMOID, as_two_stage=True, num_pred_layer=LAYERS + 1, sync_cls_avg_factor=True)
HEADS = {
    'DETR': ('DETRHead', SOFTMAX),
    'Conditional': ('ConditionalDETRHead', dict(SIGMOID)),
    'DAB': ('DABDETRHead', dict(SIGMOID)),
    'Deformable': ('DeformableDETRHead', dict(SIGMOID, num_pred_layer=LAYERS)),
    'Deformable_twostage': ('DeformableDETRHead', TWO_STAGE),
    'DINO': ('DINOHead', TWO_STAGE),
}


@pytest.fixture(autouse=True)
def _scope() -> None:
    init_default_scope('mmdet')


def build(name: str, **more: Any) -> Any:
    kind, options = HEADS[name]
    torch.manual_seed(0)
    if 'host' in more:
        more['host'] = f'mmdet.{kind}'
    head = MODELS.build(dict(type=f'mmdet.{kind}', **deepcopy(options)) | more)
    head.init_weights()
    return head


def loss_inputs(name: str, counts: tuple[int, ...]) -> tuple[list[Tensor], list[Any]]:
    """Return predictions that have gradients and the rest of what ``loss_by_feat`` takes."""
    generator = torch.Generator().manual_seed(len(counts))
    channels = CLASSES + (name == 'DETR')

    def predicted(*shape: int) -> list[Tensor]:
        scores = torch.randn(*shape, channels, generator=generator)
        boxes = torch.rand(*shape, 4, generator=generator) * 0.5 + 0.25
        return [scores.requires_grad_(), boxes.requires_grad_()]

    truth: list[Any] = [[objects(generator, count) for count in counts], [META] * len(counts)]
    noised = max(counts) * 4 if 'DINO' in name else 0
    layers = predicted(LAYERS, len(counts), QUERIES + noised)
    if name == 'Deformable':
        return layers, [None, None, *truth]
    if name.startswith(('DETR', 'Conditional', 'DAB')):
        return layers, truth
    denoising = [dict(num_denoising_queries=noised, num_denoising_groups=2)] if 'DINO' in name else []
    return [*layers, *predicted(len(counts), 40)], [*truth, *denoising]


CASES = {'usual': (3, 0, 5), 'more_than_queries': (20, 2), 'one': (1,), 'none': (0, 0)}


@pytest.mark.parametrize('case', CASES)
@pytest.mark.parametrize('name', HEADS)
def test_losses_are_mmdets(name: str, case: str) -> None:
    results = []
    for head in (build(name), build(name, type='mmgate.MatchedOnce', host='')):
        leaves, rest = loss_inputs(name, CASES[case])
        losses = head.loss_by_feat(*leaves, *rest)
        sum(loss.sum() for loss in losses.values()).backward()
        results.append(({k: v.detach().view(()) for k, v in losses.items()}, [leaf.grad for leaf in leaves]))
    (expected, grads), (actual, our_grads) = results
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('case', ['usual', 'none'])
@pytest.mark.parametrize('name', ['DETR', 'Deformable_twostage'])
def test_losses_are_mmdets_beside_other_processes(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The mean over processes is not their own number, and may be less than 1."""
    for module in (detr_head, heads):
        monkeypatch.setattr(module, 'reduce_mean', lambda own: 3 * own + 0.5)
    test_losses_are_mmdets(name, case)


def test_a_cost_that_is_no_number_is_named_with_layer_and_image() -> None:
    head = build('DETR', type='mmgate.MatchedOnce', host='')
    layers, (gts, metas) = loss_inputs('DETR', (3, 0, 5))
    metas = [dict(meta, img_path=f'{number}.jpg') for number, meta in enumerate(metas)]
    scores, boxes = (given.detach() for given in layers)
    scores[1, 2, 4] = torch.nan
    said = f'layer 2 of {LAYERS}, image 2.jpg cannot be .*: ClassificationCost is NaN or infinite in 5 of'
    with pytest.raises(ConfigError, match=said):
        head.loss_by_feat(scores, boxes, gts, metas)


def test_layers_matched_as_one_are_matched_alike() -> None:
    """Layers that share their objects are one batch, and each pair is the one that mmdet's assigner finds."""
    metas = [META, dict(img_shape=(48, 50)), META]
    for seed, costs in enumerate(('focal', 'softmax', 'one', 'corners_and_iou') * 5):
        assigner = HungarianAssigner(deepcopy(COSTS[costs]))
        torch.manual_seed(seed)
        gts, other = ([objects(torch.default_generator, count) for count in (4, 0, 7)] for _ in range(2))
        layers = [
            heads.Layer(torch.randn(3, queries, CLASSES), torch.rand(3, queries, 4), given, metas)
            for queries, given in ((9, gts), (9, gts), (30, gts), (9, other), (3, gts))
        ]
        batch = heads.Batch(layers)
        for index, (layer, found) in enumerate(zip(layers, heads.match(assigner, batch), strict=True)):
            for image, (rows, columns) in enumerate(found):
                height, width = metas[image]['img_shape']
                corners = bbox_cxcywh_to_xyxy(layer.boxes[image]) * torch.tensor([width, height, width, height])
                predicted = InstanceData(scores=layer.scores[image], bboxes=corners)
                expected = assigner.assign(predicted, layer.objects[image], metas[image]).gt_inds
                rows = rows - image * batch.starts[-1] - batch.starts[index]
                assert expected.nonzero().flatten().tolist() == rows.tolist()
                assert (expected[rows] - 1).tolist() == (columns - batch.first_objects[index][image]).tolist()


@pytest.mark.parametrize('subclass', [False, True])
@pytest.mark.parametrize('name', ['DETR', 'Deformable_twostage', 'DINO'])
def test_a_step_waits_once(name: str, subclass: bool) -> None:
    head = build(name, type='mmgate.MatchedOnce', host='')
    if subclass:
        head.__class__ = type('Another', (type(head),), {})
    leaves, rest = loss_inputs(name, (3, 0, 5))
    with Waits() as waits:
        head.loss_by_feat(*leaves, *rest)
    assert waits.counts == {'cpu': 1}


def doubled(self: Any, *args: Any, **kwargs: Any) -> Any:
    return tuple(2 * loss for loss in super(type(self), self).loss_by_feat_single(*args, **kwargs))


def unweighted(self: Any, *args: Any) -> Any:
    labels, weights, *rest = super(type(self), self)._get_targets_single(*args)
    return labels, 0.5 * weights, *rest


@pytest.mark.parametrize(
    'overridden', [dict(loss_by_feat_single=doubled), dict(_get_targets_single=unweighted)], ids=['losses', 'targets']
)
def test_what_a_subclass_of_a_changed_head_overrides_is_called(overridden: dict[str, Any]) -> None:
    results = []
    for more in ({}, dict(type='mmgate.MatchedOnce', host='')):
        head = build('DETR', **more)
        head.__class__ = type('Another', (type(head),), overridden)
        leaves, rest = loss_inputs('DETR', (3, 0, 5))
        results.append(head.loss_by_feat(*leaves, *rest))
    torch.testing.assert_close(results[1], results[0])


def test_a_head_that_computes_with_its_losses_is_refused() -> None:
    class Weighted(DeformableDETRHead):
        def loss_by_feat(self, *args: Any, **kwargs: Any) -> Any:
            losses = super().loss_by_feat(*args, **kwargs)
            return losses | dict(loss_iou=losses['loss_iou'] * 2)

    with pytest.raises(TypeError, match="losses or costs other than mmdet's"):
        match_once(Weighted(**deepcopy(HEADS['Deformable'][1])))


def test_the_result_is_the_host() -> None:
    head = build('DETR', type='mmgate.MatchedOnce', host='')
    plain = build('DETR')
    assert isinstance(head, type(plain)) and list(head.state_dict()) == list(plain.state_dict())
    assert head.bg_cls_weight == plain.bg_cls_weight != 0
    assert type(deepcopy(head)) is type(head)
    layers, (gts, metas) = loss_inputs('DETR', (3, 0, 5))
    single = [x[-1] for x in layers]  # as someone's own head may call it
    torch.testing.assert_close(*(one.loss_by_feat_single(*single, gts, metas) for one in (head, plain)))


@pytest.mark.parametrize(
    ('config', 'message'),
    [
        (dict(host='mmdet.RetinaHead', num_classes=3, in_channels=4), 'RetinaHead is no head that derives'),
        (dict(host='mmdet.DINOHead', **(TWO_STAGE | dict(loss_cls=QUALITY))), "losses or costs other than mmdet's"),
        (
            dict(
                host='mmdet.DETRHead',
                **SOFTMAX,
                train_cfg=dict(assigner=dict(type='mmdet.MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4)),
            ),
            'does not assign as HungarianAssigner does',
        ),
    ],
    ids=['another_head', 'another_loss', 'another_assigner'],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MODELS.build(dict(type='mmgate.MatchedOnce', **deepcopy(config)))

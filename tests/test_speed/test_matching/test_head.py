"""mmdet's losses with one wait for the device at a step."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.matching import BOXES, CLASSES, COSTS, LAYERS, META, QUERIES, Waits, objects
from mmdet.models.dense_heads import detr_head
from mmdet.models.task_modules.assigners import BBoxL1Cost
from mmdet.structures.bbox import bbox_cxcywh_to_xyxy
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor

import mmgate  # noqa: F401
from mmgate.errors import ConfigError
from mmgate.speed.matching import assigner as assigners
from mmgate.speed.matching import head as heads

FOCAL = dict(type='FocalLoss', use_sigmoid=True, gamma=2.0, alpha=0.25, loss_weight=2.0)
PLAIN = dict(num_classes=CLASSES, embed_dims=16)
SOFTMAX = dict(PLAIN, loss_cls=dict(type='CrossEntropyLoss', bg_cls_weight=0.1, use_sigmoid=False, class_weight=1.0))
SIGMOID = dict(
    **PLAIN,
    loss_cls=FOCAL,
    train_cfg=dict(assigner=dict(type='HungarianAssigner', match_costs=COSTS['focal'])),
)


class _OwnCost(BBoxL1Cost):
    """A user's cost, which is computed image by image."""


OWN_COST = dict(SIGMOID, train_cfg=deepcopy(SIGMOID['train_cfg']))
OWN_COST['train_cfg']['assigner']['match_costs'].append(dict(type=_OwnCost))
QUALITY = dict(type='QualityFocalLoss', use_sigmoid=True, beta=2.0, loss_weight=1.0)
TWO_STAGE = dict(SIGMOID, as_two_stage=True, num_pred_layer=LAYERS + 1, sync_cls_avg_factor=True)
HEADS = {
    'DETR': ('DETRHead', SOFTMAX),
    'Conditional': ('ConditionalDETRHead', dict(SIGMOID)),
    'Conditional_own_cost': ('ConditionalDETRHead', OWN_COST),
    'DAB': ('DABDETRHead', dict(SIGMOID)),
    'Deformable': ('DeformableDETRHead', dict(SIGMOID, num_pred_layer=LAYERS)),
    'Deformable_twostage': ('DeformableDETRHead', TWO_STAGE),
    'DINO': ('DINOHead', TWO_STAGE),
    'DINO_quality': ('DINOHead', dict(TWO_STAGE, loss_cls=QUALITY)),
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


def test_grounding_dino_keeps_its_own_losses() -> None:
    costs = [dict(type='BinaryFocalLossCost', weight=2.0), *BOXES]
    options = dict(TWO_STAGE, train_cfg=dict(assigner=dict(type='HungarianAssigner', match_costs=costs)))
    options['contrastive_cfg'] = dict(max_text_len=8)
    results = []
    for more in (dict(type='mmdet.GroundingDINOHead'), dict(type='mmgate.MatchedOnce', host='mmdet.GroundingDINOHead')):
        head = MODELS.build(dict(deepcopy(options), **more))
        generator = torch.Generator().manual_seed(0)
        head.text_masks = torch.ones(2, 6, dtype=torch.bool)
        gts = [objects(generator, count) for count in (3, 2)]
        for one in gts:
            one.positive_maps = torch.nn.functional.one_hot(one.labels, 8).float()
            one.text_token_mask = torch.ones(len(one), 8, dtype=torch.bool)
            one.text_token_mask[:, 6:] = False
        shapes = (LAYERS, 2, QUERIES + 12), (2, 20)
        given = [torch.rand(*shape, width, generator=generator) for shape in shapes for width in (8, 4)]
        meta = dict(num_denoising_queries=12, num_denoising_groups=2)
        results.append(head.loss_by_feat(*given, gts, [META] * 2, meta))
    torch.testing.assert_close(results[1], results[0])


def test_layers_matched_as_one_are_matched_alike() -> None:
    """Layers that share their objects are one batch, and each pair is the one that mmdet's assigner finds."""
    head = build('Deformable', type='mmgate.MatchedOnce', host='')
    metas = [META, dict(img_shape=(48, 50)), META]
    for seed in range(20):
        torch.manual_seed(seed)
        gts, other = ([objects(torch.default_generator, count) for count in (4, 0, 7)] for _ in range(2))
        layers = [
            heads.Layer(torch.randn(3, queries, CLASSES), torch.rand(3, queries, 4), given, metas)
            for queries, given in ((9, gts), (9, gts), (30, gts), (9, other), (3, gts))
        ]
        for layer, found in zip(layers, heads.match(head.assigner, heads.Batch(layers)), strict=True):
            for image, (rows, columns) in enumerate(found):
                height, width = metas[image]['img_shape']
                corners = bbox_cxcywh_to_xyxy(layer.boxes[image]) * torch.tensor([width, height, width, height])
                predicted = InstanceData(scores=layer.scores[image], bboxes=corners)
                expected = head.assigner.assign(predicted, layer.objects[image], metas[image]).gt_inds
                assert expected.nonzero().flatten().tolist() == rows.tolist()
                assert (expected[rows] - 1).tolist() == columns.tolist()


@pytest.mark.parametrize('name', ['DETR', 'Deformable', 'Deformable_twostage', 'DINO'])
def test_a_step_waits_once(name: str) -> None:
    head = build(name, type='mmgate.MatchedOnce', host='')
    leaves, rest = loss_inputs(name, (3, 0, 5))
    with Waits() as waits:
        head.loss_by_feat(*leaves, *rest)
    assert waits.counts == {'cpu': 1}


@pytest.mark.parametrize('name', ['DETR', 'DINO'])
def test_a_subclass_of_a_changed_head_waits_once_too(name: str) -> None:
    head = build(name, type='mmgate.MatchedOnce', host='')
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


@pytest.mark.parametrize('name', ['DINO_quality', 'DETR'])
def test_pairs_go_to_the_device_in_one_copy(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all layers and images, also where the host makes the losses."""
    copies: list[torch.Size] = []
    usual = heads.to_device

    def counted(numbers: Tensor, device: Any) -> Tensor:
        if numbers.dtype == torch.long and numbers.shape[0] == 2:
            copies.append(numbers.shape)
        return usual(numbers, device)

    for module in (assigners, heads):
        monkeypatch.setattr(module, 'to_device', counted)
    head = build(name, type='mmgate.MatchedOnce', host='')
    leaves, rest = loss_inputs(name, CASES['usual'])
    head.loss_by_feat(*leaves, *rest)
    assert len(copies) == 1


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
        (
            dict(
                host='mmdet.DETRHead',
                **SOFTMAX,
                train_cfg=dict(assigner=dict(type='mmdet.MaxIoUAssigner', pos_iou_thr=0.5, neg_iou_thr=0.4)),
            ),
            'MaxIoUAssigner does not assign',
        ),
    ],
    ids=['another_head', 'another_assigner'],
)
def test_what_does_not_fit_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        MODELS.build(dict(type='mmgate.MatchedOnce', **deepcopy(config)))

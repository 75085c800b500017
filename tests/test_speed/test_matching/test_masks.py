"""Mask2Former's losses: all layers as one batch, equal to those of mmdet's code, with one wait."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from helpers.counting import Memory
from helpers.matching import Waits
from mmdet.models.dense_heads import Mask2FormerHead
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData, PixelData
from mmseg.structures import SegDataSample
from torch import Tensor

from mmgate.mm.config_file import read_config
from mmgate.speed.matching import masks
from mmgate.speed.matching import model as models

CONFIG = 'mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py'
LAYERS, QUERIES, CLASSES = 3, 6, 150


def build(matched: bool, **more: Any) -> Any:
    init_default_scope('mmseg')
    cfg = read_config(CONFIG).model.decode_head
    cfg.train_cfg.num_points = 40
    head = MODELS.build(deepcopy(cfg) | dict(num_queries=QUERIES) | more)
    head.init_weights()
    return models.match_once(head) if matched else head


def inputs(counts: tuple[int, ...]) -> tuple[list[Tensor], list[Tensor], list[InstanceData], list[dict[str, Any]]]:
    generator = torch.Generator().manual_seed(sum(counts))
    images = len(counts)
    scores = [torch.randn(images, QUERIES, CLASSES + 1, generator=generator) for _ in range(LAYERS)]
    predicted = [torch.randn(images, QUERIES, 8, 9, generator=generator) for _ in range(LAYERS)]
    objects = [
        InstanceData(
            labels=torch.randint(CLASSES, (count,), generator=generator),
            masks=(torch.rand(count, 32, 36, generator=generator) > 0.5).long(),
        )
        for count in counts
    ]
    for leaf in (*scores, *predicted):
        leaf.requires_grad_()
    return scores, predicted, objects, [{}] * images


CASES = {'usual': (3, 0, 5), 'more_than_queries': (9, 2), 'one': (1,), 'none': (0, 0)}


@pytest.mark.parametrize('case', CASES)
def test_losses_are_mmdets(case: str) -> None:
    """Points and all: on a CPU the same numbers are drawn."""
    results = []
    for matched in (False, True):
        given = inputs(CASES[case])
        head = build(matched)
        torch.manual_seed(0)
        losses = head.loss_by_feat(*given)
        sum(loss.sum() for loss in losses.values()).backward()
        grads = [leaf.grad for leaf in (*given[0], *given[1])]
        results.append(({name: loss.detach().view(()) for name, loss in losses.items()}, grads))
    (expected, grads), (actual, our_grads) = results
    assert list(actual) == list(expected)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(our_grads, grads, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('count', [10, 300])
def test_memory_is_at_most_mmdets(count: int) -> None:
    points, queries, layers = 512, 20, 6
    scores, predicted, objects, metas = inputs((count, count))
    scores = [torch.randn(2, queries, CLASSES + 1, requires_grad=True) for _ in range(layers)]
    predicted = [torch.randn(2, queries, 16, 16, requires_grad=True) for _ in range(layers)]
    peaks = []
    for matched in (False, True):
        head = build(matched, num_queries=queries)
        head.num_points = points
        with Memory() as memory:
            losses = head.loss_by_feat(scores, predicted, objects, metas)
            sum(loss.sum() for loss in losses.values()).backward()
        peaks.append(memory.peak)
    assert peaks[1] <= peaks[0], peaks


def test_processes_reduce_as_often_whatever_their_images_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """One without an object would otherwise leave the others waiting."""
    reductions = []
    monkeypatch.setattr(masks, 'reduce_mean', lambda x: reductions.append(len(x)) or x)
    counts = []
    for case in ('usual', 'none'):
        reductions.clear()
        build(True).loss_by_feat(*inputs(CASES[case]))
        counts.append(len(reductions))
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize('subclass', [False, True])
def test_losses_wait_once(subclass: bool) -> None:
    head = build(True)
    if subclass:
        head.__class__ = type('Another', (type(head),), {})
    with Waits() as waits:
        head.loss_by_feat(*inputs((3, 0, 5)))
    assert waits.counts == {'cpu': 1}


def test_classes_become_masks_as_in_mmseg() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = []
    for classes in (3, CLASSES, 1):
        labels = torch.randint(classes, (1, 8, 9), generator=generator)
        labels[torch.rand(1, 8, 9, generator=generator) > 0.7] = 255
        samples.append(SegDataSample(gt_sem_seg=PixelData(data=labels), metainfo=dict(img_shape=(8, 9))))
    samples.append(SegDataSample(gt_sem_seg=PixelData(data=torch.full((1, 8, 9), 255))))
    expected, _ = build(False)._seg_data_to_instance_data(samples)
    with Waits() as waits:
        actual, metas = build(True)._seg_data_to_instance_data(samples)
    assert metas == [sample.metainfo for sample in samples]
    for one, two in zip(actual, expected, strict=True):
        order = two.labels.argsort()
        assert torch.equal(one.labels, two.labels[order]) and torch.equal(one.masks, two.masks[order])
        assert one.masks.dtype == two.masks.dtype and one.labels.dtype == two.labels.dtype
    assert waits.counts['cpu'] == 1


def test_a_class_of_another_loss_is_refused_and_one_of_a_changed_head_keeps_it() -> None:
    class Other(type(build(False))):  # type: ignore[misc]
        def _loss_by_feat_single(self, *args: Any) -> Any:
            return tuple(3 * loss for loss in Mask2FormerHead._loss_by_feat_single(self, *args))

    head = build(False)
    head.__class__ = Other
    with pytest.raises(TypeError, match='Other has targets, losses or costs other than'):
        models.match_once(head)
    changed = build(True)
    changed.__class__ = type('Other', (type(changed),), dict(_loss_by_feat_single=Other._loss_by_feat_single))
    results = []
    for scale, one in ((3, build(False)), (1, changed)):
        torch.manual_seed(0)
        losses = one.loss_by_feat(*inputs((2, 1)))
        results.append({name: scale * loss.detach().view(()) for name, loss in losses.items()})
    torch.testing.assert_close(*results)

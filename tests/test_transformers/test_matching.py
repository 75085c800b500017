"""transformers' losses with one wait for the device at a step."""

from __future__ import annotations

import copy
import pickle
from collections import Counter
from typing import Any, ClassVar

import pytest
import torch

transformers = pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.hub_models import build, feed
from torch import Tensor, nn
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
    'grounding_dino': ('grounding_dino', {}),
    'mm_grounding_dino': ('mm_grounding_dino', {}),
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
    outcomes: list[Any] = []
    for once in (False, True):
        try:
            outcomes.append(step(name, COUNTS[case], once))
        except Exception as error:
            # transformers' own trouble with images without objects
            outcomes.append(type(error))
    theirs, ours = outcomes
    if isinstance(theirs, type):
        assert ours is theirs
        return
    assert ours[1].keys() == theirs[1].keys() and ours[2].keys() == theirs[2].keys()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=0, equal_nan=True)
    assert len(theirs[2]) > 20

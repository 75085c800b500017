"""Whole training steps: the same losses in fewer operators, and with few waits for the device."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import TORCH
from helpers.matching import Waits, draw_boxes_anew, objects
from mmdet.models.detectors import DeformableDETR
from mmdet.models.layers import CdnQueryGenerator, DeformableDetrTransformerEncoder
from mmdet.structures import DetDataSample
from mmengine.config import Config

from mmgate.benchmarks import training
from mmgate.mm.config_file import read_config
from mmgate.mm.speedups import DEFAULTS
from mmgate.speed.derived import derived_class
from mmgate.speed.matching import model as models

SIZE = (64, 96)
# Config; the most operators of a step with --speedups over those without; the most waits. On a GPU a fused optimizer
# is one kernel, and attention another.
PEERS = {
    'deformable_detr': ('mmdet::deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py', 0.3, 1),
    'dino': ('mmdet::dino/dino-4scale_r50_8xb2-12e_coco.py', 0.27, 5),
    'mask2former': ('mmseg::mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py', 0.52, 2),
}
# Moves to the device, and reads of sizes by the CPU's operator.
ON_HOST = ('to', 'tolist', '__bool__', '__float__')


def config(name: str) -> Config:
    cfg = read_config(PEERS[name][0])
    if name == 'dino':
        cfg.model.num_queries = 50
    if name == 'mask2former':
        cfg.model.data_preprocessor.size = SIZE
        cfg.model.decode_head.train_cfg.num_points = 64
    return cfg


@pytest.mark.skipif(TORCH < (2, 4), reason='torch fuses the optimizer on GPUs alone')
@pytest.mark.parametrize('name', PEERS)
def test_a_step_has_few_operators_and_waits(name: str) -> None:
    """mmdet's has hundreds of waits more."""
    _, most, most_waits = PEERS[name]
    operators = []
    for speedups in ((), DEFAULTS):
        step = training._step(config(name), SIZE, 2, 'cpu', None, speedups)
        step(torch.zeros(()))
        with training.Operators() as counted, Waits() as waits:
            step(torch.zeros(()))
        operators.append(counted.count)
    assert operators[1] <= most * operators[0], operators
    found = {key: count for key, count in waits.counts.items() if key not in ON_HOST}
    assert sum(found.values()) <= most_waits, found


@pytest.mark.parametrize('counts', [(3, 0, 5), (1,), (0, 0)], ids=str)
def test_denoising_queries_are_mmdets(counts: tuple[int, ...]) -> None:
    """All but the random labels, which are drawn in other numbers: here from one class."""
    results = []
    for kind in (CdnQueryGenerator, derived_class(models.DenoisingWithoutWaits, CdnQueryGenerator, '')):
        torch.manual_seed(0)
        generator = kind(1, 8, 12, group_cfg=dict(num_dn_queries=20))
        truth = [objects(torch.default_generator, count, classes=1) for count in counts]
        samples = [DetDataSample(gt_instances=each, metainfo=dict(img_shape=SIZE)) for each in truth]
        draw_boxes_anew(generator)
        results.append(generator(samples))
    torch.testing.assert_close(results[1][:3], results[0][:3])
    assert results[1][3] == results[0][3]


@pytest.mark.parametrize(
    ('base', 'own', 'changed'),
    [
        (CdnQueryGenerator, 'get_num_groups', True),
        (CdnQueryGenerator, 'generate_dn_mask', False),
        (DeformableDETR, 'gen_encoder_output_proposals', False),
        (DeformableDetrTransformerEncoder, 'get_encoder_reference_points', False),
    ],
)
def test_what_a_class_overrides_is_left(base: type, own: str, changed: bool) -> None:
    """It may need the sizes of feature maps as a tensor."""
    kind: Any = type('Another', (base,), {own: None})
    assert any(fits(kind.__new__(kind)) for mixin, fits in models.MIXINS.items() if issubclass(mixin, base)) is changed


def test_labels_of_denoising_queries_are_as_noisy_as_mmdets() -> None:
    kind = derived_class(models.DenoisingWithoutWaits, CdnQueryGenerator, '')
    generator = kind(50, 1, 12, label_noise_scale=0.5)
    generator.label_embedding.weight.data = torch.arange(50.0)[:, None]
    labels = torch.full((500,), 7)
    noisy = generator.generate_dn_label_query(labels, 10)[:, 0]
    assert len(noisy) == 10_000 and 0.23 < (noisy != 7).float().mean() < 0.26
    assert len(noisy.unique()) == 50


def test_proposals_in_bfloat16_are_mmdets() -> None:
    """In a map of more than 256 columns, which bfloat16 would round."""
    size = (2, 267)
    shapes = torch.tensor([size])
    memory = torch.zeros(1, 2 * 267, 8, dtype=torch.bfloat16)
    results = []
    for kind in (DeformableDETR, derived_class(models.KnownSizesDetector, DeformableDETR, '')):
        detector = kind.__new__(kind)
        torch.nn.Module.__init__(detector)
        detector.memory_trans_fc = detector.memory_trans_norm = torch.nn.Identity()
        results.append(detector.gen_encoder_output_proposals(memory, None, shapes))
        shapes.on_cpu = [size]
    torch.testing.assert_close(results[1], results[0])

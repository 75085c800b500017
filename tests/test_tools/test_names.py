"""Models by name, in mmdet's and mmseg's inferencers and in mmengine's hub."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmengine.hub import get_model
from mmengine.infer import BaseInferencer

import mmgate  # noqa: F401
from mmgate.engine import model_index
from mmgate.engine.model_index import find_model, models_of
from mmgate.engine.preflight import ConfigError

DETECTOR = 'plug-deformable-detr-refine_r18_1xb8-12e_shapes'
SEGMENTOR = 'plug-mask2former_r18_1xb8-1k_shapes-128x128'


@pytest.mark.parametrize(
    'path, kind, gate',
    [
        (f'plug/deformable_detr/{DETECTOR}', 'DeformableDETR', 'PLuGMultiScaleDeformableAttention'),
        (f'plug/mask2former/{SEGMENTOR}', 'EncoderDecoder', 'PLuGMultiheadAttention'),
        ('agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes', 'MaskRCNN', 'AgentAttention'),
    ],
    ids=['detector', 'segmentor', 'backbone'],
)
def test_hub(path: str, kind: str, gate: str) -> None:
    model = get_model(f'mmgate::{path}.py')
    assert type(model).__name__ == kind
    assert any(type(module).__name__ == gate for module in model.modules())


@pytest.mark.parametrize('name', [DETECTOR, SEGMENTOR], ids=['DetInferencer', 'MMSegInferencer'])
def test_inferencer(name: str, tmp_path: Path) -> None:
    if name == DETECTOR:
        from mmdet.apis import DetInferencer as Inferencer
    else:
        from mmseg.apis import MMSegInferencer as Inferencer
    with pytest.warns(UserWarning, match='Checkpoint is not loaded'):  # none is published
        model = Inferencer(name, device='cpu').model
    model.init_weights()  # until then mmdet's level embeddings are whatever the memory held
    meta = dict(dataset_meta=dict(classes=('circle', 'square'), palette=[(0, 0, 0), (9, 9, 9)]))
    torch.save(dict(state_dict=model.state_dict(), meta=meta), tmp_path / 'x.pth')
    loaded = Inferencer(name, weights=str(tmp_path / 'x.pth'), device='cpu').model
    assert loaded.dataset_meta['classes'] == ('circle', 'square')
    for key, value in model.state_dict().items():
        torch.testing.assert_close(loaded.state_dict()[key], value, msg=key)


def test_inferencers_still_list_their_own() -> None:
    names = BaseInferencer.list_models('mmdet')
    assert 'rtmdet_tiny_8xb32-300e_coco' in names and DETECTOR in names
    assert names.count(DETECTOR) == 1, 'registered twice'
    assert DETECTOR in BaseInferencer.list_models('mmgate')


@pytest.mark.parametrize(
    'name, config',
    [
        (DETECTOR.upper(), f'plug/deformable_detr/{DETECTOR}.py'),
        ('rtmdet_tiny_8xb32-300e_coco', 'rtmdet/rtmdet_tiny_8xb32-300e_coco.py'),
        ('fcn_r50-d8_4xb2-40k_cityscapes-512x1024', 'fcn/fcn_r50-d8_4xb2-40k_cityscapes-512x1024.py'),
    ],
    ids=['mmgate', 'mmdet', 'mmseg'],
)
def test_finds(name: str, config: str) -> None:
    entry = find_model(name)
    assert Path(entry['Config']).is_file() and entry['Config'].endswith(config)
    assert (entry['Weights'] is None) == (name == DETECTOR.upper())


def test_says_what_is_near() -> None:
    with pytest.raises(ConfigError, match='Did you mean .*plug-deformable-detr-refine_r50_8xb4-50e_coco'):
        find_model('plug-deformable-detr-refined_r50_8xb4-50e_coco')


def test_a_host_that_is_not_installed_has_no_models(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_index, 'package_folder', lambda package: None)
    assert models_of.__wrapped__('mmdet') == []

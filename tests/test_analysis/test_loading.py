"""Names of pictures and of classes, and images that are in no file."""

from __future__ import annotations

from pathlib import Path

import cv2
import numpy as np
import pytest
from conftest import ROOT, needs_mmpretrain
from helpers.image_sets import SETS, images_of, write_images
from helpers.small_demo import DEMO
from torch import nn

from mmgate.analysis.arguments import drawing_parser
from mmgate.analysis.figures.style import image_of
from mmgate.analysis.loading import UNTRAINED, LoadedModel, class_names, picture_names
from mmgate.mm.config_file import read_config


def test_pictures_of_images_of_one_name_are_told_apart() -> None:
    assert list(picture_names(['a/1.jpg', 'a/2.jpg', 'a/2.png']).values()) == ['1', '2.jpg', '2.png']
    assert list(picture_names(['/x/a/1.jpg', '/y/a/1.jpg', '/y/a/1.jpg']).values()) == ['x_a_1', 'y_a_1']
    assert list(picture_names(['1.jpg', 'b/1.jpg']).values()) == ['1', 'b_1']


def test_classes_are_those_of_the_data() -> None:
    of_coco = 'mmdet::detr/detr_r50_8xb2-150e_coco.py'
    of_shapes = str(DEMO)
    assert class_names(read_config(of_coco))[:2] == ('person', 'bicycle')
    assert class_names(read_config(of_shapes))[:2] == ('circle', 'square')


@needs_mmpretrain
@pytest.mark.parametrize('name', SETS)
def test_an_image_in_memory_is_as_one_of_a_file(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Red to the model and in the picture, whether the data set holds it or ``--images`` names it."""
    write_images(name, tmp_path, monkeypatch)
    (expected, _) = images_of(name, 'test')
    cv2.imwrite(str(tmp_path / 'image.png'), expected[..., ::-1])
    cfg = read_config(str(ROOT / f'projects/dgsa/configs/dgvit_1xb128-100e_{name}.py'))
    cfg.val_dataloader.dataset.data_root = cfg.test_dataloader.dataset.data_root = str(tmp_path)
    for given in (['--max-images', '1'], ['--images', str(tmp_path / 'image.png')]):
        args = drawing_parser('').parse_args(['config.py', UNTRAINED, '--out', str(tmp_path), *given])
        (batch,) = LoadedModel(name, cfg, nn.Identity()).inputs(args)
        np.testing.assert_array_equal(batch['inputs'][0], expected.transpose(2, 0, 1))
        np.testing.assert_array_equal(image_of(batch['data_samples'][0]), expected)

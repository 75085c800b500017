"""Names of pictures and of classes."""

from __future__ import annotations

from helpers.small_demo import DEMO

from mmgate.analysis.loading import class_names, picture_names
from mmgate.train.config_file import read_config


def test_pictures_of_images_of_one_name_are_told_apart() -> None:
    assert list(picture_names(['a/1.jpg', 'a/2.jpg', 'a/2.png']).values()) == ['1', '2.jpg', '2.png']
    assert list(picture_names(['/x/a/1.jpg', '/y/a/1.jpg', '/y/a/1.jpg']).values()) == ['x_a_1', 'y_a_1']
    assert list(picture_names(['1.jpg', 'b/1.jpg']).values()) == ['1', 'b_1']


def test_classes_are_those_of_the_data() -> None:
    of_coco = 'mmdet::detr/detr_r50_8xb2-150e_coco.py'
    of_shapes = str(DEMO)
    assert class_names(read_config(of_coco))[:2] == ('person', 'bicycle')
    assert class_names(read_config(of_shapes))[:2] == ('circle', 'square')

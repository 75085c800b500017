"""Mistakes in configs and data: each ends in one message that says what to change, soon, or is handled."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest
from conftest import ROOT, available
from PIL import Image
from pycocotools import mask as rle
from test_end_to_end import CONFIG
from test_environment import SEGMENTOR

from mmgate.datasets.image_folders import write_shapes_folder
from mmgate.datasets.shapes import write_shapes
from mmgate.engine import cli

SECONDS = 20
LOADERS = """
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = test_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_epochs=1, val_interval=100)
"""
CONFIGS = {
    'boxes': CONFIG.replace('EPOCHS', '1'),
    'masks': f'_base_ = {str(ROOT / "configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py")!r}' + LOADERS,
    'maps': SEGMENTOR,
    'folders': f'_base_ = {str(ROOT / "configs/saga/classification/saga-pvt-demo_1xb32-12e_shapes.py")!r}' + LOADERS,
}
TRAIN = 'data/shapes/annotations/instances_train.json'
VAL = 'data/shapes/annotations/instances_val.json'
IMAGE = 'data/shapes/train/000000.jpg'
MAP = 'data/shapes/ade/annotations/training/000000.png'
VAL_MAP = MAP.replace('training', 'validation')
FOLDER = 'data/shapes/imagenet/train'


@dataclass(frozen=True)
class Mistake:
    """What is trained, what is wrong with it, and what the message says; no message: it is handled."""

    kind: str
    message: str | None
    config: str = ''
    damage: Callable[[], Any] | None = None


def damaged(file: str, change: Callable[[dict[str, Any]], Any]) -> Callable[[], Any]:
    def damage() -> None:
        content = json.loads(Path(file).read_text())
        change(content)
        Path(file).write_text(json.dumps(content))

    return damage


def cut(file: str, share: float = 0.5) -> Callable[[], Any]:
    def damage() -> None:
        content = Path(file).read_bytes()
        Path(file).write_bytes(content[: int(share * len(content))])

    return damage


def replaced(file: str, image: np.ndarray, as_png: bool = True) -> Callable[[], Any]:
    """Write ``image`` under the name of ``file``, whatever its suffix says."""

    def damage() -> None:
        Path(file).unlink()  # the data set's folders share files
        Path(file).write_bytes(cv2.imencode('.png' if as_png else '.jpg', image)[1].tobytes())

    return damage


def every_kind_of_image() -> None:
    """16 bits, grey, with an alpha channel, and CMYK."""
    files = [f'data/shapes/train/00000{number}.jpg' for number in range(4)]
    replaced(files[0], np.full((64, 64, 3), 40_000, np.uint16))()
    replaced(files[1], np.full((64, 64), 99, np.uint8), False)()
    replaced(files[2], np.full((64, 64, 4), 99, np.uint8))()
    Path(files[3]).unlink()
    Image.new('CMYK', (64, 64), (90, 10, 200, 30)).save(files[3], 'JPEG')


def image_ids_as_text(content: dict[str, Any]) -> None:
    for annotation in content['annotations']:
        annotation['image_id'] = str(annotation['image_id'])


def other_images() -> None:
    content = json.loads(Path(VAL).read_text())
    for key, entry in (('images', 'id'), ('annotations', 'image_id')):
        for one in content[key]:
            one[entry] += 1000
    Path('data/shapes/other.json').write_text(json.dumps(content))


def rename_categories(content: dict[str, Any]) -> None:
    for category in content['categories']:
        category['name'] = category['name'].upper()


def mask_of_another_size(content: dict[str, Any]) -> None:
    encoded = rle.encode(np.asfortranarray(np.ones((10, 10), np.uint8)))
    content['annotations'][0]['segmentation'] = dict(size=encoded['size'], counts=encoded['counts'].decode())


def small_things() -> None:
    """An image of one pixel, and a box of a category that does not exist."""

    def change(content: dict[str, Any]) -> None:
        content['images'][0].update(width=1, height=1)
        content['annotations'][-1].update(category_id=99)

    damaged(TRAIN, change)()
    replaced(IMAGE, np.zeros((1, 1, 3), np.uint8))()


def map_of_one_pixel() -> None:
    replaced('data/shapes/ade/images/training/000000.jpg', np.zeros((1, 1, 3), np.uint8))()
    replaced(MAP, np.ones((1, 1), np.uint8))()


def larger_image() -> None:
    replaced('data/shapes/ade/images/training/000000.jpg', np.zeros((64, 80, 3), np.uint8))()
    replaced(MAP, np.ones((64, 80), np.uint8))()


def listed(label: str) -> Callable[[], Any]:
    """A list of images, of which one has another label."""

    def damage() -> None:
        names = sorted(path.relative_to(FOLDER) for path in Path(FOLDER).rglob('*.jpg'))
        lines = [f'{name} 0' for name in names]
        lines[0] = f'{names[0]}{label}'
        Path('data/shapes/imagenet/train.txt').write_text('\n'.join(lines))

    return damage


def empty_folders() -> None:
    for path in Path(FOLDER).rglob('*.jpg'):
        path.unlink()


def another_folder() -> None:
    shutil.copytree(f'{FOLDER}/circle', f'{FOLDER}/zebra')


def dataset(text: str, *splits: str) -> str:
    return '\n'.join(f'{split}_dataloader = dict(dataset=dict({text}))' for split in splits or ('train',))


# mmdet's and mmpretrain's packing fails on a single pixel that was turned over
UNFLIPPED = """pipeline=[
    dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', with_bbox=True), dict(type='PackDetInputs')]"""
VALIDATION = dataset("data_prefix=dict(img_path='images/validation', seg_map_path='annotations/validation')", 'val')
FIRST_IMAGE = f'{FOLDER}/circle/00000.jpg'
MISTAKES = {
    # configs
    'model_misspelt': Mistake('boxes', 'Gatted is not in the', "model = dict(type='mmgate.Gatted')"),
    'host_misspelt': Mistake('boxes', 'DeformableDERT', "model = dict(host='mmdet.DeformableDERT')"),
    'gate_misspelt': Mistake(
        'boxes',
        'Did you mean .*PLuGMultiScaleDeformableAttention',
        "model = dict(attention=dict(type='PLuGMultiScaleDeformableAtention'))",
    ),
    'gate_option_misspelt': Mistake('boxes', 'no option granularty', "model = dict(attention=dict(granularty='head'))"),
    'path_of_nothing': Mistake(
        'boxes', 'matches no module.*encoder.layers.0.self_attn', "model = dict(attention=dict(path='encoder.*.attn'))"
    ),
    'channels_and_heads': Mistake(
        'boxes',
        'embed_dims must be divisible by num_heads, but got 128 and 7',
        'model = dict(encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_heads=7))))',
    ),
    'agents': Mistake(
        'masks', 'agent_num=10 must be a square number', 'model = dict(backbone=dict(agent_nums=(10, 16, 49, 49)))'
    ),
    'transform_misspelt': Mistake(
        'boxes', 'LoadImage is not in the', dataset("pipeline=[dict(type='LoadImage'), dict(type='PackDetInputs')]")
    ),
    'dataset_misspelt': Mistake('boxes', 'CocoDatset is not in the', dataset("type='CocoDatset'")),
    'optimizer_misspelt': Mistake(
        'boxes', "AdanW is not.*Did you mean 'AdamW'", "optim_wrapper = dict(optimizer=dict(type='AdanW'))"
    ),
    'hook_misspelt': Mistake('boxes', 'FinitHook is not in the', "custom_hooks = [dict(type='mmgate.FinitHook')]"),
    'metric_misspelt': Mistake('boxes', 'CocoMetrik is not in the', "val_evaluator = dict(type='CocoMetrik')"),
    'schedule_misspelt': Mistake(
        'boxes', 'MultiStepLRR is not in the', "param_scheduler = [dict(type='MultiStepLRR', milestones=[1])]"
    ),
    'average_misspelt': Mistake(
        'boxes', 'MovingAvrage is not in the', "custom_hooks = [dict(type='EMAHook', ema_type='MovingAvrage')]"
    ),
    'levels': Mistake(
        'boxes',
        'logits have 3 levels, so spatial_shapes must be .*MMGATE_TRACEBACK',
        'model = dict(encoder=dict(layer_cfg=dict(self_attn_cfg=dict(num_levels=3))))',
    ),
    'masks_measured_of_boxes': Mistake(
        'boxes',
        'this model predicts no masks',
        "val_evaluator = dict(metric=['bbox', 'segm'])\ntrain_cfg = dict(val_interval=1)",
    ),
    'import_of_nothing': Mistake(
        'boxes', 'my_gates', "custom_imports = dict(imports=['my_gates'], allow_failed_imports=False)"
    ),
    'rate_of_letters': Mistake(
        'boxes',
        "optim_wrapper.optimizer.lr must be a number, got 'fast'",
        "optim_wrapper = dict(optimizer=dict(lr='fast'))",
    ),
    'batch_of_none': Mistake(
        'boxes', 'batch_size should be a positive integer', 'train_dataloader = dict(batch_size=0)'
    ),
    'fewer_classes': Mistake(
        'boxes', 'predicts 2 classes.*labels 6.*bbox_head.num_classes=6', 'model = dict(bbox_head=dict(num_classes=2))'
    ),
    'one_class_without_a_comma': Mistake('boxes', None, dataset("metainfo=dict(classes='circle')")),
    'start_from_nothing': Mistake('boxes', 'checkpoint none.pth does not exist', "load_from = 'none.pth'"),
    # data sets in COCO's form
    'no_data': Mistake(
        'boxes', 'train_dataloader.dataset.data_root: data/none/ does not', dataset("data_root='data/none/'")
    ),
    'no_annotations': Mistake(
        'boxes', 'train_dataloader.dataset.ann_file: .*a.json does not', dataset("ann_file='a.json'")
    ),
    'no_images_folder': Mistake(
        'boxes',
        'train_dataloader: .*trian/.*jpg does not exist, nor does its folder',
        dataset("data_prefix=dict(img='trian/')"),
    ),
    'json_cut_short': Mistake('boxes', f'train_dataloader: {TRAIN} is no whole JSON file', damage=cut(TRAIN)),
    'json_of_another_form': Mistake(
        'boxes', f'{TRAIN}.*annotation file format', damage=lambda: Path(TRAIN).write_text('[]')
    ),
    'no_image_listed': Mistake(
        'boxes', f'{TRAIN} lists none', damage=damaged(TRAIN, lambda content: content['images'].clear())
    ),
    'no_box_annotated': Mistake(
        'masks',
        'filter_cfg=.*leaves none',
        damage=damaged(TRAIN, lambda content: content['annotations'].clear()),
    ),
    'other_categories': Mistake(
        'boxes',
        'train_dataloader: none of the classes .circle.* is a category of .*, which has CIRCLE',
        damage=damaged(TRAIN, rename_categories),
    ),
    'other_categories_to_evaluate': Mistake(
        'boxes', "CocoMetric's ann_file has 0 of the 6 classes", damage=damaged(VAL, rename_categories)
    ),
    'more_classes_to_evaluate': Mistake(
        'boxes',
        'found a class that .* does not have as a category. Set num_classes',
        'model = dict(bbox_head=dict(num_classes=80))\ntrain_cfg = dict(val_interval=1)',
    ),
    'image_ids_as_text': Mistake(
        'boxes', r"of no image that it lists \(image_id '", damage=damaged(TRAIN, image_ids_as_text)
    ),
    'single_or_crowd_not_said': Mistake(
        'boxes',
        "annotation 1 in CocoMetric's ann_file has no iscrowd",
        damage=damaged(VAL, lambda content: [one.pop('iscrowd') for one in content['annotations']]),
    ),
    'evaluator_of_other_images': Mistake(
        'boxes',
        'does not list 2 of the 2 images',
        "val_evaluator = dict(ann_file='data/shapes/other.json')",
        other_images,
    ),
    'box_of_three_numbers': Mistake(
        'boxes',
        r'instances_train.json \(annotation 1\): ValueError: not enough values',
        damage=damaged(TRAIN, lambda content: content['annotations'][0]['bbox'].pop()),
    ),
    'image_without_width': Mistake(
        'boxes', "key 'width' is missing", damage=damaged(TRAIN, lambda content: content['images'][0].pop('width'))
    ),
    'annotation_ids_twice': Mistake(
        'boxes',
        'are not unique',
        damage=damaged(TRAIN, lambda c: c['annotations'][1].update(id=c['annotations'][0]['id'])),
    ),
    'image_missing': Mistake('boxes', f'img_path {IMAGE} does not exist', damage=lambda: Path(IMAGE).unlink()),
    'image_corrupt': Mistake(
        'boxes', f'img_path {IMAGE} is no image', damage=lambda: Path(IMAGE).write_bytes(b'\0' * 99)
    ),
    'image_empty': Mistake('boxes', f'img_path {IMAGE} is no image', damage=lambda: Path(IMAGE).write_bytes(b'')),
    'every_image_dropped': Mistake(
        'boxes',
        'no image of the training data got through the pipeline',
        dataset("max_refetch=20, pipeline=[dict(type='LoadImageFromFile', ignore_empty=True)]"),
        damage=lambda: [path.write_bytes(b'') for path in Path(IMAGE).parent.iterdir()],
    ),
    'mask_of_another_size': Mistake(
        'masks', 'img_path .*000000.jpg: LoadAnnotations cannot take', damage=damaged(TRAIN, mask_of_another_size)
    ),
    'category_of_no_class_and_image_of_one_pixel': Mistake('boxes', None, dataset(UNFLIPPED), small_things),
    'image_of_one_pixel_alone': Mistake(
        'boxes',
        'a batch norm met one number a channel.*larger train_dataloader.batch_size',
        f'train_dataloader = dict(batch_size=1, dataset=dict({UNFLIPPED}))',
        replaced(IMAGE, np.zeros((1, 1, 3), np.uint8)),
    ),
    'images_of_every_kind': Mistake('boxes', None, damage=every_kind_of_image),
    # maps of labels
    'no_image_of_that_suffix': Mistake('maps', r'looked for \*.tif in .*images/training', dataset("img_suffix='.tif'")),
    'no_names_of_classes': Mistake(
        'maps', 'IoUMetric needs the names of the classes', dataset('metainfo=dict(_delete_=True)', 'train', 'val')
    ),
    'map_missing': Mistake('maps', f'seg_map_path {MAP} does not exist', damage=lambda: Path(MAP).unlink()),
    'map_corrupt': Mistake('maps', f'seg_map_path {MAP} is no image', damage=lambda: Path(MAP).write_bytes(b'\0' * 99)),
    'map_of_another_size': Mistake(
        'maps', f'{MAP} is a map of 32 x 32 for an image of 64 x 64', damage=replaced(MAP, np.ones((32, 32), np.uint8))
    ),
    'map_larger_than_its_image': Mistake(
        'maps', f'{MAP} is a map of 96 x 80 for an image of 64 x 64', damage=replaced(MAP, np.ones((80, 96), np.uint8))
    ),
    'map_in_colours': Mistake(
        'maps', f'{MAP} is no map of labels.*grey or a palette', damage=replaced(MAP, np.full((64, 64, 3), 2, np.uint8))
    ),
    'no_maps_to_evaluate': Mistake(
        'maps',
        'comes without a map of labels.*LoadAnnotations.*format_only',
        dataset("pipeline=[dict(type='LoadImageFromFile'), dict(type='PackSegInputs')]", 'val'),
    ),
    'map_to_evaluate_of_another_size': Mistake(
        'maps',
        f'{VAL_MAP} is a map of 32 x 32 for an image of 64 x 64',
        VALIDATION,
        replaced(VAL_MAP, np.ones((32, 32), np.uint8)),
    ),
    'map_to_evaluate_in_colours': Mistake(
        'maps', f'{VAL_MAP} is no map of labels', VALIDATION, replaced(VAL_MAP, np.full((64, 64, 3), 2, np.uint8))
    ),
    'label_out_of_range': Mistake(
        'maps',
        f'{MAP} has the label 49, but the model has 6 classes',
        damage=replaced(MAP, np.full((64, 64), 50, np.uint8)),
    ),
    'labels_from_one': Mistake(
        'maps',
        'has the label 6, but the model has 6 classes.*reduce_zero_label',
        dataset(
            "reduce_zero_label=False, pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations'), "
            "dict(type='PackSegInputs')]"
        ),
        damage=replaced(MAP, np.full((64, 64), 6, np.uint8)),
    ),
    'map_of_16_bits': Mistake('maps', None, damage=replaced(MAP, np.full((64, 64), 3, np.uint16))),
    'map_of_one_pixel': Mistake('maps', 'has 1 x 1 pixels.*take it out', damage=map_of_one_pixel),
    'images_of_several_sizes': Mistake(
        'maps', 'images of one batch differ in size.*80 x 64.*RandomCrop', damage=larger_image
    ),
    # folders of images
    'no_image_in_the_folders': Mistake(
        'folders', f'CustomDataset cannot read {FOLDER}.*Found 0 files', damage=empty_folders
    ),
    'more_folders_than_classes': Mistake('folders', r'number of subfolders \(7\)', damage=another_folder),
    'list_without_labels': Mistake(
        'folders',
        'CustomDataset cannot read .*train.txt: ValueError',
        dataset("ann_file='train.txt'"),
        damage=listed(''),
    ),
    'listed_label_out_of_range': Mistake(
        'folders', 'has the label 9, but the model has 6 classes', dataset("ann_file='train.txt'"), damage=listed(' 9')
    ),
    'photo_corrupt': Mistake(
        'folders', f'{FIRST_IMAGE} is no image', damage=lambda: Path(FIRST_IMAGE).write_bytes(b'\0' * 99)
    ),
    'photos_of_several_sizes': Mistake('folders', None, damage=replaced(FIRST_IMAGE, np.zeros((32, 40, 3), np.uint8))),
    'photos_of_several_sizes_stacked': Mistake(
        'folders',
        'differ in size.*40 x 32.*Resize',
        "train_dataloader = dict(collate_fn=dict(type='default_collate'))",
        replaced(FIRST_IMAGE, np.zeros((32, 40, 3), np.uint8)),
    ),
    'photo_of_one_pixel': Mistake('folders', '1 x 1', damage=replaced(FIRST_IMAGE, np.zeros((1, 1, 3), np.uint8))),
}

# by a test of one function, or by a neighbour above
TRIED_ELSEWHERE = {
    *('gate_option_misspelt', 'host_misspelt', 'metric_misspelt', 'fewer_classes', 'start_from_nothing'),
    *('no_data', 'no_annotations', 'no_images_folder', 'image_corrupt', 'map_corrupt', 'photo_corrupt'),
    *('photo_of_one_pixel', 'photos_of_several_sizes', 'map_of_16_bits'),
}
assert not TRIED_ELSEWHERE - set(MISTAKES)


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('data')
    write_shapes(folder / 'shapes', num_train=4, num_val=2, size=64)
    write_shapes_folder(folder / 'shapes/imagenet', num_train=12, num_val=6, size=64)
    return folder


@pytest.fixture
def project(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(data, tmp_path / 'data')
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv('MMGATE_TRACEBACK', raising=False)
    return tmp_path


def make(mistake: Mistake) -> None:
    if mistake.kind == 'folders' and not available('mmpretrain'):
        pytest.skip('needs mmpretrain: the extra "pretrain"')
    Path('base.py').write_text(CONFIGS[mistake.kind])
    Path('config.py').write_text(f"_base_ = 'base.py'\n{mistake.config}\n")
    if mistake.damage is not None:
        mistake.damage()


@pytest.mark.parametrize(
    'name', [pytest.param(name, marks=pytest.mark.slow if name in TRIED_ELSEWHERE else ()) for name in MISTAKES]
)
def test_one_message_says_what_to_change(project: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    mistake = MISTAKES[name]
    make(mistake)
    start = time.process_time()  # what others do on the machine is not the tools' work
    unique = [f'experiment_name={name}', f'visualizer.name={name}']
    status = cli.main(cli.train, ['config.py', '--work-dir', 'work', '--cfg-options', *unique])
    assert time.process_time() - start < SECONDS
    error = capsys.readouterr().err
    if mistake.message is None:
        assert status == 0, error
        scalars = next(Path('work').rglob('vis_data/scalars.json')).read_text()
        losses = [json.loads(line)['loss'] for line in scalars.splitlines() if '"loss"' in line]
        assert losses and np.isfinite(losses).all()
        return
    assert status == 2, error
    message = error[error.index('error: ') :]
    assert re.search(mistake.message, message, re.DOTALL), message
    assert 'Traceback' not in message


@pytest.mark.slow
@pytest.mark.parametrize('name', ['gate_misspelt', 'json_cut_short', 'image_corrupt', 'label_out_of_range'])
def test_the_same_from_the_command_line(project: Path, name: str) -> None:
    """With the data read by workers, whose errors come by another way."""
    make(MISTAKES[name])
    command = [sys.executable, '-W', 'ignore', str(ROOT / 'tools/train.py'), 'config.py', '--work-dir', 'work']
    options = ['--cfg-options', 'train_dataloader.num_workers=1']
    done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2, done.stderr[-2000:]
    assert re.search(str(MISTAKES[name].message), done.stderr) and 'Traceback' not in done.stderr

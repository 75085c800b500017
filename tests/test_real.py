"""The converters write the layouts that the recipes on real images read, and every such recipe trains and is tested."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch
from conftest import CONFIGS, ROOT, needs_mmpretrain, tool
from mmengine.config import Config

from mmgate.analysis.loading import load_model
from mmgate.errors import ConfigError
from mmgate.train import cli

bccd = tool('bccd', 'dataset_converters')
camvid = tool('camvid', 'dataset_converters')
RECIPES = [path for path in CONFIGS if path.parent.parent.name == 'real']
# one of each host and each set; the others are their vanilla partners, other gates and other lengths
FIRST = (
    'plug-deformable-detr-refine_lite0_1xb4-2e_facemask',
    'agent-retinanet_pvt-demo_1xb4-12e_bccd',
    'plug-mask2former_lite0_1xb4-150_camvid-160x128',
    'sdpa-gate-segformer_mit-b0_1xb4-2k_camvid-160x128',
)
BOX = '<object><name>{}</name><bndbox><xmin>{}</xmin><ymin>{}</ymin><xmax>{}</xmax><ymax>{}</ymax></bndbox></object>'
DAY = ('0006R0_f00930', '0016E5_00390')
DUSK = ('0001TP_006690', '0001TP_006720')


def write_voc(root: Path, label: str = 'RBC') -> Path:
    """Write six micrographs in the layout of BCCD's repository, two of them for testing."""
    names = [f'BloodImage_{number:05}' for number in range(6)]
    for folder in ('Annotations', 'ImageSets/Main', 'JPEGImages'):
        (root / folder).mkdir(parents=True)
    (root / 'ImageSets/Main/trainval.txt').write_text('\n'.join(names[:4]))
    (root / 'ImageSets/Main/test.txt').write_text('\n'.join(names[4:]))
    boxes = BOX.format('WBC', 30, 20, 90, 70) + BOX.format(label, 100, 60, 140, 100) + BOX.format('RBC', 5, 5, 5, 30)
    size = '<size><width>160</width><height>120</height></size>'
    rng = np.random.default_rng(0)
    for name in names:
        (root / f'Annotations/{name}.xml').write_text(f'<annotation>{size}{boxes}</annotation>')
        cv2.imwrite(str(root / f'JPEGImages/{name}.jpg'), rng.integers(0, 255, (120, 160, 3), np.uint8))
    return root


def write_segnet(root: Path, highest: int = 11) -> Path:
    """Write images of CamVid's names in the layout of its repository, with labels up to ``highest``."""
    names = dict(train=(*DAY, *DUSK), val=('0016E5_07959',), test=('0001TP_008550', 'Seq05VD_f00000'))
    rng = np.random.default_rng(0)
    for split, of_split in names.items():
        for folder in (split, f'{split}annot'):
            (root / folder).mkdir(parents=True)
        for name in of_split:
            label = np.repeat(np.arange(12, dtype=np.uint8), 4)[None].repeat(36, 0)
            label[label == 11] = highest
            cv2.imwrite(str(root / f'{split}annot/{name}.png'), label)
            cv2.imwrite(str(root / f'{split}/{name}.png'), rng.integers(0, 255, (36, 48, 3), np.uint8))
    return root


def write_facemask(root: Path) -> None:
    """Write face masks' layout, which is COCO's, with BCCD's boxes."""
    written = root.with_name('bccd-of-facemask')
    bccd.convert(write_voc(root.with_name('voc-of-facemask')), written)
    for split, folder in (('train', 'train2017'), ('val', 'val2017')):
        content = json.loads((written / f'annotations/{split}.json').read_text())
        names = ('mask_weared_incorrect', 'with_mask', 'without_mask')
        content['categories'] = [dict(id=number, name=name) for number, name in enumerate(names)]
        (root / 'annotations').mkdir(parents=True, exist_ok=True)
        (root / f'annotations/custom_{split}.json').write_text(json.dumps(content))
        (root / folder).mkdir()
        for image in content['images']:
            (root / folder / image['file_name']).write_bytes((written / 'images' / image['file_name']).read_bytes())


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a tiny copy of each set, as the configs name them."""
    root = tmp_path_factory.mktemp('real')
    bccd.main([str(write_voc(root / 'voc')), str(root / 'data/bccd')])
    camvid.main([str(write_segnet(root / 'segnet')), str(root / 'data/camvid')])
    write_facemask(root / 'data/facemask')
    return root


COMPARISON = """
config = '{config}'
checkpoint = 'start.pth'
gates = [dict(type='{gate}', path='{path}')]
parts = dict(
    gates=dict(attention=gates, trains=['gates']),
    statistics=dict(trains=[], statistics=True))
rates = dict(default=[1e-3])
steps = 1
sweep = dict(train=dict(indices=[0]), test=dict(indices=[0], {held_out}))
train = dict(two=dict(indices=2))
tests = dict(there=dict({tested}))
seeds = [0]
metric = '{metric}'
del gates
"""
COMPARED = dict(
    camvid=(
        'real/camvid/mask2former_lite0_1xb4-1k_camvid-day-160x128.py',
        dict(
            gate='PLuGMultiheadAttention',
            path='decode_head.transformer_decoder.layers.*.self_attn',
            held_out='',
            tested="data_prefix=dict(img_path='images/test', seg_map_path='labels/test')",
            metric='mIoU',
        ),
    ),
    bccd=(
        'studies/adapt_bccd/model.py',
        dict(
            gate='PLuGMultiScaleDeformableAttention',
            path='encoder.layers.*.self_attn',
            held_out="ann_file='annotations/train.json'",
            tested='',
            metric='coco/bbox_mAP',
        ),
    ),
)


@needs_mmpretrain
@pytest.mark.parametrize('name', ['camvid', pytest.param('bccd', marks=pytest.mark.slow)])
def test_adapters_are_compared(
    name: str, data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a real model: it trains, is tested on a part of the images, and the table is printed."""
    monkeypatch.chdir(data)
    config = data / f'{name}.py'
    base, settings = COMPARED[name]
    config.write_text(f"_base_ = '{ROOT}/configs/{base}'\nmodel = dict(backbone=dict(init_cfg=None))")
    torch.save(load_model(Config.fromfile(config), 'untrained').model.state_dict(), 'start.pth')
    Path('study.py').write_text(COMPARISON.format(config=config, **settings))
    assert cli.main(tool('compare_adapters').main, ['study.py', '--out', f'{name}/results.csv']) == 0
    rows = list(csv.DictReader(Path(f'{name}/results.csv').read_text().splitlines()))
    assert [row['stage'] for row in rows] == ['start', 'sweep', 'result', 'sweep', 'result']
    assert all(0 <= float(row['there']) <= 100 for row in rows if row['stage'] != 'sweep')
    assert '| statistics | 1 |' in capsys.readouterr().out


def test_bccd(data: Path, tmp_path: Path) -> None:
    """Boxes are x, y, width, height; one without an area is left out; each image is in one split."""
    content = {
        split: json.loads((data / f'data/bccd/annotations/{split}.json').read_text()) for split in ('train', 'val')
    }
    assert [len(content[split]['images']) for split in ('train', 'val')] == [4, 2]
    first, second = content['val']['annotations'][:2]
    assert (first['bbox'], first['area'], first['category_id']) == ([30.0, 20.0, 60.0, 50.0], 3000.0, 2)
    assert (second['bbox'], second['category_id'], second['image_id']) == ([100.0, 60.0, 40.0, 40.0], 1, 0)
    assert len(content['train']['annotations']) == 8 and len(list((data / 'data/bccd/images').iterdir())) == 6
    with pytest.raises(ConfigError, match="a box of class 'cell'"):
        bccd.convert(write_voc(tmp_path / 'strange', 'cell'), tmp_path / 'out')
    with pytest.raises(ConfigError, match=r'no .*trainval.txt. Give the folder BCCD'):
        bccd.convert(tmp_path, tmp_path / 'out')


def test_camvid(data: Path, tmp_path: Path) -> None:
    """Void is 255, and the test by day has a folder of its own."""
    root = data / 'data/camvid'
    label = cv2.imread(str(root / 'labels/test/0001TP_008550.png'), cv2.IMREAD_UNCHANGED)
    assert label.shape == (36, 48) and sorted(set(label.flatten().tolist())) == [*range(11), 255]
    assert [path.name for path in (root / 'images/test').iterdir()] == ['0001TP_008550.jpg']
    assert [path.name for path in (root / 'labels/test_day').iterdir()] == ['Seq05VD_f00000.png']
    with pytest.raises(ConfigError, match='is no map of the classes 0 to 11'):
        camvid.convert(write_segnet(tmp_path / 'strange', highest=12), tmp_path / 'out')
    with pytest.raises(ConfigError, match='there is no image in'):
        camvid.convert(tmp_path, tmp_path / 'out')


@needs_mmpretrain
@pytest.mark.parametrize(
    'path', [pytest.param(x, id=x.stem, marks=[pytest.mark.slow] * (x.stem not in FIRST)) for x in RECIPES]
)
def test_trains_and_is_tested(path: Path, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the data set's own pipeline, from a backbone without the trained weights, which a user has to fetch."""
    monkeypatch.chdir(data)
    options = ['load_from=None', 'model.backbone.init_cfg=None', 'train_dataloader.batch_size=2']
    options += ['train_dataloader.dataset.indices=2'] if 'day' in path.stem else []
    options += ['model.test_cfg.score_thr=0.0'] if 'retinanet' in path.stem else []
    if '_camvid' in path.stem:
        options += ['train_cfg.max_iters=2', 'train_cfg.val_interval=2', 'default_hooks.checkpoint.interval=2']
    else:
        options += ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'default_hooks.checkpoint.interval=1']
    assert cli.main(cli.train, [str(path), '--work-dir', str(tmp_path), '--cfg-options', *options]) == 0
    # mmengine's visualizer is one for the process and goes on writing into the folder of the first run
    (log,) = tmp_path.glob('*/*.log')
    validation = log.read_text().rpartition('(val)')[2]
    assert re.search(r'(mIoU|coco/bbox_mAP): \d', validation)
    assert (tmp_path / 'last_checkpoint').is_file()

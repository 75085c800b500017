"""The models and images that the drawing tools look at: told apart, read as they are, refused before any work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, over_shapes, tool
from mmdet.structures.bbox import get_box_tensor
from mmengine.config import Config
from shapes import write_shapes

import mmgate  # noqa: F401
from mmgate.analysis.loading import UNTRAINED, class_names, load_models, parser, picture_names
from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import read_config

DETR = 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
MASK2FORMER = 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'


@pytest.fixture(scope='module')
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two small configs."""
    root = tmp_path_factory.mktemp('loading')
    write_shapes(root / 'shapes', num_train=1, num_val=2, size=64)
    for name, config in dict(detr=DETR, mask2former=MASK2FORMER).items():
        (root / f'{name}.py').write_text(over_shapes(config, root / 'shapes'))
    return root


def draw(name: str, root: Path, out: Path, *options: str, config: str = 'detr') -> int:
    return cli.main(tool(name).main, [str(root / f'{config}.py'), UNTRAINED, *options, '--out', str(out)])


def test_pictures_of_images_of_one_name_are_told_apart() -> None:
    assert list(picture_names(['a/1.jpg', 'a/2.jpg', 'a/2.png']).values()) == ['1', '2.jpg', '2.png']
    assert list(picture_names(['/x/a/1.jpg', '/y/a/1.jpg', '/y/a/1.jpg']).values()) == ['x_a_1', 'y_a_1']
    assert list(picture_names(['1.jpg', 'b/1.jpg']).values()) == ['1', 'b_1']


@pytest.mark.parametrize(
    ('config', 'names'),
    [('mmdet::detr/detr_r50_8xb2-150e_coco.py', ('person', 'bicycle')), (DETR, ('circle', 'square'))],
)
def test_classes_are_those_of_the_data(config: str, names: tuple[str, ...]) -> None:
    assert class_names(read_config(config if '::' in config else str(ROOT / config)))[:2] == names


def test_a_window_that_slides_is_not_taken_for_the_image(root: Path, tmp_path: Path) -> None:
    """With windows the reading would be of the last of them alone."""
    slide = ['model.test_cfg.mode=slide', 'model.test_cfg.crop_size=(32,32)', 'model.test_cfg.stride=(32,32)']
    common = ['--max-images', '1', '--part', 'queries', '--queries', '0']
    tables = []
    for name, options in dict(whole=[], slide=['--cfg-options', *slide]).items():
        assert draw('plot_rollout', root, tmp_path / name, *common, *options, config='mask2former') == 0
        (table,) = (tmp_path / name).glob('*.csv')
        tables.append(table.read_text())
    assert tables[0] == tables[1]


def test_images_are_not_flipped_and_true_boxes_lie_on_them(root: Path, tmp_path: Path) -> None:
    """Whether a pipeline loads annotations before the resize or after it, boxes are in pixels of the file."""
    cfg, changed = Config.fromfile(str(root / 'detr.py')), str(tmp_path / 'changed.py')
    pipeline = cfg.val_dataloader.dataset.pipeline
    read, resize, annotations, pack = pipeline
    args = parser('').parse_args([changed, UNTRAINED, '--out', str(tmp_path), '--max-images', '1'])
    truths = []
    for steps in ([read, resize, annotations], [read, annotations, resize, dict(type='RandomFlip', prob=1.0)]):
        pipeline[:] = [*steps, pack]
        cfg.dump(changed)
        (loaded,) = load_models(args, ['locations'], 'This')
        (batch,) = loaded.inputs(args)
        (sample,) = batch['data_samples']
        truths.append(get_box_tensor(sample.gt_instances.bboxes))
        assert not sample.get('flip') and sample.scale_factor == (2.0, 2.0)
    assert truths[0].tolist() == truths[1].tolist() and len(truths[0]) and truths[0].max() <= 64
    pipeline[:] = [read, dict(type='TestTimeAug', transforms=[[pack]])]
    cfg.dump(changed)
    (loaded,) = load_models(args, ['locations'], 'This')
    with pytest.raises(ConfigError, match='several images of each'):
        list(loaded.inputs(args))


@pytest.mark.parametrize(
    ('name', 'options', 'message'),
    [
        ('plot_gates', ['--out', 'file'], 'nothing can be written to file'),
        ('plot_gates', ['--max-images', '0'], '0: give 1 or more'),
        ('plot_gates', ['--images', 'nowhere'], 'nowhere is no image, no folder with images'),
        ('plot_rollout', ['--part', 'image'], 'no self-attention over the image'),
        ('plot_rollout', ['--part', 'queries'], 'no decoder attends densely'),
        ('plot_sampling_points', ['--pixel', '3', '3', '--part', 'decoder'], 'chooses a query of the encoder'),
        ('plot_sampling_points', ['--pixel', '64', '3'], 'the pixel (64, 3) lies outside of the image of 64 x 64'),
    ],
    ids=lambda x: ' '.join(x) if isinstance(x, list) else '',
)
def test_refused_in_one_message(
    name: str, options: list[str], message: str, root: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    Path('file').write_text('')
    try:
        code: Any = cli.main(tool(name).main, [str(root / 'detr.py'), UNTRAINED, '--out', 'out', *options])
    except SystemExit as error:  # argparse's own
        code = error.code
    assert code == 2 and message in capsys.readouterr().err


def test_a_second_model_without_the_reading_is_refused_by_name(root: Path, tmp_path: Path, capsys: Any) -> None:
    vanilla = str(ROOT / 'configs/vanilla/mask_rcnn/mask-rcnn_pvt-demo_1xb8-8e_shapes.py')
    assert draw('plot_sampling_points', root, tmp_path, '--against', vanilla, UNTRAINED) == 2
    error = capsys.readouterr().err
    assert 'mask-rcnn_pvt-demo_1xb8-8e_shapes: A picture of sampling points needs a model with sampling points' in error
    assert 'has attention weights' in error and 'plot_rollout.py' in error and not list(tmp_path.iterdir())

"""SVHN's published files, and those of the other data sets whose images are in memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from conftest import ROOT, needs_mmpretrain
from helpers.image_sets import LABELS, SETS, images_of, write_images
from mmengine.config import Config
from mmengine.registry import init_default_scope

from mmgate.registry import DATASETS


def test_svhn_reads_the_published_files(tmp_path: Path) -> None:
    io = pytest.importorskip('scipy.io', reason='scipy')
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    io.savemat(tmp_path / 'test_32x32.mat', dict(X=images, y=np.array([[1], [10], [3], [9], [10]], dtype=np.uint8)))
    data = DATASETS.build(dict(type='mmgate.SVHN', data_root=str(tmp_path), split='test', pipeline=[]))
    assert [data[i]['gt_label'] for i in range(5)] == [1, 0, 3, 9, 0] and data.metainfo['classes'][0] == '0'
    assert np.array_equal(data[2]['img'], images[..., 2])
    with pytest.raises(FileNotFoundError, match='train_32x32.mat'):
        DATASETS.build(dict(type='mmgate.SVHN', data_root=str(tmp_path), split='train', pipeline=[]))
    with pytest.raises(ValueError, match="split='val' must be one of"):
        DATASETS.build(dict(type='mmgate.SVHN', data_root=str(tmp_path), split='val', pipeline=[]))


@needs_mmpretrain
@pytest.mark.parametrize('name', SETS)
def test_the_papers_images_go_through_their_configs_pipelines(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each split has its images, RGB as the configs' means, and labels that mmpretrain takes."""
    write_images(name, tmp_path, monkeypatch)
    cfg = Config.fromfile(ROOT / f'configs/dgsa/classification/dgvit_1xb128-100e_{name}.py')
    assert not cfg.model.data_preprocessor.to_rgb
    init_default_scope('mmpretrain')
    for split, loader in dict(train=cfg.train_dataloader, test=cfg.test_dataloader).items():
        data = DATASETS.build(dict(loader.dataset, data_root=str(tmp_path)))
        assert [data[number]['data_samples'].gt_label.item() for number in range(2)] == LABELS
        assert data[0]['inputs'].amax((1, 2)).tolist() == images_of(name, split)[0].max((0, 1)).tolist()

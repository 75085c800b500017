"""SVHN's published files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

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

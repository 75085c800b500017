"""Images of SVHN, and noise on images, as a config builds them."""

import numpy as np
import pytest

pytest.importorskip('mmcv', reason='configs of images need the mm packages')

import projects.dgsa  # noqa: F401  (registers both)
from mmgate.registry import DATASETS, TRANSFORMS
from projects.dgsa.noise import NOISES


def noisy(image, **options):
    np.random.seed(0)
    return TRANSFORMS.build(dict(type='mmgate.RandomNoise', **options))(dict(img=image.copy()))['img']


@pytest.mark.parametrize('dtype', [np.uint8, np.float32], ids=['uint8', 'float32'])
@pytest.mark.parametrize('kind', NOISES)
def test_noise_grows_with_its_level(kind, dtype):
    """Dtype and range stay, and a seed gives the same."""
    image = np.full((64, 64, 3), 128, dtype)
    outs = [noisy(image, kinds=[kind], levels=[level]) for level in (0.05, 0.2)]
    assert all(out.dtype == dtype and out.min() >= 0 and out.max() <= 255 for out in outs)
    assert np.array_equal(outs[1], noisy(image, kinds=[kind], levels=[0.2]))
    few, many = (np.abs(out.astype(float) - 128).mean() for out in outs)
    assert 0 < few < many


@pytest.mark.parametrize(
    'kind, deviation',
    [('gaussian', 25.5), ('uniform', 25.5 / 3**0.5), ('speckle', 12.8), ('shot', 25.5 * (128 / 255) ** 0.5)],
)
def test_noise_has_its_deviation(kind, deviation):
    out = noisy(np.full((256, 256), 128, np.float64), kinds=[kind], levels=[0.1])
    assert out.std() == pytest.approx(deviation, rel=0.03)


def test_salt_and_pepper_turn_a_share_of_pixels():
    out = noisy(np.full((256, 256, 3), 128, np.uint8), kinds=['salt_and_pepper'], levels=[0.2])
    assert ((out == 0) | (out == 255)).mean() == pytest.approx(0.2, abs=0.01)
    assert (out == out[..., :1]).all()  # a pixel, not a channel


def test_a_share_of_images_gets_noise():
    image = np.full((4, 4, 3), 128, np.uint8)
    transform = TRANSFORMS.build(dict(type='mmgate.RandomNoise', levels=[0.5], prob=0.25))
    np.random.seed(0)
    changed = sum(not np.array_equal(transform(dict(img=image.copy()))['img'], image) for _ in range(1000))
    assert 200 < changed < 300


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(kinds=['fog']), "kinds=.'fog'. must list some of gaussian"),
        (dict(kinds='gaussian'), 'must list some of'),
        (dict(levels=[0]), 'numbers above 0'),
        (dict(prob=2), 'prob=2 must lie'),
    ],
)
def test_wrong_noise_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        TRANSFORMS.build(dict(type='mmgate.RandomNoise', **options))


def test_svhn_reads_the_published_files(tmp_path):
    savemat = pytest.importorskip('scipy.io', reason='scipy').savemat
    images = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 5), dtype=np.uint8)
    savemat(tmp_path / 'test_32x32.mat', dict(X=images, y=np.array([[1], [10], [3], [9], [10]], np.uint8)))
    of_svhn = dict(type='mmgate.SVHN', data_root=str(tmp_path), pipeline=[])
    data = DATASETS.build(dict(split='test', **of_svhn))
    assert [data[i]['gt_label'] for i in range(5)] == [1, 0, 3, 9, 0] and data.metainfo['classes'][0] == '0'
    assert np.array_equal(data[2]['img'], images[..., 2])
    with pytest.raises(FileNotFoundError, match='train_32x32.mat'):
        DATASETS.build(dict(split='train', **of_svhn))
    with pytest.raises(ValueError, match="split='val' must be one of"):
        DATASETS.build(dict(split='val', **of_svhn))

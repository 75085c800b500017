"""DGViT: its layers, its start, its configs, and the images of SVHN and with noise that they train on."""

import re
from pathlib import Path

import cv2
import numpy as np
import pytest
import torch

pytest.importorskip('mmpretrain', reason='DGViT is built on the ViT of mmpretrain, which is not installed')

from mmengine.config import Config
from mmengine.runner import Runner

from mmgate import ConfigError
from mmgate.gates import DifferentialGate
from mmgate.registry import DATASETS, MODELS, TRANSFORMS
from projects.dgsa.noise import NOISES

PROJECT = Path(__file__).parents[1]
CONFIGS = PROJECT / 'configs'
SMALL = dict(type='mmgate.DGViT', num_layers=3, embed_dims=32, num_heads=2)


def test_the_pages_config_of_your_own_images_trains(tmp_path, monkeypatch):
    (config,) = re.findall(r'```python\n(_base_.*?)```', (PROJECT / 'README.md').read_text(), re.S)
    monkeypatch.chdir(tmp_path)
    Path('projects').symlink_to(PROJECT.parent)
    Path('my_images.py').write_text(config)
    red = np.full((40, 50, 3), (0, 0, 255), np.uint8)  # as OpenCV writes it
    for kind in 'abc':
        for part in ('train', 'test'):
            Path(f'data/mine/{part}/{kind}').mkdir(parents=True)
            cv2.imwrite(f'data/mine/{part}/{kind}/1.png', red)
    cfg = Config.fromfile('my_images.py')
    cfg.merge_from_dict({'work_dir': 'out', 'train_cfg.max_epochs': 1, 'train_dataloader.num_workers': 0})
    runner = Runner.from_cfg(cfg)
    runner.train()
    assert runner.iter == 1 and Path('out/epoch_1.pth').exists()
    assert runner.val_dataloader.dataset.metainfo['classes'] == ('a', 'b', 'c')
    inputs = runner.model.data_preprocessor(next(iter(runner.test_dataloader)))['inputs']
    assert inputs.shape == (3, 3, 32, 32) and inputs[:, 0].min() > 2 and inputs[:, 1:].max() < -2
    assert runner.test()['accuracy/top1'] == pytest.approx(100 / 3, abs=0.01)


@pytest.mark.parametrize('data', sorted({path.stem.rpartition('_')[2] for path in CONFIGS.glob('dgvit_*100e_*.py')}))
def test_training_images_are_plain_but_for_noise(data):
    """The paper names no augmentation; ``dgvit-crop`` has the usual one."""

    def transforms(name, part):
        cfg = Config.fromfile(CONFIGS / f'{name}_1xb128-100e_{data}.py')
        return [transform['type'] for transform in cfg[f'{part}_dataloader'].dataset.pipeline]

    tested = transforms('dgvit', 'test')
    assert transforms('dgvit', 'train') == transforms('vanilla/vit', 'train') == tested
    assert transforms('dgvit-noise', 'train') == [*tested[:-1], 'mmgate.RandomNoise', tested[-1]]
    assert transforms('dgvit-noise', 'test') == tested
    if data == 'cifar10':
        assert transforms('dgvit-crop', 'train') == ['RandomCrop', 'RandomFlip', *tested]
        assert transforms('dgvit-crop', 'test') == tested


def test_layers_know_their_depth_and_may_be_frozen():
    model = MODELS.build(dict(attention=dict(type='DifferentialMultiheadAttention'), **SMALL))
    found = [module.lambda_init for module in model.modules() if isinstance(module, DifferentialGate)]
    assert found == pytest.approx([0.2, 0.8 - 0.6 * np.exp(-0.3), 0.8 - 0.6 * np.exp(-0.6)])
    frozen = MODELS.build(dict(frozen_stages=2, **SMALL))
    assert [any(p.requires_grad for p in layer.parameters()) for layer in frozen.layers] == [False, False, True]
    vanilla = MODELS.build(dict(attention=None, drop_path_rate=0.1, **SMALL))
    assert type(vanilla.layers[2].attn).__module__.startswith('mmpretrain')
    assert vanilla.layers[2].ffn.drop_path.drop_prob == pytest.approx(0.1)
    with pytest.raises(ConfigError, match='must be 1 or 2'):
        MODELS.build(dict(ffn_dropouts=3, **SMALL))


@pytest.mark.parametrize('gate', ['DifferentialGatedMultiheadAttention', 'DifferentialMultiheadAttention'])
def test_it_starts_where_its_vanilla_partner_starts(gate):
    states = []
    for attention in (None, dict(type=gate)):
        torch.manual_seed(3)
        model = MODELS.build(dict(attention=attention, **SMALL))
        model.init_weights()
        states.append(model.state_dict())
    vanilla, gated = states
    assert all(torch.equal(vanilla[key], gated[key]) for key in vanilla) and len(gated) > len(vanilla)


def noisy(image, **options):
    np.random.seed(0)
    return TRANSFORMS.build(dict(type='mmgate.RandomNoise', **options))(dict(img=image.copy()))['img']


# The deviation that noise of the level 0.1 gives a grey of 128; of salt and pepper the share of pixels.
DEVIATIONS = dict(
    gaussian=25.5, uniform=25.5 / 3**0.5, speckle=12.8, shot=25.5 * (128 / 255) ** 0.5, salt_and_pepper=None
)


@pytest.mark.parametrize('dtype', [np.uint8, np.float32], ids=['uint8', 'float32'])
@pytest.mark.parametrize('kind', NOISES)
def test_noise_has_its_size(kind, dtype):
    """Dtype and range stay, and a seed gives the same."""
    image = np.full((128, 128, 3), 128, dtype)
    out = noisy(image, kinds=[kind], levels=[0.1])
    assert out.dtype == dtype and out.min() >= 0 and out.max() <= 255
    assert np.array_equal(out, noisy(image, kinds=[kind], levels=[0.1]))
    if DEVIATIONS[kind]:
        assert out.astype(float).std() == pytest.approx(DEVIATIONS[kind], rel=0.03)
    else:
        assert ((out == 0) | (out == 255)).mean() == pytest.approx(0.1, abs=0.01)
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

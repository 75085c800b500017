"""The vision models without the mm packages: equal to those of the configs, and trained from a folder."""

import csv
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('timm', reason='the models are built from timm, which is not installed')

from projects.dgt import images

CONFIGS = {
    'vit': 'vanilla/classification/vit',
    'vit_matched': 'vanilla/classification/vit-matched',
    'dgvit_x2': 'dgsa/classification/dgvit-x2',
    'dgvit_x4': 'dgsa/classification/dgvit',
}


@pytest.mark.parametrize('name', CONFIGS)
def test_it_is_the_configs_model(name):
    pytest.importorskip('mmpretrain', reason='the configs need mmpretrain, which is not installed')
    from mmpretrain.registry import MODELS

    from mmgate.mm.config_file import read_config

    path = Path(__file__).parents[3] / f'configs/{CONFIGS[name]}_1xb128-100e_cifar10.py'
    theirs = MODELS.build(read_config(str(path)).model).eval()
    theirs.init_weights()
    ours = images.build(name, 0).eval()
    torch.nn.init.normal_(ours.head[2].weight)  # it starts at 0
    spread = {key: value.std().item() for key, value in theirs.state_dict().items() if value.ndim > 1}
    state = images.mm_names(ours.state_dict())
    theirs.load_state_dict(state, strict=True)
    x = torch.randn(2, 3, 32, 32)
    torch.testing.assert_close(ours(x), theirs(x, mode='tensor'), atol=1e-5, rtol=1e-4)
    for key, deviation in spread.items():  # the starts are alike, too
        if 'head.layers.head' not in key:
            assert state[key].std().item() == pytest.approx(deviation, rel=0.2, abs=1e-3), key


def test_models_share_their_start():
    states = [images.build(name, 3, depth=2).state_dict() for name in images.MODELS]
    for key in ('blocks.1.attn.qkv.weight', 'patch_embed.proj.weight', 'pos_embed', 'head.0.weight'):
        assert all(torch.equal(state[key], states[0][key]) for state in states)
    other = images.build('vit', 4, depth=2).state_dict()
    assert not torch.equal(other['pos_embed'], states[0]['pos_embed'])


def test_images_are_cropped_and_flipped():
    pixels = torch.randint(256, (3, 3, 32, 32), dtype=torch.uint8)
    data = images.Pictures(pixels, 'cpu')
    torch.manual_seed(0)
    numbers = torch.tensor([0, 1, 2, 2, 1, 0, 0, 1, 2, 0])
    found = data.drawn(numbers)
    padded = torch.nn.functional.pad(pixels, (4,) * 4)
    places = set()
    for number, image in zip(numbers, found, strict=True):
        hits = []
        for top, left, flip in product(range(9), range(9), (False, True)):
            crop = padded[number, :, top : top + 32, left : left + 32]
            if torch.allclose(image, data._normalised(crop.flip(-1) if flip else crop)):
                hits.append((top, left, flip))
        assert len(hits) == 1
        places.add(hits[0])
    assert len(places) > 5 and {flip for *_, flip in places} == {False, True}
    torch.testing.assert_close(data.whole(0, 3)[1, 0, 5, 6], (pixels[1, 0, 5, 6].float() - 125.307) / 51.5865)


def test_a_folder_trains_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, 'set_float32_matmul_precision', lambda precision: None)  # of the whole process
    draw = np.random.default_rng(0)
    for part in ('train', 'test'):
        pixels = draw.integers(256, size=(150, 32, 32, 3), dtype=np.uint8)
        np.savez(tmp_path / f'{part}.npz', images=pixels, labels=draw.integers(10, size=150))
    call = ['--data', str(tmp_path), '--out', str(tmp_path / 'out'), '--epochs', '1', '--depth', '1', '--device', 'cpu']
    images.main([*call, '--models', 'vit'])
    images.main([*call, '--models', 'vit', 'dgvit_x2'])
    rows = list(csv.DictReader((tmp_path / 'out/cifar10.csv').open()))
    assert [row['model'] for row in rows] == ['vit', 'dgvit_x2'] and {row['epochs'] for row in rows} == {'1'}
    assert 'backbone.layers.0.ffn.expand.weight' in torch.load(tmp_path / 'out/dgvit_x2.pth')['state_dict']
    with pytest.raises(ValueError, match='train.npz is missing'):
        images.main(['--data', str(tmp_path / 'none'), *call[2:]])


def test_fewer_epochs_where_time_is_short(monkeypatch):
    class Slow:
        on_gpu, steps = False, 100  # 10 epochs of 10 steps

        def advance(self, most):
            now[0] += 0.5 * most

        def wait(self):
            pass

        def restart(self):
            self.again = True

    now = [0.0]
    monkeypatch.setattr(images.time, 'time', lambda: now[0])
    slow = Slow()
    assert images.epochs_in_time([slow], 10, until=1e9) == 10 and slow.again
    now[0] = 0.0
    few = images.epochs_in_time([Slow()], 10, until=40.0)
    assert 1 <= few < 10

"""The vision models without the mm packages: equal to those of the configs, and trained from a folder."""

import re
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('timm', reason='the models are built from timm, which is not installed')

from projects.dgsa import images
from projects.dgsa.side_by_side import train_side_by_side
from projects.dgsa.study import read

CONFIGS = {'vit': 'vanilla/vit', 'vit_matched': 'vanilla/vit-matched', 'dgvit_x2': 'dgvit-x2', 'dgvit_x4': 'dgvit'}
NAMES = {  # of parameters, ours and mmpretrain's
    'head.0': 'head.layers.pre_logits',
    'head.2': 'head.layers.head',
    'patch_embed.proj': 'patch_embed.projection',
    'blocks': 'layers',
    'norm1': 'ln1',
    'norm2': 'ln2',
    'norm': 'ln1',
}


def mm_state(model, networks):
    """Return the parameters of a model by the names of its config."""
    state = {}
    for key, value in model.state_dict().items():
        for old, new in (NAMES | networks).items():
            key = re.sub(rf'(^|\.){re.escape(old)}\.', rf'\1{new}.', key)
        state[key if key.startswith('head') else f'backbone.{key}'] = value
    return state


@pytest.mark.parametrize('name', CONFIGS)
def test_it_is_the_configs_model(name):
    pytest.importorskip('mmpretrain', reason='the configs need mmpretrain, which is not installed')
    from mmengine.config import Config

    from mmgate import MODELS

    config = Config.fromfile(Path(__file__).parents[1] / f'configs/{CONFIGS[name]}_1xb128-100e_cifar10.py')
    theirs = MODELS.build(config.model).eval()
    theirs.init_weights()
    ours = images.build(name, 0).eval()
    torch.nn.init.normal_(ours.head[2].weight)  # it starts at 0
    spread = {key: value.std().item() for key, value in theirs.state_dict().items() if value.ndim > 1}
    layers = ('ffn.expand', 'ffn.project') if 'dgvit' in name else ('ffn.layers.0.0', 'ffn.layers.1')
    state = mm_state(ours, dict(zip(('mlp.fc1', 'mlp.fc2'), layers, strict=True)))
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
    gated, vanilla = states[3:]
    assert all(torch.equal(gated[key], value) for key, value in vanilla.items()) and len(gated) > len(vanilla)
    sizes = [sum(value.numel() for value in state.values()) for state in states]
    assert abs(sizes[1] / sizes[3] - 1) < 1e-3  # the matched ViT, DGViT
    other = images.build('vit', 4, depth=2).state_dict()
    assert not torch.equal(other['pos_embed'], states[0]['pos_embed'])


def test_norms_of_gates_do_not_decay():
    model = images.build('dgvit_x2', 0, depth=1)
    pixels, labels = torch.zeros(8, 3, 32, 32, dtype=torch.uint8), torch.zeros(8, dtype=torch.long)
    training = images.prepared(model, pixels, labels, seed=0, epochs=1, crop=False)
    (kept,) = (group['params'] for group in training.optimizer.param_groups if not group['weight_decay'])
    norms = [parameter for name, parameter in model.named_parameters() if 'head_norm' in name]
    assert norms and [*map(id, kept)] == [*map(id, norms)]


def test_images_are_cropped_and_flipped():
    pixels = torch.randint(1, 256, (3, 3, 32, 32), dtype=torch.uint8)[torch.arange(10) % 3]
    torch.manual_seed(0)
    padded = torch.nn.functional.pad(pixels, (4,) * 4)
    places = set()
    for image, found in zip(padded, images.cropped(pixels), strict=True):
        hits = []
        for top, left, flip in product(range(9), range(9), (False, True)):
            crop = image[:, top : top + 32, left : left + 32]
            if torch.equal(found, crop.flip(-1) if flip else crop):
                hits.append((top, left, flip))
        assert len(hits) == 1
        places.add(hits[0])
    assert len(places) > 5 and {flip for *_, flip in places} == {False, True}


def test_a_folder_trains_and_a_run_that_was_stopped_goes_on(tmp_path, monkeypatch):
    draw = np.random.default_rng(0)
    for part in ('train', 'test'):
        pixels = draw.integers(256, size=(12, 32, 32, 3), dtype=np.uint8)
        np.savez(tmp_path / f'{part}.npz', images=pixels, labels=draw.integers(10, size=12))
    monkeypatch.setattr(images, 'BATCH', 8)
    out = tmp_path / 'out'
    call = ['--out', str(out), '--epochs', '1', '--depth', '1', '--device', 'cpu', '--models', 'vit', 'dgvit_x2']
    with pytest.raises(ValueError, match='train.npz is missing'):
        images.main(['--data', str(tmp_path / 'none'), *call])
    call = ['--data', str(tmp_path), *call]
    images.main([*call, '--seeds', '1', '--models', 'vit'])
    with monkeypatch.context() as short:
        short.setattr(images, 'train_side_by_side', lambda trainings, until: train_side_by_side(trainings, 0.0))
        images.main([*call, '--seeds', '0'])
    assert sorted(path.name for path in out.glob('*.pt')) == ['dgvit_x2-0-1-plain.pt', 'vit-0-1-plain.pt']
    images.main([*call, '--seeds', '0', '1'])
    rows = [(row['model'], row['seed'], row['images']) for row in read(out / 'cifar10.csv')]
    assert [row[:2] for row in rows] == [('vit', '1'), ('vit', '0'), ('dgvit_x2', '0'), ('dgvit_x2', '1')]
    assert {row[2] for row in rows} == {'plain'}
    assert not list(out.glob('*.pt'))
    images.main([*call, '--crop', '--seeds', '0'])
    assert {row['images'] for row in read(out / 'cifar10.csv')[4:]} == {'cropped'}

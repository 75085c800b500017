"""The images and figures of the paper's Tables 10 to 13, with a model small enough."""

import csv
import json

import numpy as np
import pytest
import torch

pytest.importorskip('diffusers', reason='AgentSD is a processor for diffusers, which is not installed')
pytest.importorskip('tomesd', reason='AgentSD merges tokens with tomesd, which is not installed')
pytest.importorskip('transformers', reason="diffusers' Stable Diffusion pipeline needs transformers")

from PIL import Image
from tiny_model import tiny_model
from torch import nn

from projects.agent_sd.tables import FID, TABLES, Row, generate, main

CALL = dict(num_inference_steps=4, height=16, width=24)


@pytest.fixture
def inception(monkeypatch):
    """Mean colours instead of pytorch-fid's Inception, whose weights are to be downloaded."""
    module = pytest.importorskip('pytorch_fid.inception', reason='FID is measured by pytorch-fid')

    class Colours(nn.Module):
        BLOCK_INDEX_BY_DIM = {3: 0}

        def __init__(self, blocks):
            super().__init__()

        def forward(self, images):
            return [images.mean((2, 3), keepdim=True)]

    monkeypatch.setattr(module, 'InceptionV3', Colours)


def pixels(folder):
    return [np.asarray(Image.open(path)) for path in sorted(folder.glob('*.png'))]


def test_the_row_that_the_ablations_share():
    shared = Row('AgentSD', ratio=0.5, value_factor=0.075, power=0.3, early=0.4)
    assert {rows[shared] for rows in TABLES.values()} == {28.42}
    rows = {row for table in TABLES.values() for row in table}
    assert len({row.name for row in rows}) == len(rows) == 20


def test_every_method_has_the_same_noise_and_leaves_the_pipeline(tmp_path):
    pipe = tiny_model(tmp_path)
    prompts, seed = ['a cat', 'a bird', 'a fish'], 5
    expected = [
        np.asarray(pipe(prompt, generator=torch.Generator().manual_seed(seed + number), **CALL).images[0])
        for number, prompt in enumerate(prompts)
    ]
    made = {}
    for row in (Row('SD', 0), Row('ToMeSD'), Row('AgentSD'), Row('AgentSD', early=0.8)):
        seconds = generate(pipe, row, prompts, tmp_path / row.name, batch=2, seed=seed, **CALL)
        made[row.name] = pixels(tmp_path / row.name)
        assert seconds > 0
    for image, other in zip(made['SD'], expected, strict=True):
        assert np.abs(image.astype(int) - other).max() <= 1
    assert len({np.stack(images).tobytes() for images in made.values()}) == 4
    (tmp_path / 'SD/00001.png').unlink()
    written = (tmp_path / 'SD/00000.png').stat().st_mtime_ns
    generate(pipe, Row('SD', 0), prompts, tmp_path / 'SD', batch=2, seed=seed, **CALL)  # only what is missing
    np.testing.assert_array_equal(np.stack(pixels(tmp_path / 'SD')), np.stack(made['SD']))
    assert (tmp_path / 'SD/00000.png').stat().st_mtime_ns == written
    (tmp_path / 'SD/seconds.csv').write_text('2,3.0\n1,9.0\n')
    assert generate(pipe, Row('SD', 0), prompts, tmp_path / 'SD', batch=2, seed=seed, **CALL) == 4  # of an image


def test_distance_to_images_of_any_size_and_folder(inception, tmp_path):
    draw = np.random.default_rng(0)
    for number, name in enumerate(('a/1.JPEG', 'a/2.png', 'b/c/3.jpeg', '4.png')):
        path = tmp_path / 'reference' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw.integers(0, 256, (8 + number, 12, 3), dtype=np.uint8)).save(path)
    fid = FID(tmp_path / 'reference', tmp_path / 'kept.npz', torch.device('cpu'), 3)
    with np.load(tmp_path / 'kept.npz') as kept:
        assert kept['mu'].shape == (3,) and kept['sigma'].shape == (3, 3)
    again = FID(tmp_path / 'kept.npz', tmp_path / 'none.npz', torch.device('cpu'), 3)
    (tmp_path / 'dark').mkdir()
    for number in range(3):
        Image.fromarray(np.full((8, 8, 3), number, np.uint8)).save(tmp_path / f'dark/{number}.png')
    assert fid(tmp_path / 'dark') == again(tmp_path / 'dark') > 0.1
    (tmp_path / 'empty').mkdir()
    with pytest.raises(ValueError, match='empty has 0 images'):
        fid(tmp_path / 'empty')


def test_tables_from_the_command_line(inception, tmp_path, capsys):
    tiny_model(tmp_path)
    (tmp_path / 'classes.txt').write_text('cat\n\nbird\n')
    given = dict(model=tmp_path / 'model', classes=tmp_path / 'classes.txt', steps=4, size=16, dims=3)
    given |= dict(device='cpu', dtype='float32', out=tmp_path / 'out')
    command = ['--tables', '12', '13', *(f'--{name}={value}' for name, value in given.items())]
    main(command)
    assert '| AgentSD | 0.5 | 0.075 | 1 | 0.4 | - |' in capsys.readouterr().out
    images = tmp_path / 'out/AgentSD-0.5-0.075-0.3-0.4'
    assert [path.name for path in sorted(images.glob('*.png'))] == [f'{number:05}.png' for number in range(4)]
    settings = json.loads((tmp_path / 'out/settings.json').read_text())
    assert settings['prompts'][2] == 'A high quality photograph of a bird.'
    main([*command, '--reference', str(images)])
    rows = list(csv.DictReader((tmp_path / 'out/results.csv').open()))
    assert len(rows) == 7  # one stands in both tables
    distances = {(row['power'], row['early']): float(row['fid']) for row in rows}
    assert abs(distances['0.3', '0.4']) < 1e-6
    assert 'Table 13' in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r'images of other settings \(num_inference_steps\): give another --out'):
        main([*command, '--steps', '5'])

"""The commands of docs/papers.md that draw run, on made images of their models' own data sets."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import ROOT, needs_mmpretrain, tool
from helpers.made_data import made_sets
from helpers.shrunk import shrunk
from mmengine.config import Config

from mmgate.analysis.loading import UNTRAINED
from mmgate.mm import cli

VANILLA, PLUG = 'vanilla/classification/{}_8xb128-300e_in1k', 'plug/classification/plug-{}_8xb128-300e_in1k'
SAGA = 'saga/classification/saga-{}_8xb128-300e_in1k'
FLATTEN = '../projects/linear_attention/configs/classification/flatten-{}_8xb128-300e_in1k'
POLA = '../projects/linear_attention/configs/classification/polaformer-{}_8xb128-300e_in1k'
DGSA = 'projects/dgsa/configs'
DETR = '{}deformable-detr_r50_8xb4-50e_coco'
SWIN_AGENT = 'agent/classification/agent-swin-t_8xb128-300e_in1k'
# By the beginning of a command's title on the page: the models of each figure, as many as the command takes.
MODELS = {
    'average gate, DeiT-S': [[PLUG.format('deit-s')]],
    'gate by layer, DeiT-Ti': [[PLUG.format('deit-t'), PLUG.format('deit-s')]],
    'CKA of attention patterns': [[VANILLA.format('deit-s'), PLUG.format('deit-s')]],
    'attention rollout, TinyViT-5M': [[f.format(m) for f in (VANILLA, PLUG)] for m in ('tinyvit-5m', 'gcvit-xxt')],
    'maps of the heads': [[VANILLA.format('deit-t'), PLUG.format('deit-t')]],
    'sampling points': [
        [f'vanilla/deformable_detr/{DETR.format("")}', f'plug/deformable_detr/{DETR.format("plug-")}'],
    ],
    'rollout, DGViT and ViT': [
        [f'../{DGSA}/dgvit_1xb128-100e_{data}', f'../{DGSA}/vanilla/vit-matched_1xb128-100e_{data}']
        for data in ('cifar100', 'svhn')
    ],
    'accuracy and runtime': [[VANILLA.format('swin-t'), SWIN_AGENT]],
    'what the 49 agents': [[SWIN_AGENT]],
    'the curves': [[f.format('pvt-t') for f in (FLATTEN, POLA, SAGA)]],
    'throughput and memory': [[f.format('pvt-t') for f in (VANILLA, FLATTEN, POLA, SAGA)]],
    'throughput and accuracy': [[f.format('pvt-t') for f in (VANILLA, SAGA)]],
    'the same of any model here': [['sdpa_gate/classification/sdpa-gate-deit-t_8xb128-300e_in1k']],
    'sparsity of the gates': [['sdpa_gate/classification/sdpa-gate-deit-t_8xb128-300e_in1k']],
}
LINE = re.compile(r'^- (?:[\w, ]+: )?(.*): `python tools/analysis_tools/(\w+)\.py (.*)`$', re.MULTILINE)
COMMANDS = LINE.findall((ROOT / 'docs/papers.md').read_text())


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    yield from made_sets(tmp_path_factory)


def models_of(title: str) -> list[list[str]]:
    (found,) = (models for beginning, models in MODELS.items() if title.startswith(beginning))
    return found


@pytest.mark.slow
@needs_mmpretrain
@pytest.mark.parametrize('title, name, options', COMMANDS, ids=[title[:30] for title, _, _ in COMMANDS])
def test_a_command_of_the_page_draws(
    title: str, name: str, options: str, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(data)
    for number, models in enumerate(models_of(title)):
        out = tmp_path / f'out{number}'
        files = []
        for model in models:
            files.append(str(tmp_path / f'{Path(model).name}.py'))
            shrunk(Config.fromfile(ROOT / f'configs/{model}.py'), data, images=4).dump(files[-1])
        accuracies = tmp_path / 'accuracies.csv'
        accuracies.write_text('config,accuracy\n' + ''.join(f'{file},75.0\n' for file in files))
        given = {'CHECKPOINT': UNTRAINED, 'DIR': str(out), 'CSV': str(accuracies), '50000': '4', 'cuda': 'cpu'}
        given |= {'16': '1', '256': '1', '512': '224', '800': '224', '1280': '224'}
        arguments = [given.get(word, word) for word in shlex.split(options)]
        assert arguments.count('CONFIG') == len(files)
        remaining = iter(files)
        arguments = [next(remaining) if word == 'CONFIG' else word for word in arguments]
        assert cli.main(tool(name).main, arguments) == 0
        assert all(path.stat().st_size > 2_000 for path in out.rglob('*.png')) and list(out.rglob('*.png'))


def test_every_command_that_draws_has_its_models() -> None:
    assert {title for title in MODELS if any(models_of(line[0]) is MODELS[title] for line in COMMANDS)} == set(MODELS)
    drawing = re.findall(r'plot_\w+\.py', (ROOT / 'docs/papers.md').read_text())
    assert len(COMMANDS) == len(drawing)

"""Published checkpoints: what stays, what goes, and who takes them."""

from __future__ import annotations

import hashlib
import json
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner.checkpoint import CheckpointLoader
from test_end_to_end import CONFIG
from torch import Tensor, nn

import mmgate  # noqa: F401
from mmgate.datasets.shapes import write_shapes
from mmgate.engine import cli
from mmgate.engine.config_file import read_config
from mmgate.engine.preflight import ConfigError
from mmgate.engine.publish import publish
from mmgate.models.backbones import AgentPVT
from mmgate.models.safetensors_file import safetensors_bytes

FORMATS = pytest.mark.parametrize('form', ['pth', 'safetensors'])
DATASET = dict(classes=('circle', 'square'), palette=[(0, 0, 0), (9, 9, 9)])


@pytest.fixture(autouse=True)
def _needs_safetensors(request: pytest.FixtureRequest) -> None:
    if 'safetensors' in request.node.name:
        pytest.importorskip('safetensors', reason='no safetensors')


def trained(path: Path, state: dict[str, Tensor], **more: Any) -> str:
    """Write what mmengine writes while it trains."""
    runtime = dict(cfg='model = dict()', last_ckpt=str(path))
    checkpoint = dict(
        meta=dict(epoch=3, iter=30, seed=1, cfg='model = dict()', dataset_meta=DATASET, mmengine_version='0.10'),
        state_dict=dict(state),
        message_hub=dict(runtime_info=runtime, log_scalars={}),
        optimizer=dict(state={0: dict(exp_avg=torch.ones(1000))}, param_groups=[]),
        param_schedulers=[],
        **more,
    )
    torch.save(checkpoint, path)
    return str(path)


def test_another_kind_of_file_is_refused(tmp_path: Path) -> None:
    source = trained(tmp_path / 'a.pth', nn.Linear(2, 3).state_dict())
    with pytest.raises(ConfigError, match=r'x\.onnx: a published checkpoint is a \.pth'):
        publish(source, str(tmp_path / 'x.onnx'))
    assert publish(source, str(tmp_path / 'mine_v1.5')).name.startswith('mine_v1.5-')


@FORMATS
def test_weights_alone_under_their_hash(form: str, tmp_path: Path) -> None:
    part = torch.arange(1000.0)[:3]
    state = dict(nn.Linear(2, 3).state_dict(), part=part, same=part, half=torch.ones(2, dtype=torch.bfloat16))
    source = trained(tmp_path / 'epoch_3.pth', state)
    path = publish(source, form=form)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:8]
    assert path == tmp_path / f'epoch_3-{digest}.{form}' and path.stat().st_size < 4000
    loaded = CheckpointLoader.load_checkpoint(str(path), map_location='cpu')
    assert set(loaded) == {'meta', 'state_dict'}
    assert loaded['meta'] == dict(cfg='model = dict()', dataset_meta=DATASET, mmengine_version='0.10')
    for key, value in state.items():
        assert torch.equal(loaded['state_dict'][key], value), key
    with pytest.raises(ConfigError, match='exists, and is left as it is'):
        publish(source, form=form)  # the same content has the same name


@pytest.mark.parametrize(
    'out, expected',
    [('model.safetensors', 'model-*.safetensors'), ('v1.2', 'v1.2-*.pth'), ('new/', 'new/epoch_3-*.pth')],
    ids=['safetensors', 'stem', 'folder'],
)
def test_names(out: str, expected: str, tmp_path: Path) -> None:
    path = publish(trained(tmp_path / 'epoch_3.pth', dict(weight=torch.ones(1))), f'{tmp_path}/{out}')
    assert [path] == list(tmp_path.glob(expected))


@pytest.mark.parametrize(
    'weights, ema, timm', [(None, 1, 2), ('averaged', 1, 2), ('last', 3, 1)], ids=['default', 'averaged', 'last']
)
def test_averages(weights: str | None, ema: float, timm: float, tmp_path: Path) -> None:
    """mmengine puts the averages into state_dict and what was averaged where they were."""
    was = {'module.weight': torch.full((1,), 3.0), 'steps': torch.ones(1)}
    first = trained(tmp_path / 'a.pth', dict(weight=torch.ones(1)), ema_state_dict=was)
    second = trained(tmp_path / 'b.pth', dict(weight=torch.ones(1)), state_dict_ema=dict(weight=torch.ones(1) * 2))
    for source, expected in ((first, ema), (second, timm)):
        state = torch.load(publish(source, weights=weights))['state_dict']
        assert list(state) == ['weight'] and state['weight'] == expected


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = trained(tmp_path / 'a.pth', dict(weight=torch.ones(1)))
    with pytest.raises(ConfigError, match='trained without an EMAHook'):
        publish(plain, weights='averaged')
    with pytest.raises(ConfigError, match='holds no weights under state_dict, model or at its top: epoch'):
        torch.save(dict(epoch=3), tmp_path / 'b.pth')
        publish(str(tmp_path / 'b.pth'))
    with pytest.raises(ConfigError, match='cannot be written'):
        publish(plain, str(tmp_path / 'a.pth' / 'x.pth'))
    meta = dict(dataset_meta=dict(classes=1j))
    with pytest.raises(ConfigError, match='cannot be written as JSON: complex is neither'):
        pytest.importorskip('safetensors', reason='no safetensors')
        torch.save(dict(state_dict=dict(weight=torch.ones(1)), meta=meta), tmp_path / 'c.pth')
        publish(str(tmp_path / 'c.pth'), form='safetensors')


def test_arrays_in_meta(tmp_path: Path) -> None:
    meta = dict(dataset_meta=dict(CLASSES=['a'], palette=np.arange(6).reshape(2, 3)), CLASSES=('a',))
    torch.save(dict(state_dict=dict(weight=torch.ones(1)), meta=meta), tmp_path / 'a.pth')
    path = publish(str(tmp_path / 'a.pth'), form='safetensors')
    loaded = CheckpointLoader.load_checkpoint(str(path))['meta']
    assert loaded == dict(dataset_meta=dict(CLASSES=('a',), palette=[(0, 1, 2), (3, 4, 5)]), CLASSES=('a',))


def test_a_config_in_safetensors_is_looked_at(tmp_path: Path) -> None:
    save_file = pytest.importorskip('safetensors.torch', reason='no safetensors').save_file
    evil = json.dumps(dict(cfg="__import__('os').system('true')"))
    save_file(dict(weight=torch.ones(1)), tmp_path / 'a.safetensors', dict(meta=evil))
    with pytest.raises(ConfigError, match='holds a config, cfg, with line 1, which is no assignment'):
        CheckpointLoader.load_checkpoint(str(tmp_path / 'a.safetensors'))


@FORMATS
def test_backbones_take_them(form: str, tmp_path: Path) -> None:
    sizes = dict(embed_dims=8, num_layers=[1, 1, 1, 1], num_heads=[1, 1, 1, 1], agent_nums=(4, 4, 4, 4))
    model = AgentPVT(**sizes, init_cfg=None)
    model.init_weights()
    source = trained(tmp_path / 'a.pth', {f'backbone.{key}': value for key, value in model.state_dict().items()})
    init_cfg = dict(type='Pretrained', checkpoint=str(publish(source, form=form)))
    other = AgentPVT(**sizes, init_cfg=init_cfg)
    other.init_weights()
    for key, value in model.state_dict().items():
        assert torch.equal(other.state_dict()[key], value), key


@FORMATS
def test_the_tools_take_them(
    form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command, then init_cfg, an inferencer, tools/test.py, and --resume, which refuses."""
    from mmdet.apis import DetInferencer

    monkeypatch.chdir(tmp_path)
    write_shapes('data/shapes', num_train=1, num_val=2, size=64)
    Path('config.py').write_text(CONFIG.replace('EPOCHS', '1'))
    cfg = read_config('config.py')
    init_default_scope('mmdet')
    model = MODELS.build(deepcopy(cfg.model))  # mmdet adds to it
    model.init_weights()
    source = trained(tmp_path / 'epoch_1.pth', model.state_dict())
    checkpoint = torch.load(source, weights_only=False)
    checkpoint['meta']['cfg'] = cfg.pretty_text
    torch.save(checkpoint, source)

    command = ROOT / 'tools/model_converters/publish.py'
    space: dict[str, Any] = dict(__name__='publish', __file__=str(command))
    exec(command.read_text(), space)
    assert cli.main(space['run'], [source, '--format', form]) == 0
    (path,) = map(str, tmp_path.glob(f'epoch_1-*.{form}'))
    assert f'{path}: ' in capsys.readouterr().out

    init_cfg = dict(type='Pretrained', checkpoint=path, prefix='backbone.')
    backbone = MODELS.build(dict(cfg.model.backbone, init_cfg=init_cfg))
    backbone.init_weights()
    inferencer = DetInferencer(None, path, device='cpu')  # its config, too
    assert inferencer.model.dataset_meta['classes'] == DATASET['classes']
    for own, other in ((model, inferencer.model), (model.backbone, backbone)):
        for key, value in own.state_dict().items():
            torch.testing.assert_close(other.state_dict()[key], value, msg=key)
    assert cli.main(cli.test, ['config.py', path, '--work-dir', 'test']) == 0
    assert cli.main(cli.train, ['config.py', '--resume', path, '--work-dir', 'train']) == 2
    assert 'holds weights alone, no run that could be resumed' in capsys.readouterr().err


def test_the_same_weights_are_the_same_bytes_in_safetensors() -> None:
    pytest.importorskip('safetensors', reason='no safetensors')
    state = dict(weight=torch.ones(3), bias=torch.zeros(1, dtype=torch.float16))
    written = {safetensors_bytes(state, dict(cfg='Größe = 1', epoch=1)) for _ in range(20)}
    assert len(written) == 1

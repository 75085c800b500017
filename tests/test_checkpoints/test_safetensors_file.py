"""Files of safetensors: their tensors and metadata, by our loader and by mmengine's with ours in it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mmengine.runner.checkpoint import CheckpointLoader

import mmgate  # noqa: F401
from mmgate.checkpoints.gates_file import read_gates
from mmgate.checkpoints.loading import guarded_loaders
from mmgate.checkpoints.safetensors_file import read_safetensors
from mmgate.errors import ConfigError
from mmgate.mm.gates_hook import GatesCheckpointHook

save_file = pytest.importorskip('safetensors.torch', reason='no safetensors').save_file


def test_tensors_and_metadata_come_back(tmp_path: Path) -> None:
    file = tmp_path / 'a.safetensors'
    saved = dict(weight=torch.randn(2, 3), half=torch.ones(1, dtype=torch.bfloat16))
    save_file(saved, file, metadata=dict(author='me'))
    loaded, metadata = read_safetensors(file)
    assert loaded.keys() == saved.keys() and metadata == dict(author='me')
    assert all(loaded[name].dtype == x.dtype and torch.equal(loaded[name], x) for name, x in saved.items())
    save_file(saved, file)
    assert read_safetensors(str(file))[1] == {}


@pytest.mark.parametrize('content', [b'nonsense', None], ids=['damaged', 'missing'])
def test_a_file_that_cannot_be_read_is_a_value_error(content: bytes | None, tmp_path: Path) -> None:
    if content:
        (tmp_path / 'a.safetensors').write_bytes(content)
    with pytest.raises(ValueError, match=r'\w'):
        read_safetensors(tmp_path / 'a.safetensors')


def test_mmengine_loads_them_by_our_loader(tmp_path: Path) -> None:
    save_file(dict(weight=torch.ones(1)), tmp_path / 'a.safetensors')
    with guarded_loaders():
        loaded = CheckpointLoader.load_checkpoint(str(tmp_path / 'a.safetensors'))
        assert loaded == dict(state_dict=dict(weight=torch.ones(1)), meta={})
        (tmp_path / 'a.safetensors').write_bytes(b'nonsense')
        with pytest.raises(ConfigError, match='cannot be read'):
            CheckpointLoader.load_checkpoint(str(tmp_path / 'a.safetensors'))


def test_who_lacks_safetensors_hears_of_it_before_a_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / 'g.safetensors').touch()
    monkeypatch.setattr('mmgate.checkpoints.safetensors_file.why_not', lambda package: f'no module named {package!r}')
    for use in (GatesCheckpointHook, lambda: read_gates(tmp_path / 'g.safetensors')):
        with pytest.raises(ConfigError, match=r"^no module named 'safetensors'\. .* pip install safetensors"):
            use()

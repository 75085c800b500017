"""Exported files as they are opened and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmgate.deploy.runtime import RUNTIMES, Exported
from mmgate.errors import ConfigError


@pytest.mark.parametrize('runtime', RUNTIMES)
def test_what_is_no_exported_file(runtime: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'exported file missing\.onnx does not exist'):
        Exported('missing.onnx', runtime)
    path = tmp_path / 'model.pth'
    path.write_bytes(b'')
    with pytest.raises(ConfigError, match=f'{runtime} cannot open .*model.pth: .'):
        Exported(path, runtime)
    with pytest.raises(ConfigError, match=r"runtime='tensorrt' is unknown; choose one of onnxruntime, openvino"):
        Exported(path, 'tensorrt')


def test_images_of_a_size_that_the_graph_does_not_take() -> None:
    run = object.__new__(Exported)
    run.path, run.notes, run._run = Path('m.onnx'), dict(divisor=2, least=8, takes='even sides'), lambda arrays: arrays
    for height, width in ((6, 10), (10, 6), (9, 10), (10, 9)):
        with pytest.raises(ConfigError, match=f'takes even sides, this batch has {height} x {width}'):
            run(torch.zeros(1, 3, height, width))
    run(torch.zeros(1, 3, 8, 10))
    run.notes = dict(divisor=0, size=[8, 10])
    assert run.takes(8, 10) and not run.takes(8, 12)

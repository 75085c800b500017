"""Exported files as they are opened and run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from mmgate.deploy.runtime import Exported
from mmgate.errors import ConfigError


@pytest.mark.parametrize(
    ('name', 'reason'),
    [
        ('model.pth', r'is no exported file: give an \.onnx file'),
        ('model.onnx', 'onnxruntime cannot read .*model.onnx'),
    ],
)
def test_what_is_no_exported_file(name: str, reason: str, tmp_path: Path) -> None:
    if name.endswith('.onnx'):
        pytest.importorskip('onnxruntime', reason='needs the extra "deploy"')
    (tmp_path / name).write_bytes(b'')
    with pytest.raises(ConfigError, match=reason):
        Exported(tmp_path / name)


def test_images_of_a_size_that_the_graph_does_not_take() -> None:
    run = object.__new__(Exported)
    run.path, run.notes, run._run = Path('m.onnx'), dict(divisor=2, least=8, takes='even sides'), lambda *inputs: inputs
    for height, width in ((6, 10), (10, 6), (9, 10), (10, 9)):
        with pytest.raises(ConfigError, match=f'takes even sides, this batch has {height} x {width}'):
            run(torch.zeros(1, 3, height, width))
    run(torch.zeros(1, 3, 8, 10))
    run.notes = dict(divisor=0, size=[8, 10])
    assert run.takes(8, 10) and not run.takes(8, 12)

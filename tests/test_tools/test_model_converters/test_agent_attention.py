"""The converter of the authors' checkpoints."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.backbones import convert_file, swin_state


def test_converter_refuses_and_keeps_what_exists(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    src, dst = tmp_path / 'src.pth', tmp_path / 'dst.pth'
    torch.save(swin_state(), src)
    dst.write_text('precious')
    assert convert_file(src, dst) == 2 and dst.read_text() == 'precious'
    assert 'exists' in capsys.readouterr().err
    torch.save({'model': {'fc.weight': torch.ones(1)}}, src)
    assert convert_file(src, dst, '--force') == 2 and dst.read_text() == 'precious'
    assert 'Neither the keys of PVT' in capsys.readouterr().err

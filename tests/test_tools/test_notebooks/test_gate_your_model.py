"""The notebooks run from their first cell to their last."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import ROOT
from mmengine.logging import MMLogger

import mmgate

NOTEBOOKS = sorted((ROOT / 'tools/notebooks').glob('*.ipynb'))


def cells(path: Path, kind: str) -> list[dict[str, Any]]:
    return [cell for cell in json.loads(path.read_text())['cells'] if cell['cell_type'] == kind]


@pytest.mark.parametrize('path', NOTEBOOKS, ids=lambda path: path.stem)
def test_links_of_its_prose_lead_somewhere(path: Path) -> None:
    assert json.loads(path.read_text())['nbformat'] == 4
    prose = ''.join(''.join(cell['source']) for cell in cells(path, 'markdown'))
    for link in re.findall(r'\]\(([^)]+)\)', prose):
        assert (path.parent / link).exists(), link


@pytest.fixture
def _level_of_the_log() -> Generator[None, None, None]:
    """A cell sets it. Loggers keep what it allows, and forget that when it is set again, not when it is assigned."""
    logger = MMLogger.get_current_instance()
    level = logger.level
    yield
    logger.setLevel(level)


@pytest.mark.usefixtures('_level_of_the_log')
def test_gate_your_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {'__name__': '__main__'}
    for cell in cells(ROOT / 'tools/notebooks/gate_your_model.ipynb', 'code'):
        exec(compile(''.join(cell['source']), cell['id'], 'exec'), namespace)
    printed = capsys.readouterr().out
    assert 'encoder.layers.0.self_attn\nencoder.layers.1.self_attn\ndecoder.layers.0.cross_attn' in printed
    assert "path 'encoder.layers.*.self_atn' matches no module" in printed
    assert 'the vanilla predictions: True' in printed
    assert namespace['restored'] == namespace['gated'] and not mmgate.gate_parameters(namespace['model'])
    assert (tmp_path / 'pictures/gates.png').stat().st_size > 10_000
    same, vanilla = (namespace[name].pred_instances.scores for name in ('same', 'vanilla'))
    torch.testing.assert_close(same, vanilla, rtol=1e-4, atol=1e-5)
    gates = [readings['gate'].tensors[0] for readings in namespace['recording'].values() if 'gate' in readings]
    assert gates and all(float(gate.abs().max()) > 0 for gate in gates)

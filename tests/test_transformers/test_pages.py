"""The page about other packages' models, run block by block as a reader does; models are small."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conftest import ROOT

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.hub_models import build, feed

import mmgate

with pytest.MonkeyPatch.context() as patch:
    patch.syspath_prepend(ROOT / 'tools/dev')
    import host_table

PAGE = (ROOT / 'docs/hosts.md').read_text()


def blocks(*sections: str) -> list[str]:
    """Return the code of the page's sections; '' is its beginning."""
    parts = {part.partition('\n')[0]: part for part in ('\n' + PAGE.partition('\n')[2]).split('\n## ')}
    return [block for name in sections for block in re.findall(r'```python\n(.*?)```', parts[name], re.S)]


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_hosts(capsys: pytest.CaptureFixture[str]) -> None:
    model = build('deformable_detr')
    (block,) = blocks('')
    exec(block, dict(model=model))
    printed = capsys.readouterr().out.splitlines()
    assert len(printed) == 6 and printed[0].startswith('model.encoder.layers.0.self_attn DeformableDetrMultiscale')
    assert "'n_levels': 4" in printed[0] and 'PLuGMultiScaleDeformableAttention' in printed[0]
    assert len([one for one in mmgate.list_attention(model) if one.gate]) == 4


def test_transformers() -> None:
    for package in ('matplotlib', 'onnxscript', 'onnxruntime'):
        pytest.importorskip(package, reason='the page draws and exports')
    from PIL import Image

    pixels = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
    Image.fromarray(pixels).save('street.jpg')
    build('deformable_detr').save_pretrained('vanilla')
    space: dict[str, Any] = dict(feed('deformable_detr', padded=True))
    gates = []
    for block in blocks('transformers', 'Export', 'Declare a class', 'Look at sampling points'):
        exec(block, space)
        gates.append(len(mmgate.gate_parameters(space['model'])))
    written = {path.name for path in Path().iterdir()}
    assert {'gates.safetensors', 'gated', 'gated.onnx', 'points.png'} <= written
    # Of the encoder, the decoder and the queries at first, then of a checkpoint with the encoder's.
    assert gates[0] > gates[1] > 0


def test_the_table_of_hosts_is_what_the_adapters_say() -> None:
    pytest.importorskip('timm', reason='the table has its hosts')
    assert host_table.written() == PAGE, 'run python -P tools/dev/host_table.py'


def test_timm() -> None:
    pytest.importorskip('timm', reason='needs timm')
    space: dict[str, Any] = {}
    (block,) = blocks('timm')
    exec(block, space)
    assert len([one for one in mmgate.list_attention(space['model']) if one.gate]) == 12

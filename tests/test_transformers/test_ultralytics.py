"""RT-DETR of ultralytics with gates, as its page has it: trained, saved, removed, exported and drawn."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

TEXT = (ROOT / 'docs/hosts.md').read_text()
PAGE = re.findall(r'```python\n(.*?)```', TEXT.partition('\n## ultralytics\n')[2].partition('\n## ')[0], re.S)
(LOOK,) = re.findall(r'```python\n(.*?)```', TEXT.partition('\n## Look at sampling points\n')[2], re.S)
SIDE = 128  # of which the levels have more pixels than the decoder has queries


@pytest.fixture(autouse=True)
def _settings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the package from writing outside of the test's folder, and from installing anything."""
    for name, value in (('YOLO_CONFIG_DIR', str(tmp_path)), ('YOLO_AUTOINSTALL', 'false'), ('YOLO_OFFLINE', 'true')):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    pytest.importorskip('ultralytics', reason='needs ultralytics, in the environment of transformers')
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def small(name: str = 'rtdetr-l.yaml') -> dict[str, Any]:
    """Return ultralytics' RT-DETR with a few channels, queries and layers."""
    from ultralytics.nn.tasks import yaml_model_load

    cfg = copy.deepcopy(yaml_model_load(name))
    cfg.update(nc=3, scale='l', scales=dict(l=[0.33, 0.25, 256]))
    return cfg


def build() -> tuple[Any, dict[str, Any]]:
    """Return a detector, gated as the page does it, and the names in the page's code."""
    import yaml

    Path('small-rtdetr.yaml').write_text(yaml.safe_dump(small()))
    torch.manual_seed(0)
    space: dict[str, Any] = {}
    code = PAGE[0].replace('rtdetr-l.yaml', 'small-rtdetr.yaml')
    exec(code.replace('mmgate.swap_attention', 'names = mmgate.swap_attention'), space)
    model = space['detector'].model.eval()
    for name, parameter in model.named_parameters():  # that start at zero, where no gate has an effect
        if re.search(r'(attention_weights|sampling_offsets)\.weight|bbox_head.*weight', name):
            nn.init.normal_(parameter, std=0.1)
        if 'enc_score_head' in name:  # apart by more than rounding, which would exchange the queries that they choose
            nn.init.normal_(parameter, std=3.0)
    return model, space


def images() -> Tensor:
    return torch.rand(2, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(0))


def predictions(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(images())[0]


def assert_same_rows(found: Tensor, expected: Tensor) -> None:
    """Compare predictions ``(B, Q, 6)`` in any order: where two scores nearly tie, rounding exchanges their rows."""
    assert found.shape == expected.shape
    apart = torch.cdist(found, expected, compute_mode='donot_use_mm_for_euclid_dist')
    assert apart.amin(1).max() < 1e-3 and apart.amin(2).max() < 1e-3


def test_the_model_starts_as_it_was_and_its_loss_trains_the_gates(tmp_path: Path) -> None:
    """Then gates are saved, removed and loaded."""
    import mmgate

    model, space = build()
    assert len(space['names']) == 13 and 'model.28.decoder.layers.5.cross_attn' in space['names']
    listed = {one.path: one for one in mmgate.list_attention(model)}
    assert {path for path, one in listed.items() if one.gate} == set(space['names'])
    assert listed['model.28.decoder.layers.5.cross_attn'].class_name == 'MSDeformAttn'
    assert all(any('heads' in size for size in listed[name].sizes) for name in space['names'])
    start = predictions(model)
    with mmgate.gates_disabled(model):
        assert_same_rows(predictions(model), start)
    mmgate.train_only_gates(model)
    model.train()
    model.nc = 3  # as its trainer sets it
    batch = dict(
        img=images(),
        cls=torch.tensor([[1.0], [2.0]]),
        bboxes=torch.tensor([[0.5, 0.5, 0.3, 0.4], [0.4, 0.6, 0.2, 0.2]]),
        batch_idx=torch.tensor([0, 1]),
    )
    loss, _ = model.loss(batch)
    loss.backward()
    gates = mmgate.gate_parameters(model)
    learning = [name for name, one in gates.items() if one.grad is not None and one.grad.abs().sum() > 0]
    assert any('cross_attn' in name for name in learning) and any('self_attn' in name for name in learning)
    with torch.no_grad():
        for parameter in gates.values():
            parameter.add_(torch.randn_like(parameter))
    model.eval()
    trained = predictions(model)
    with pytest.raises(AssertionError):
        assert_same_rows(trained, start)
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    mmgate.restore_attention(model)
    assert_same_rows(predictions(model), start)
    mmgate.load_gates(model, tmp_path / 'gates.safetensors')
    assert_same_rows(predictions(model), trained)


def data_set(root: Path) -> None:
    """Write two images with a box each, and their YAML."""
    from PIL import Image

    for part in ('train', 'val'):
        for folder in ('images', 'labels'):
            (root / folder / part).mkdir(parents=True)
        for number in range(2):
            pixels = np.random.default_rng(number).integers(0, 255, (SIDE, SIDE, 3), np.uint8)
            Image.fromarray(pixels).save(root / f'images/{part}/{number}.jpg')
            (root / f'labels/{part}/{number}.txt').write_text('1 0.5 0.5 0.4 0.4\n')
    names = '{0: cat, 1: dog, 2: bird}'
    (root / 'data.yaml').write_text(f'path: {root}\ntrain: images/train\nval: images/val\nnames: {names}\n')


def test_its_trainer_trains_the_gates(tmp_path: Path) -> None:
    """As the page has it; the checkpoint that it writes has them."""
    import mmgate

    data_set(tmp_path)
    model, space = build()
    mmgate.restore_attention(model)
    quick = f"epochs=1, imgsz={SIDE}, batch=2, workers=0, device='cpu', plots=False, val=False, amp=False"
    code = PAGE[1].replace("data='data.yaml', epochs=1", f"data='data.yaml', {quick}")
    assert quick in code
    exec(code, space)
    saved = mmgate.gate_parameters(space['detector'].model)
    assert len(saved) > 20 and (tmp_path / 'gates.safetensors').is_file()
    start = mmgate.gate_parameters(build()[0])
    assert any((saved[name].float() - one).abs().max() > 0 for name, one in start.items())


def test_an_export_holds_the_gates() -> None:
    onnxruntime = pytest.importorskip('onnxruntime', reason='needs onnxruntime')
    onnx = pytest.importorskip('onnx', reason='needs onnx')
    import mmgate

    model, space = build()
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.5)
    quick = f"detector.export(format='onnx', imgsz={SIDE}, simplify=False, device='cpu')"
    exec(PAGE[2].replace("detector.export(format='onnx')", f'file = {quick}'), space)
    assert 'GridSample' not in {node.op_type for node in onnx.load(space['file']).graph.node}
    session = onnxruntime.InferenceSession(space['file'])
    found = session.run(None, {session.get_inputs()[0].name: images()[:1].numpy()})[0]
    with torch.no_grad():
        expected = model(images()[:1])[0]
        with mmgate.gates_disabled(model):
            vanilla = model(images()[:1])[0]
    assert_same_rows(torch.from_numpy(found), expected)
    with pytest.raises(AssertionError):
        assert_same_rows(torch.from_numpy(found), vanilla)


def test_sampling_points_are_drawn(tmp_path: Path) -> None:
    """Those of the gated model, which at the start are the vanilla one's."""
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    from PIL import Image

    import mmgate
    from mmgate.analysis.probes.sampling import record_sampling

    model, space = build()
    pixels = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
    Image.fromarray(pixels).save('street.jpg')
    code = LOOK.replace('pixel_values, pixel_mask', 'images').replace('[3, 7]', '[0, 1]')
    exec(code, dict(space, model=model, images=images()))
    assert Path('points.png').stat().st_size > 10_000
    found = []
    for _ in range(2):
        with record_sampling(model) as recording, torch.no_grad():
            model(images())
        found.append({path: one['locations'].last for path, one in recording.items() if 'locations' in one})
        mmgate.restore_attention(model)
    assert len(found[0]) == 6
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)

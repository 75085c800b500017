"""RF-DETR of rfdetr and RT-DETR of ultralytics with gates, as their page has it: trained, saved, exported."""

from __future__ import annotations

import copy
import re
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from PIL import Image
from torch import Tensor, nn

import mmgate

TEXT = (ROOT / 'docs/hosts.md').read_text()
# Of layers that start at zero, where no gate has an effect.
AT_ZERO = r'(attention_weights|sampling_offsets)\.weight|bbox_(embed|head).*weight'


def blocks(section: str) -> list[str]:
    return re.findall(r'```python\n(.*?)```', TEXT.partition(f'\n## {section}\n')[2].partition('\n## ')[0], re.S)


class RFDETR:
    """A small RF-DETR, gated as the page does it, whose code has names in ``space``."""

    page = blocks('RF-DETR')
    side, gates = 64, 4

    def __init__(self) -> None:
        self.space: dict[str, Any] = {}
        torch.manual_seed(0)
        exec(self.small(self.page[0]).replace('mmgate.swap_attention', 'names = mmgate.swap_attention'), self.space)
        self.model: Any = self.found().eval()
        for name, parameter in self.model.named_parameters():
            if re.search(AT_ZERO, name):
                nn.init.normal_(parameter, std=0.1)
            if 'enc_score_head' in name:  # apart by more than rounding, which would exchange the queries it chooses
                nn.init.normal_(parameter, std=3.0)

    def small(self, code: str) -> str:
        options = 'num_queries=20, num_select=20, group_detr=2, resolution=64, positional_encoding_size=4'
        return code.replace(
            'RFDETRNano()', f"RFDETRNano(pretrain_weights=None, num_classes=5, device='cpu', {options})"
        )

    def found(self) -> Any:
        return self.space['detector'].model.model

    def nested(self, images: Tensor) -> Any:
        from rfdetr.utilities.tensors import nested_tensor_from_tensor_list

        return nested_tensor_from_tensor_list([*images])

    def rows(self, images: Tensor) -> Tensor:
        """Return boxes and scores, ``(B, Q, 4 + classes)``."""
        found = self.model(self.nested(images))
        return torch.cat([found['pred_boxes'], found['pred_logits']], -1)

    def export(self) -> Path:
        exec(self.page[2].splitlines()[1], self.space)
        (file,) = Path('exported').glob('*.onnx')
        return file


class Ultralytics(RFDETR):
    page = blocks('ultralytics')
    side, gates = 128, 13  # more pixels than queries

    def small(self, code: str) -> str:
        import yaml
        from ultralytics.nn.tasks import yaml_model_load

        cfg = copy.deepcopy(yaml_model_load('rtdetr-l.yaml'))
        cfg.update(nc=3, scale='l', scales=dict(l=[0.33, 0.25, 256]))
        Path('small-rtdetr.yaml').write_text(yaml.safe_dump(cfg))
        return code.replace('rtdetr-l.yaml', 'small-rtdetr.yaml')

    def found(self) -> Any:
        return self.space['detector'].model

    def nested(self, images: Tensor) -> Any:
        return images

    def rows(self, images: Tensor) -> Tensor:
        return self.model(images)[0]

    def export(self) -> Path:
        quick = f"detector.export(format='onnx', imgsz={self.side}, simplify=False, device='cpu')"
        exec(self.page[2].replace("detector.export(format='onnx')", f'file = {quick}'), self.space)
        return Path(self.space['file'])


@pytest.fixture(autouse=True)
def _scratch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Keep the packages from writing outside of the test's folder, and from installing anything."""
    for name, value in (('YOLO_CONFIG_DIR', str(tmp_path)), ('YOLO_AUTOINSTALL', 'false'), ('YOLO_OFFLINE', 'true')):
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        yield


def build(kind: type[RFDETR]) -> Any:
    """Return a small detector of a package that is there, or skip the test."""
    package = 'rfdetr' if kind is RFDETR else 'ultralytics'
    pytest.importorskip(package, reason=f'needs {package}, in the environment of transformers')
    return kind()


def images(one: RFDETR) -> Tensor:
    return torch.rand(2, 3, one.side, one.side, generator=torch.Generator().manual_seed(0))


def moved(model: nn.Module) -> None:
    with torch.no_grad():
        for parameter in mmgate.gate_parameters(model).values():
            parameter.add_(torch.randn_like(parameter))


def apart(found: Tensor, expected: Tensor) -> float:
    """Return how far rows ``(B, Q, n)`` are from the nearest one, as rounding exchanges those whose scores tie."""
    assert found.shape == expected.shape
    distances = torch.cdist(found, expected, compute_mode='donot_use_mm_for_euclid_dist')
    return max(distances.amin(1).max().item(), distances.amin(2).max().item())


def of_parts(model: nn.Module, chosen: Callable[[str, Tensor], Any]) -> set[str]:
    """Return the parts of the names of all gates that are chosen."""
    gates = mmgate.gate_parameters(model)
    return {part for name, gate in gates.items() if chosen(name, gate) for part in name.split('.')}


every_detector = pytest.mark.parametrize('kind', [RFDETR, Ultralytics])


@every_detector
def test_gates_start_as_the_model_was_and_are_saved_removed_and_loaded(kind: type[RFDETR]) -> None:
    one = build(kind)
    model, names, pixels = one.model, one.space['names'], images(one)
    listed = {found.path: found for found in mmgate.list_attention(model)}
    assert len(names) == one.gates and {path for path, found in listed.items() if found.gate} == set(names)
    assert {listed[name].class_name for name in names} == {'MSDeformAttn', 'MultiheadAttention'}
    assert all(any('heads' in size for size in listed[name].sizes) for name in names)
    start = one.rows(pixels)
    with mmgate.gates_disabled(model):
        assert apart(one.rows(pixels), start) < 1e-3
    moved(model)
    changed = one.rows(pixels)
    assert apart(changed, start) > 1e-3
    if kind is RFDETR:  # of the other its trainer shows which gates learn
        changed.square().sum().backward()
        assert {'cross_attn', 'self_attn'} <= of_parts(model, lambda _, gate: gate.grad is not None and gate.grad.any())
    mmgate.save_gates(model, 'gates.safetensors')
    mmgate.restore_attention(model)
    assert apart(one.rows(pixels), start) < 1e-3
    mmgate.load_gates(model, 'gates.safetensors')
    assert apart(one.rows(pixels), changed) < 1e-3


@every_detector
def test_an_export_holds_the_gates(kind: type[RFDETR]) -> None:
    onnxruntime = pytest.importorskip('onnxruntime', reason='needs onnxruntime')
    onnx = pytest.importorskip('onnx', reason='needs onnx')
    one = build(kind)
    moved(one.model)
    mmgate.save_gates(one.model, 'gates.safetensors')
    file = one.export()
    assert 'GridSample' not in {node.op_type for node in onnx.load(file).graph.node}
    session = onnxruntime.InferenceSession(str(file))
    image = images(one)[:1]
    found = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    rows = torch.cat([torch.from_numpy(part) for part in sorted(found, key=lambda part: part.shape[-1])], -1)
    assert apart(rows, one.rows(image)) < 1e-3
    with mmgate.gates_disabled(one.model):
        assert apart(rows, one.rows(image)) > 1e-3


def test_predictions_of_rfdetr_have_the_gates() -> None:
    """Of the detector's method, which preprocesses images and chooses boxes."""
    pytest.importorskip('supervision', reason='needs supervision, which rfdetr predicts with')
    one = build(RFDETR)
    image = Image.fromarray(np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8))
    moved(one.model)
    gated = one.space['detector'].predict(image, threshold=0.0).confidence
    with mmgate.gates_disabled(one.model):
        vanilla = one.space['detector'].predict(image, threshold=0.0).confidence
    assert len(gated) and (len(gated) != len(vanilla) or np.abs(gated - vanilla).max() > 1e-4)


def test_the_trainer_of_rfdetr_trains_the_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page has it, with a batch instead of a data set."""
    one = build(RFDETR)
    training = pytest.importorskip('rfdetr.training', reason="needs rfdetr's trainer: rfdetr[train]")
    from pytorch_lightning import Trainer
    from rfdetr.config import TrainConfig

    page = one.page[1].replace("TrainConfig(dataset_dir='data', output_dir='work')", 'given')
    assert page != one.page[1]
    one.space['given'] = TrainConfig(dataset_dir='.', output_dir='.', epochs=1, accelerator='cpu', use_ema=False)
    target = dict(boxes=torch.tensor([[0.5, 0.5, 0.3, 0.4]]), labels=torch.tensor([1]))
    loader = torch.utils.data.DataLoader([(one.nested(images(one)), [target, target])], batch_size=None)
    quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = Trainer(max_steps=1, accelerator='cpu', limit_val_batches=0, **quiet)
    monkeypatch.setattr(training, 'build_trainer', lambda *_: trainer)
    monkeypatch.setattr(training, 'RFDETRDataModule', lambda *_: loader)
    one.space['detector'].model_config.pretrain_weights = None
    mmgate.restore_attention(one.model)
    exec(page, one.space)
    trained = mmgate.gate_parameters(one.space['module'].model)
    start = mmgate.gate_parameters(RFDETR().model)
    assert any(not torch.equal(trained[name].cpu(), gate) for name, gate in start.items())
    exec(one.page[2].splitlines()[0], one.space)
    loaded = mmgate.gate_parameters(one.found())
    assert all(torch.equal(loaded[name], gate.cpu()) for name, gate in trained.items())


def test_the_trainer_of_ultralytics_trains_the_gates() -> None:
    """As the page has it; the checkpoint that it writes has them."""
    one = build(Ultralytics)
    for folder in ('images', 'labels'):
        Path(folder).mkdir()
    for number in range(2):
        pixels = np.random.default_rng(number).integers(0, 255, (one.side, one.side, 3), np.uint8)
        Image.fromarray(pixels).save(f'images/{number}.jpg')
        Path(f'labels/{number}.txt').write_text('1 0.5 0.5 0.4 0.4\n')
    names = '{0: cat, 1: dog, 2: bird}'
    Path('data.yaml').write_text(f'path: {Path.cwd()}\ntrain: images\nval: images\nnames: {names}\n')
    mmgate.restore_attention(one.model)
    quick = f"epochs=1, imgsz={one.side}, batch=2, workers=0, device='cpu', plots=False, val=False, amp=False"
    code = one.page[1].replace("data='data.yaml', epochs=1", f"data='data.yaml', {quick}")
    assert quick in code
    exec(code, one.space)
    assert Path('gates.safetensors').is_file()
    start = mmgate.gate_parameters(Ultralytics().model)
    changed = of_parts(one.found(), lambda name, gate: not torch.equal(gate.float(), start[name]))
    assert {'cross_attn', 'self_attn'} <= changed

"""RF-DETR of rfdetr with gates, as its page has it: trained, saved, removed, exported and drawn."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from conftest import ROOT
from torch import Tensor, nn

pytest.importorskip('rfdetr', reason='needs rfdetr, in the environment of transformers')

import mmgate
from mmgate.analysis.probes.sampling import record_sampling
from mmgate.hosts.projects import MSDeformAttnAdapter

TEXT = (ROOT / 'docs/hosts.md').read_text()
PAGE = re.findall(r'```python\n(.*?)```', TEXT.partition('\n## RF-DETR\n')[2].partition('\n## ')[0], re.S)
(LOOK,) = re.findall(r'```python\n(.*?)```', TEXT.partition('\n## Look at sampling points\n')[2], re.S)
SIDE = 64
SMALL = dict(num_queries=20, num_select=20, group_detr=2, resolution=SIDE, positional_encoding_size=SIDE // 16)


def build() -> tuple[Any, dict[str, Any]]:
    """Return a small detector, gated as the page does it, and the names in the page's code."""
    options = ', '.join(f'{name}={value}' for name, value in SMALL.items())
    small = f"RFDETRNano(pretrain_weights=None, num_classes=5, device='cpu', {options})"
    space: dict[str, Any] = {}
    torch.manual_seed(0)
    exec(
        PAGE[0].replace('RFDETRNano()', small).replace('mmgate.swap_attention', 'names = mmgate.swap_attention'), space
    )
    model = space['detector'].model.model.eval()
    moved_off_zero(model)
    return model, space


def moved_off_zero(model: nn.Module) -> None:
    """Give the layers that start at zero, where no gate has an effect, some size."""
    for name, parameter in model.named_parameters():
        if re.search(r'(attention_weights|sampling_offsets)\.weight|bbox_embed.*weight', name):
            nn.init.normal_(parameter, std=0.1)


def samples() -> Any:
    from rfdetr.utilities.tensors import nested_tensor_from_tensor_list

    generator = torch.Generator().manual_seed(0)
    return nested_tensor_from_tensor_list([torch.rand(3, SIDE, SIDE, generator=generator) for _ in range(2)])


def boxes(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model(samples())['pred_boxes']


def targets() -> list[dict[str, Tensor]]:
    return [dict(boxes=torch.tensor([[0.5, 0.5, 0.3, 0.4]]), labels=torch.tensor([1])) for _ in range(2)]


def test_the_model_starts_as_it_was_and_its_loss_trains_the_gates(tmp_path: Path) -> None:
    """Then gates are saved, removed and loaded; rfdetr hands its cross-attention the sizes of levels as numbers."""
    from rfdetr.config import TrainConfig
    from rfdetr.models import build_criterion_from_config

    model, space = build()
    gated = [part for part in model.modules() if isinstance(part, MSDeformAttnAdapter)]
    assert len(space['names']) == 4 and len(gated) == 2
    listed = {one.path: one for one in mmgate.list_attention(model)}
    assert {path for path, one in listed.items() if one.gate} == set(space['names'])
    assert {listed[name].class_name for name in space['names']} == {'MSDeformAttn', 'MultiheadAttention'}
    assert all(any('heads' in size for size in listed[name].sizes) for name in space['names'])
    start = boxes(model)
    with mmgate.gates_disabled(model):
        torch.testing.assert_close(boxes(model), start, rtol=1e-4, atol=1e-5)
    config = TrainConfig(dataset_dir=str(tmp_path), output_dir=str(tmp_path))
    criterion, _ = build_criterion_from_config(space['detector'].model_config, config)
    optimizer = torch.optim.AdamW([model.get_parameter(name) for name in mmgate.train_only_gates(model)], lr=0.5)
    model.train()
    found = criterion(model(samples(), targets()), targets())
    sum(found[name] * weight for name, weight in criterion.weight_dict.items() if name in found).backward()
    assert any(parameter.grad.abs().sum() > 0 for parameter in mmgate.gate_parameters(model).values())
    optimizer.step()
    model.eval()
    trained = boxes(model)
    assert (trained - start).abs().max() > 1e-4
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    mmgate.restore_attention(model)
    torch.testing.assert_close(boxes(model), start, rtol=1e-4, atol=1e-5)
    mmgate.load_gates(model, tmp_path / 'gates.safetensors')
    torch.testing.assert_close(boxes(model), trained, rtol=1e-4, atol=1e-5)


def test_its_trainer_trains_the_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the page has it, with a batch instead of a data set."""
    training = pytest.importorskip('rfdetr.training', reason="needs rfdetr's trainer: rfdetr[train]")
    from rfdetr.config import TrainConfig

    _, space = build()
    config = TrainConfig(
        dataset_dir=str(tmp_path), output_dir=str(tmp_path), epochs=1, accelerator='cpu', use_ema=False
    )
    page = PAGE[1].replace("TrainConfig(dataset_dir='data', output_dir='work')", 'given')
    assert page != PAGE[1]
    space['given'] = config

    class Batches(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Any:
            return samples(), targets()

    def trainer(*args: Any, **kwargs: Any) -> Any:
        from pytorch_lightning import Trainer

        quiet = dict(logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False)
        return Trainer(max_steps=1, accelerator='cpu', default_root_dir=str(tmp_path), limit_val_batches=0, **quiet)

    loader = torch.utils.data.DataLoader(Batches(), batch_size=None)
    monkeypatch.setattr(training, 'build_trainer', trainer)
    monkeypatch.setattr(training, 'RFDETRDataModule', lambda *args: loader)
    monkeypatch.chdir(tmp_path)
    space['detector'].model_config.pretrain_weights = None
    mmgate.restore_attention(space['detector'].model.model)
    exec(page, space)
    module = space['module'].model
    before = {name: one.clone() for name, one in mmgate.gate_parameters(build()[0]).items()}
    after = mmgate.gate_parameters(module)
    assert any(not torch.equal(after[name].cpu(), one) for name, one in before.items())
    exec(PAGE[2].splitlines()[0], space)
    loaded = mmgate.gate_parameters(space['detector'].model.model)
    assert all(torch.equal(loaded[name], one.cpu()) for name, one in after.items())


def test_an_export_holds_the_gates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    onnxruntime = pytest.importorskip('onnxruntime', reason='needs onnxruntime')
    onnx = pytest.importorskip('onnx', reason='needs onnx')
    model, space = build()
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.5)
    monkeypatch.chdir(tmp_path)
    exec(PAGE[2].splitlines()[1], space)
    (file,) = (tmp_path / 'exported').glob('*.onnx')
    session = onnxruntime.InferenceSession(str(file))
    image = samples().tensors[:1]
    found = session.run(None, {session.get_inputs()[0].name: image.numpy()})
    from rfdetr.utilities.tensors import nested_tensor_from_tensor_list

    with torch.no_grad():
        expected = model(nested_tensor_from_tensor_list([image[0]]))
        with mmgate.gates_disabled(model):
            vanilla = model(nested_tensor_from_tensor_list([image[0]]))
    by_size = {value.shape[-1]: value for value in found}
    for name in ('pred_boxes', 'pred_logits'):
        exported = by_size[expected[name].shape[-1]]
        np.testing.assert_allclose(exported, expected[name].numpy(), rtol=1e-4, atol=1e-4)
        assert np.abs(exported - vanilla[name].numpy()).max() > 1e-3
    assert 'GridSample' not in {node.op_type for node in onnx.load(file).graph.node}
    assert isinstance(space['detector'].model.model.transformer.decoder.layers[0].cross_attn, MSDeformAttnAdapter)


def test_predictions_have_the_gates(tmp_path: Path) -> None:
    """Of the detector's method, which preprocesses images and chooses boxes."""
    pytest.importorskip('supervision', reason='needs supervision, which rfdetr predicts with')
    from PIL import Image

    model, space = build()
    pixels = np.random.default_rng(0).integers(0, 255, (48, 64, 3), np.uint8)
    found = []
    for std in (0.0, 2.0):
        for parameter in mmgate.gate_parameters(model).values():
            nn.init.normal_(parameter, std=std)
        found.append(space['detector'].predict(Image.fromarray(pixels), threshold=0.0))
    with mmgate.gates_disabled(model):
        found.append(space['detector'].predict(Image.fromarray(pixels), threshold=0.0))
    at_start, gated, vanilla = (one.confidence for one in found)
    np.testing.assert_allclose(at_start, vanilla, rtol=1e-4, atol=1e-5)
    assert len(gated) and (len(gated) != len(vanilla) or np.abs(gated - vanilla).max() > 1e-4)


def test_sampling_points_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of the gated model, which at the start are the vanilla one's."""
    pytest.importorskip('matplotlib', reason='needs matplotlib')
    from PIL import Image

    model, space = build()
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 255, (480, 640, 3), np.uint8)
    Image.fromarray(pixels).save('street.jpg')
    code = LOOK.replace('pixel_values, pixel_mask', 'images').replace('[3, 7]', '[0, 1]')
    exec(code, dict(space, model=model, images=samples().tensors))
    assert (tmp_path / 'points.png').stat().st_size > 10_000
    found = []
    for _ in range(2):
        with record_sampling(model) as recording, torch.no_grad():
            model(samples())
        found.append({path: one['locations'].last for path, one in recording.items() if 'locations' in one})
        mmgate.restore_attention(model)
    assert len(found[0]) == 2
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)

"""Files of models without a config: what they compute, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TORCH
from torch import Tensor, nn

import mmgate
from mmgate.deploy import to_onnx
from mmgate.deploy.runtime import Exported
from mmgate.deploy.to_onnx import export_onnx
from mmgate.errors import ConfigError

if TORCH < (2, 9):
    pytest.skip('whole models are exported by torch 2.9 or newer', allow_module_level=True)
for package in ('onnx', 'onnxscript', 'onnxruntime'):
    pytest.importorskip(package, reason='needs the extra "deploy"')

C = 16


class Classifier(nn.Module):
    """Attention over the columns of an image, whose outputs have names."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, 2, 32, batch_first=True), 1)
        self.head = nn.Linear(C, 3)

    def forward(self, images: Tensor, shift: Tensor | None = None) -> dict[str, Any]:
        tokens = self.encoder(images.mean(1).transpose(1, 2))  # (B, W, C)
        tokens = tokens if shift is None else tokens + shift
        return dict(logits=self.head(tokens.mean(1)), tokens=tokens, more=[tokens], loss=None)


def gated() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Classifier()
    mmgate.swap_attention(model, dict(path='encoder.layers.*.self_attn', type='PLuGMultiheadAttention'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter)
    return model, dict(images=torch.randn(2, 3, C, 6))


def run(path: Path, *inputs: Tensor) -> list[Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(path)
    fed = {entry.name: one.numpy() for entry, one in zip(session.get_inputs(), inputs, strict=True)}
    return [torch.from_numpy(output) for output in session.run(None, fed)]


def test_a_file_holds_the_gates_and_names_its_outputs(tmp_path: Path) -> None:
    model, given = gated()
    path = tmp_path / 'new' / 'gated.onnx'
    found = export_onnx(model, given, path)
    assert set(found) == {'logits', 'tokens'} and max(found.values()) < 1e-5
    assert model.training and [entry.name for entry in path.parent.iterdir()] == ['gated.onnx']
    model.eval()
    other = torch.randn_like(given['images'])
    with torch.no_grad():
        expected = model(other)
        torch.testing.assert_close(run(path, other), [expected['logits'], expected['tokens']], rtol=1e-4, atol=1e-5)
        with mmgate.gates_disabled(model):
            assert (model(other)['logits'] - expected['logits']).abs().max() > 1e-2
            vanilla = model(other)['logits']
            export_onnx(model, given, path, outputs=['logits'])
        torch.testing.assert_close(run(path, other), [vanilla], rtol=1e-4, atol=1e-5)
    notes = Exported(path).notes
    assert notes['outputs'] == ['logits'] and notes['model'] == 'a Classifier' and notes['size'] == [C, 6]


def test_a_file_of_any_batch(tmp_path: Path) -> None:
    model, given = gated()
    export_onnx(model, given, tmp_path / 'any.onnx', outputs=['logits'], dynamic_batch=True)
    model.eval()
    for images in (1, 5):
        batch = torch.randn(images, 3, C, 6)
        with torch.no_grad():
            expected = [model(batch)['logits']]
        torch.testing.assert_close(run(tmp_path / 'any.onnx', batch), expected, rtol=1e-4, atol=1e-5)


def test_several_inputs_and_a_tuple(tmp_path: Path) -> None:
    class Pair(Classifier):
        def forward(self, images: Tensor, shift: Tensor) -> Any:  # type: ignore[override]
            found = super().forward(images, shift)
            return found['tokens'], found['logits']

    torch.manual_seed(0)
    model = Pair().eval()
    shift = torch.randn(2, 1, C)
    images = torch.randn(2, 3, C, 6)
    found = export_onnx(model, dict(images=images, shift=shift), tmp_path / 'pair.onnx')
    assert list(found) == ['output_0', 'output_1']
    with torch.no_grad():
        torch.testing.assert_close(run(tmp_path / 'pair.onnx', images, shift), [*model(images, shift)])


class Counting(Classifier):
    """A model whose graph knows its first image alone."""

    def forward(self, images: Tensor, shift: Tensor | None = None) -> dict[str, Any]:
        found = super().forward(images)
        seen = getattr(self, 'seen', None)
        if not torch.compiler.is_exporting():
            self.seen = seen = images.detach()[..., 0].sum()
        return dict(logits=found['logits'] + seen)


class Fixed(Classifier):
    def forward(self, images: Tensor, shift: Tensor | None = None) -> dict[str, Any]:
        return dict(logits=super().forward(images)['logits'] * len(images))


class Counted(Classifier):
    def forward(self, images: Tensor, shift: Tensor | None = None) -> Any:
        return len(images)


REFUSED: list[tuple[type[nn.Module], dict[str, Any], str, str]] = [
    (Classifier, dict(outputs=['boxes']), 'a.onnx', 'Classifier returns no tensor boxes; its tensors are logits'),
    (Classifier, dict(outputs='logits'), 'a.onnx', r"outputs='logits' must be a list of names, such as \['logits'\]"),
    (Counted, {}, 'a.onnx', 'Counted returns no tensor at all; its tensors are none'),
    (Classifier, {}, 'a.pt2', 'a.pt2: an ONNX file ends with .onnx'),
    (Counting, {}, 'a.onnx', 'the exported Counting differs from PyTorch and is not kept: logits to'),
    (Fixed, dict(dynamic_batch=True), 'a.onnx', 'the code of Fixed fixes the number of images; leave dynamic'),
]


@pytest.mark.parametrize('kind, options, name, words', REFUSED, ids=lambda one: getattr(one, '__name__', None))
def test_what_is_refused_leaves_the_file_that_was_there(
    kind: type[nn.Module], options: dict[str, Any], name: str, words: str, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    (tmp_path / name).write_text('earlier')
    with pytest.raises(ConfigError, match=words):
        export_onnx(kind(), dict(images=torch.randn(2, 3, C, 6)), tmp_path / name, **options)
    assert (tmp_path / name).read_text() == 'earlier' and [entry.name for entry in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize('inputs', [{}, [torch.zeros(2, 3, C, 6)], dict(images=None)], ids=['none', 'list', 'other'])
def test_inputs_are_tensors_by_name(inputs: Any, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match='inputs must be a dict of tensors by the names'):
        export_onnx(Classifier(), inputs, tmp_path / 'made' / 'a.onnx')
    assert not (tmp_path / 'made').exists()


@pytest.mark.parametrize('wrap', [lambda model: model, nn.DataParallel], ids=['model', 'wrapped'])
def test_inputs_are_the_arguments_of_the_model(wrap: Any, tmp_path: Path) -> None:
    words = "inputs: got an unexpected keyword argument 'pixels'; the arguments of Counted are: images, shift"
    with pytest.raises(ConfigError, match=words):
        export_onnx(wrap(Counted()), dict(images=torch.zeros(2, 3, C, 6), pixels=torch.zeros(2)), tmp_path / 'a.onnx')


def test_outputs_of_a_model_without_a_signature_are_checked(tmp_path: Path) -> None:
    images = torch.zeros(2, 3, C, 6)
    traced = torch.jit.trace(nn.Conv2d(3, 1, 1), images)
    with pytest.raises(ConfigError, match='must be a list of names'):
        export_onnx(traced, dict(images=images), tmp_path / 'a.onnx', outputs='logits')


@pytest.mark.parametrize('version', ['2.1.2', '2.8.0+cpu'])
def test_an_older_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', version)
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2'):
        to_onnx.check_environment()


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(to_onnx, 'why_not', lambda package: None if package == 'onnx' else 'missing')
    with pytest.raises(ConfigError, match=r'needs onnxscript, onnxruntime: pip install "mmgate\[deploy\]"'):
        to_onnx.check_environment()


def test_rows_are_compared_in_any_order() -> None:
    """If several outputs have them; one in a hundred may be another, and values that are infinite in both agree."""
    torch.manual_seed(0)
    expected = [torch.randn(2, 100, 4), torch.randn(2, 100, 3), torch.randn(5)]
    expected[1][:, :, 2] = -torch.inf
    order = torch.randperm(100)
    found = [expected[0][:, order], expected[1][:, order], expected[2].clone()]
    names = ('boxes', 'logits', 'other')
    assert set(to_onnx._differences(names, found, expected).values()) == {0.0}
    assert to_onnx._differences(('maps',), found[:1], expected[:1])['maps'] > 0.1
    found[0][0, :2] += 9
    assert to_onnx._differences(names, found, expected)['boxes'] == 0
    found[0][1, :1] += 9
    assert to_onnx._differences(names, found, expected)['boxes'] > 0.1
    found[2][3] = torch.nan
    assert to_onnx._differences(names, found, expected)['other'] == torch.inf
    assert to_onnx._differences(names, [found[0][:, 1:], *found[1:]], expected)['boxes'] == torch.inf

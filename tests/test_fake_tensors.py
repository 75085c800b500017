"""Layers and backbones on a device that is not there: fake tensors have a device and a shape, and no numbers.

Two devices in one operator and a number that the host reads, for which it would wait, are errors. Copies between the
device and the host are noted.
"""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from conftest import ROOT, TORCH
from helpers.families import DENSE, FAMILIES, C, build, call
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

NEEDS_DRIVER = TORCH < (2, 11) and torch.version.cuda is not None and not torch.cuda.is_available()
pytestmark = [
    pytest.mark.skipif(TORCH < (2, 6), reason='fake tensors of an older torch have other limits'),
    pytest.mark.skipif(NEEDS_DRIVER, reason='fake tensors of an older CUDA build need a driver'),
]
# What torch 2.13 built without CUDA lets fake tensors do on a device: all of it on 'meta', the backward pass as well;
# on 'cuda:0' the forward pass alone, as autograd asks for an accelerator.
DEVICES = ('meta', 'cuda:0')
every_device = pytest.mark.parametrize('device', DEVICES)
GUARDS = '_ZN3c104impl26device_guard_impl_registryE'
CPU, CUDA = 0, 1  # places in the registry of device guards
TOKENS = torch.Size([2, 16, C])


class Transfers(TorchDispatchMode):
    """Mode that notes copies between the host and a device, with the line of mmgate that asks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Run ``func`` and note a copy."""
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        devices: tuple[str, ...] = ()
        if name == 'aten::_to_copy':
            devices = args[0].device.type, result.device.type
        elif name == 'aten::copy_':
            devices = args[1].device.type, args[0].device.type
        elif name.startswith(('aten::index', 'aten::_index')) and isinstance(args[1], (list, tuple)):
            devices = *(x.device.type for x in args[1] if isinstance(x, Tensor)), args[0].device.type
        if len(set(devices)) > 1:
            self.found.append((f'{name} from {devices[0]} to {devices[-1]}', _line_of_mmgate()))
        return result


def _line_of_mmgate() -> str:
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(str(ROOT / 'mmgate'))]
    return f'{frames[-1].filename}:{frames[-1].lineno}' if frames else ''


@contextlib.contextmanager
def fake_device(device: str) -> Iterator[Transfers]:
    """Let real tensors become fake ones by ``.to(device)``, and note their copies in what is yielded."""
    # torch's sizes as a tensor are real numbers, which fake tensors do not have.
    sizes = mock.patch.object(torch, '_shape_as_tensor', lambda x: torch.tensor(list(x.shape)))
    transfers = Transfers()
    gradients = torch.set_grad_enabled(device == 'meta')
    with _guard_for_cuda(), FakeTensorMode(allow_non_fake_inputs=True), sizes, gradients:
        yield transfers


@contextlib.contextmanager
def _guard_for_cuda() -> Iterator[None]:
    """Lend CUDA the CPU's device guard, which does nothing, where torch was built without CUDA.

    Operators ask for a guard before anything sees that a tensor is fake. In a CUDA build FakeTensorMode provides one.
    """
    library = ctypes.CDLL(str(Path(torch.__file__).parent / 'lib/libc10.so'))
    guards = (ctypes.c_void_p * (CUDA + 1)).in_dll(library, GUARDS)
    before = guards[CUDA]
    if before is None:
        guards[CUDA] = guards[CPU]
    try:
        yield
    finally:
        guards[CUDA] = before


def called(name: str, layer: nn.Module, device: str) -> Callable[[Tensor], Any]:
    """Return a function of tokens that calls a layer with all that a host hands it on the device."""
    padding = dict(key_padding_mask=torch.arange(16) > torch.tensor([[15], [11]])) if name in DENSE else {}
    return call(layer.to(device), (4, 4), device, **padding)


def run(module: nn.Module, function: Callable[[Tensor], Any], shape: torch.Size, device: str, transfers: Any) -> None:
    """Call a function of a module on the device, with the backward pass where there is one."""
    x = torch.randn(shape).to(device).requires_grad_(device == 'meta')
    with transfers:
        output = function(x)
        outputs = [output] if isinstance(output, Tensor) else [*output]
        if device == 'meta':
            sum(part.square().sum() for part in outputs).backward()
    assert {part.device for part in outputs} == {torch.device(device)}
    assert transfers.found == []
    if device == 'meta':
        trained = [p for p in module.parameters() if p.requires_grad]
        assert all(tensor.grad is not None and tensor.grad.device == x.device for tensor in (x, *trained))


@every_device
@pytest.mark.parametrize('name', FAMILIES)
def test_a_layer_stays_on_its_device(name: str, device: str) -> None:
    layer = build(name).train()
    with fake_device(device) as transfers:
        run(layer, called(name, layer, device), TOKENS, device, transfers)


@pytest.mark.parametrize('dtype', [torch.bfloat16, torch.float16], ids=['bfloat16', 'float16'])
@pytest.mark.parametrize('name', FAMILIES)
def test_a_layer_runs_under_cudas_autocast(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch sees no GPU it leaves autocast of CUDA out, so that the two questions are answered with yes."""
    monkeypatch.setattr('torch.cuda.amp.common.amp_definitely_not_available', lambda: False)
    monkeypatch.setattr('torch.cuda.is_bf16_supported', lambda: True)
    layer = build(name)
    with fake_device('cuda:0') as transfers, torch.autocast('cuda', dtype):
        assert torch.is_autocast_enabled('cuda')
        run(layer, called(name, layer, 'cuda:0'), TOKENS, 'cuda:0', transfers)


SMALL = dict(embed_dims=16, num_heads=(1, 2, 4, 8), drop_path_rate=0.0)
BACKBONES: dict[str, dict[str, Any]] = {
    'AgentPVT': dict(num_layers=[1] * 4),
    'SAGAPVTv2': dict(num_layers=[1] * 4),
    'SAGASwin': dict(SMALL, depths=(2, 2, 2, 1), blocks=(1, 1, 1, 0), pretrain_img_size=64),
    'AgentCSwin': dict(embed_dims=16, depths=(1, 1, 1, 1)),
}


@every_device
@pytest.mark.parametrize('name', BACKBONES)
def test_a_backbone_stays_on_its_device(name: str, device: str) -> None:
    pytest.importorskip('mmdet')
    from mmgate.registry import MODELS

    model = MODELS.build(dict(type=f'mmgate.{name}', out_indices=(0, 1, 2, 3), **BACKBONES[name]))
    model.train()
    with fake_device(device) as transfers:
        run(model.to(device), model, torch.Size([2, 3, 64, 64]), device, transfers)

"""Fake tensors on a device that is not there, and the copies between that device and the host."""

from __future__ import annotations

import contextlib
import ctypes
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from conftest import ROOT
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

# What torch 2.13 built without CUDA lets fake tensors do on a device: all of it on 'meta', the backward pass as well;
# on 'cuda:0' the forward pass alone, as autograd asks for an accelerator.
DEVICES = ('meta', 'cuda:0')
GUARDS = '_ZN3c104impl26device_guard_impl_registryE'
CPU, CUDA = 0, 1  # places in the registry of device guards


class Transfers(TorchDispatchMode):
    """Mode that notes copies between the host and a device, with the line of mmgate that asks for them, if one does.

    In fake tensors there are no numbers to read, so that a wait for the device is an error by itself.
    """

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str | None]] = []

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


def _line_of_mmgate() -> str | None:
    package = str(ROOT / 'mmgate')
    frames = [frame for frame in traceback.extract_stack() if frame.filename.startswith(package)]
    return f'{Path(frames[-1].filename).relative_to(ROOT)}:{frames[-1].lineno}' if frames else None


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


def moved(value: Any, device: str) -> Any:
    """Return a structure with its tensors, and what else has ``.to``, on ``device``."""
    if isinstance(value, dict):
        return {key: moved(child, device) for key, child in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(moved(child, device) for child in value)
    return value.to(device) if hasattr(value, 'to') else value

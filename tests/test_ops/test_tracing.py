"""Questions about tracers: compilers, exports and dispatch modes."""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from helpers.samplings import make
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mmgate.ops import ms_deform_attn
from mmgate.ops.backend import OPERATORS, candidates
from mmgate.ops.tracing import hides_numbers, is_compiling, is_exporting, is_traced


def test_nothing_is_traced_in_eager_mode() -> None:
    assert not is_compiling()
    assert not is_exporting()
    assert not is_traced()


def test_a_dispatch_mode_looks_at_operators() -> None:
    with FlopCounterMode(display=False):
        assert is_traced()
        assert not is_compiling()
        assert not is_exporting()


def test_jit_trace_is_an_export() -> None:
    found: list[bool] = []

    def call(x: Tensor) -> Tensor:
        found.append(is_exporting())
        return x + 1

    torch.jit.trace(call, torch.ones(2), check_trace=False)
    assert found == [True]


@pytest.mark.parametrize(
    'context, hidden',
    [(nullcontext(), False), (FlopCounterMode(display=False), False), (FakeTensorMode(), True)],
    ids=['eager', 'counter', 'fake'],
)
def test_numbers_are_hidden_by_fake_tensors_alone(context: AbstractContextManager[Any], hidden: bool) -> None:
    with context:
        x = torch.ones(2)
        assert hides_numbers(x) is hidden
        names = [backend.name for backend in candidates('ms_deform_attn', OPERATORS['ms_deform_attn'], x)[0]]
        assert ('grid_sample' in names) is not hidden
    assert hides_numbers(torch.ones(2, device='meta'))


class Seen(TorchDispatchMode):
    """Notes the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.add(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_a_dispatch_mode_does_not_change_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As selective checkpointing on a GPU without other packages, where the reference would take many times longer."""
    package = sys.modules['mmgate.ops.ms_deform_attn']
    backends = tuple(backend for backend in package.BACKENDS if backend.name in ('grid_sample', 'torch'))
    monkeypatch.setattr(package, 'BACKENDS', backends)
    with Seen() as seen:
        ms_deform_attn(*make()[:6])
    assert 'grid_sampler_2d' in seen.names

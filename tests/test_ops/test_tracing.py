"""Questions about tracers: compilers, exports and dispatch modes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from mmgate.ops.tracing import is_compiling, is_exporting, is_traced


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

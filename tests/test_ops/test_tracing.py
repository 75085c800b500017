"""Questions about tracers: compilers, exports and dispatch modes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from conftest import one_graph
from helpers import plug_inputs
from helpers.samplings import make, run
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from mmgate.gates.gml import GatingModulation
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops.backend import OPERATORS, candidates
from mmgate.ops.dense import chunked
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


def operators(call: Callable[..., Tensor], *inputs: Tensor | None) -> list[str]:
    """Return the names of the operators in the graph that torch.compile makes of a call."""
    found: list[str] = []

    def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == 'call_function')
        return graph.forward

    torch._dynamo.reset()
    torch.compile(call, fullgraph=True, backend=note)(*inputs)
    return found


def calls(op: str, device: str) -> tuple[Callable[[str], Callable[..., Tensor]], list[Tensor | None]]:
    """Return a function from a backend to a call of an operator by it, and the call's tensors."""
    if op == 'ms_deform_attn':
        return run, make(device)
    gate = GatingModulation('product', activation='tanh').to(device)
    tensors = [x.to(device) for x in plug_inputs.make().values()]
    return lambda backend: lambda *x: plug_attention(*x, gate, backend=backend), tensors


@one_graph
@pytest.mark.parametrize(
    'device',
    [
        'cpu',
        pytest.param(
            'cuda',
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')],
        ),
    ],
)
@pytest.mark.parametrize('op', OPERATORS)
def test_compiled_models_hold_the_backend_of_eager_mode(op: str, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is on this machine; where torch says that it exports while it compiles, it was the reference."""
    monkeypatch.delenv(f'MMGATE_{op.upper()}', raising=False)
    monkeypatch.setattr(chunked, 'CHUNK', 1)  # below which chunks are the reference's operators
    monkeypatch.setattr(chunked, 'CHUNK_ON_GPU', 1)
    by, inputs = calls(op, device)
    first = next(x.name for x in candidates(op, inputs[0])[0] if x.traceable)
    automatic = operators(by('auto'), *inputs)
    assert automatic == operators(by(first), *inputs)
    assert automatic != operators(by('torch'), *inputs)


@pytest.mark.parametrize(
    'context, hidden',
    [(nullcontext(), False), (FlopCounterMode(display=False), False), (FakeTensorMode(), True)],
    ids=['eager', 'counter', 'fake'],
)
def test_numbers_are_hidden_by_fake_tensors_alone(context: AbstractContextManager[Any], hidden: bool) -> None:
    with context:
        x = torch.ones(2)
        assert hides_numbers(x) is hidden
        names = [backend.name for backend in candidates('ms_deform_attn', x)[0]]
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
    backends = tuple(x for x in OPERATORS['ms_deform_attn'] if x.name in ('grid_sample', 'torch'))
    monkeypatch.setitem(OPERATORS, 'ms_deform_attn', backends)
    with Seen() as seen:
        ms_deform_attn(*make()[:6])
    assert 'grid_sampler_2d' in seen.names

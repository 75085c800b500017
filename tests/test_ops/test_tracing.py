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
from torch.utils.flop_counter import FlopCounterMode

from mmgate.gates.plug import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.backend import OPERATORS, candidates
from mmgate.ops.dense import chunked
from mmgate.ops.tracing import hides_numbers, is_compiling, is_exporting, is_traced


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
    'context, traced, hidden',
    [
        (nullcontext(), False, False),
        (FlopCounterMode(display=False), True, False),  # as selective checkpointing, which runs the usual backend
        (FakeTensorMode(), True, True),
    ],
    ids=['eager', 'counter', 'fake'],
)
def test_a_dispatch_mode_traces_and_fake_tensors_alone_hide_numbers(
    context: AbstractContextManager[Any], traced: bool, hidden: bool
) -> None:
    with context:
        assert (is_traced(), is_compiling(), is_exporting()) == (traced, False, False)
        x = torch.ones(2)
        assert hides_numbers(x) is hidden
        names = [backend.name for backend in candidates('ms_deform_attn', x)[0]]
        assert ('grid_sample' in names) is not hidden
    assert hides_numbers(torch.ones(2, device='meta'))

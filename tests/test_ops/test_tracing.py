"""What compilers, exports and dispatch modes see of an operator: which backend, and whether it has numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from conftest import TORCH, one_graph
from helpers import pairs, samplings
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from mmgate.ops import ms_deform_attn
from mmgate.ops.backend import OPERATORS, candidates
from mmgate.ops.dense import chunked
from mmgate.ops.tracing import hides_numbers, is_compiling, is_exporting, is_traced


@one_graph
@pytest.mark.parametrize('where', ['cpu', pytest.param('cuda', marks=pytest.mark.gpu)])
@pytest.mark.parametrize('op', OPERATORS)
def test_compiled_models_hold_the_backend_of_eager_mode(op: str, where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever it is on this machine; where torch says that it exports while it compiles, it was the reference."""
    if where == 'cuda' and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    monkeypatch.delenv(f'MMGATE_{op.upper()}', raising=False)
    monkeypatch.setattr(chunked, 'CHUNK', 1)  # below which chunks are the reference's operators
    monkeypatch.setattr(chunked, 'CHUNK_ON_GPU', 1)
    problem: Any = samplings if op == 'ms_deform_attn' else pairs
    given = problem.make(where)

    def operators(backend: str) -> list[str]:
        """Return the names of the operators in the graph that torch.compile makes of a call by a backend."""
        found: list[str] = []

        def note(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
            found.extend(str(node.target) for node in graph.graph.nodes if node.op == 'call_function')
            return graph.forward

        torch._dynamo.reset()
        torch.compile(lambda: problem.attend(given, backend), fullgraph=True, backend=note)()
        return found

    first = next(x.name for x in candidates(op, given[0])[0] if x.traceable)
    assert operators('auto') == operators(first) != operators('torch')


class Sampler(torch.nn.Module):
    def forward(self, *x: Any) -> Tensor:
        return ms_deform_attn(*x)


@torch.no_grad()
@pytest.mark.parametrize('way', ['trace', 'strict', 'not strict'])
def test_exports_hold_plain_operators_only(way: str) -> None:
    inputs = tuple(samplings.make()[:6])
    if way == 'trace':
        program: Any = torch.jit.trace(Sampler(), inputs, check_trace=False)
        names = [node.kind() for node in program.inlined_graph.nodes()]
    elif TORCH < (2, 7):
        pytest.skip('older ones do not say that they export')
    else:
        exported = torch.export.export(Sampler(), inputs, strict=way == 'strict')
        program, names = exported.module(), [str(node.target) for node in exported.graph.nodes]
    assert names and not any('mmgate' in name for name in names)
    torch.testing.assert_close(program(*inputs), ms_deform_attn(*inputs, backend='torch'))


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

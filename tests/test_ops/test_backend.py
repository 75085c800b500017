"""The choice of a backend, by name or ``auto``; and how torch sees one, in eager mode and where it traces."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TORCH, one_graph
from helpers.plug_inputs import make as plug_inputs
from helpers.samplings import make
from torch import Tensor

from mmgate.errors import UnsupportedCall
from mmgate.gates import GatingModulation
from mmgate.ops import backend as choice
from mmgate.ops import ms_deform_attn, plug_attention, triton_backend
from mmgate.ops.backend import Backend, Operator, candidates, in_order, run_operator


def refuses(x: Tensor) -> Tensor:
    raise UnsupportedCall('this one does not take more than 3 numbers')


def fails(x: Tensor) -> Tensor:
    raise ValueError('x is a bad input')


KINDS: dict[str, dict[str, Any]] = {
    'elsewhere': dict(why_not=lambda x: 'it is for another machine'),
    'numbers': dict(traceable=False),
    'refuses': dict(run=refuses),
    'fails': dict(run=fails),
    'first': dict(description='the plain way'),
    'torch': dict(exportable=True),
    'unproven': dict(place=lambda x: 'by name'),
}
ORDER = [name for name in KINDS if name not in ('refuses', 'fails')]


def backends(*names: str) -> tuple[Backend, ...]:
    usual: dict[str, Any] = dict(run=lambda x: x * x)
    return tuple(Backend(name, **(usual | KINDS[name])) for name in names or ORDER)


def names(requested: str | None = None) -> list[str]:
    return [backend.name for backend in candidates('square', torch.rand(5), requested)[0]]


Have = Callable[..., None]


@pytest.fixture
def have(monkeypatch: pytest.MonkeyPatch) -> Have:
    """A function that gives the operator ``square`` backends of these names."""
    return lambda *given: monkeypatch.setitem(choice.OPERATORS, 'square', backends(*given))


@pytest.fixture(autouse=True)
def _own_operator_and_log(have: Have, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log is where mmengine's does not take it."""
    have()
    monkeypatch.setattr(choice, '_logged', set())
    monkeypatch.delitem(choice.sys.modules, 'mmengine.logging', raising=False)
    caplog.set_level(logging.INFO, 'mmgate')


def square(requested: str | None = None) -> Tensor:
    x = torch.arange(5)
    return run_operator('square', x, requested, x)


def test_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names() == ['numbers', 'first', 'torch'] and names('unproven') == ['unproven']
    monkeypatch.setattr(choice, 'hides_numbers', lambda tensor: True)
    assert names('auto') == ['first', 'torch']


@pytest.mark.parametrize(
    'architecture, first, before',
    [(90, ['triton', 'mmcv'], 'mmcv'), (80, ['mmcv', 'native'], 'grid_sample'), (120, ['mmcv', 'native'], 'torch')],
)
def test_kernels_come_first_on_the_gpus_that_they_were_timed_on(
    architecture: int, first: list[str], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before the slow ways on others, and nowhere if they were not compiled for a GPU."""
    on_gpu: Any = SimpleNamespace(device=torch.device('cuda:0'))
    monkeypatch.setattr(triton_backend, '_architecture', lambda index: architecture)
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    order = [backend.name for backend in in_order(choice.OPERATORS['ms_deform_attn'], on_gpu)]
    assert order[:2] == first and order.index('triton') < order.index(before)
    plug = [x.name for x in in_order(choice.OPERATORS['plug_attention'], on_gpu)]
    assert plug == ['triton'] * (architecture == 90) + ['native', 'chunked', 'torch']
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: True)
    assert 'triton' not in [x.name for x in in_order(choice.OPERATORS['ms_deform_attn'], on_gpu)]
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    monkeypatch.setattr(triton_backend, '_architecture', lambda index: 75)
    for op in ('ms_deform_attn', 'plug_attention'):
        for tensor in (on_gpu, torch.empty(1, device='meta'), torch.empty(1)):
            assert 'triton' not in [x.name for x in in_order(choice.OPERATORS[op], tensor)]


@pytest.mark.parametrize('op', ['ms_deform_attn', 'plug_attention'])
def test_a_gpu_on_which_nobody_timed_the_kernels_is_told_what_to_try(
    op: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    kernels = choice.backend_named(op, 'triton')
    on_gpu: Any = SimpleNamespace(device=torch.device('cuda:0'))
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    reasons: list[str | None] = [None, 'it is for another machine', None]
    for reason, architecture in zip(reasons, [90, 89, 89], strict=True):
        monkeypatch.setattr(triton_backend, 'why_not_triton', lambda heads, reason=reason: reason)
        monkeypatch.setattr(triton_backend, '_architecture', lambda index, architecture=architecture: architecture)
        told = kernels.advice(on_gpu)
        assert (told is not None) is (reason is None and architecture == 89)
    assert kernels.advice(torch.empty(1)) is None
    choice._log_choice(op, choice.backend_named(op, 'torch'), choice.FIRST, on_gpu)
    assert "'triton' was never timed on this kind of GPU: python -m mmgate.doctor --time" in caplog.text


def test_a_kernel_that_does_not_compile_is_a_call_for_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU that this Triton does not know."""
    errors = pytest.importorskip('triton.errors')

    tried: list[str] = []

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            return self.warmup

        def warmup(self, *arguments: Any, **constants: Any) -> None:
            tried.append('')
            raise errors.TritonError('ptxas fatal')

    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    message = 'does not compile on cpu, take another backend: TritonError: ptxas fatal'
    with pytest.raises(UnsupportedCall, match=message):
        triton_backend.launch(Broken(), (1,), torch.device('cpu'), torch.empty(1))
    broken = Broken()
    for _ in range(2):
        with pytest.raises(UnsupportedCall, match=message):
            triton_backend.compile_only(broken, (1,), torch.device('cpu'), torch.empty(1), torch.float32, 5, D=32)
    assert len(tried) == 2, 'compile_only tries once'


def call_of(op: str) -> Callable[..., Tensor]:
    """Return a call of an operator with a backend's name, on inputs that require gradients."""
    torch.manual_seed(0)
    if op == 'ms_deform_attn':
        inputs = [x.requires_grad_() if x.is_floating_point() else x for x in make()[:6]]
        return lambda backend: ms_deform_attn(*inputs, backend=backend)
    tensors = [x.requires_grad_() for x in plug_inputs().values()]
    gate = GatingModulation('product', activation='tanh', init='paper')
    return lambda backend: plug_attention(*tensors, gate, backend=backend)


@pytest.mark.parametrize(('op', 'folder'), [('ms_deform_attn', 'deformable'), ('plug_attention', 'dense')])
def test_a_backward_kernel_that_does_not_compile_is_a_call_for_another_backend(
    op: str, folder: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It shows in the forward pass, where another backend can still run, and only if there will be a gradient."""
    pytest.importorskip('triton', minversion='3.2')
    kernels: Any = import_module(f'mmgate.ops.{folder}.triton_{folder}')
    launched: list[Any] = []

    def compile_only(kernel: Any, *arguments: Any, **constants: Any) -> None:
        raise UnsupportedCall(f'{kernel.__name__} does not compile')

    def launch(kernel: Any, *arguments: Any, **constants: Any) -> None:
        launched.append(kernel.__name__)

    monkeypatch.setattr(triton_backend, 'is_measured', lambda heads: True)  # so that 'auto' takes them first
    monkeypatch.setattr(kernels, 'needs_backward', lambda tensors: torch.is_grad_enabled())
    monkeypatch.setattr(kernels, 'compile_only', compile_only)
    monkeypatch.setattr(kernels, 'launch', launch)
    call = call_of(op)
    found = call('auto')
    torch.testing.assert_close(found, call('torch'), rtol=1e-4, atol=1e-5)
    found.sum().backward()
    assert "'triton' hands a call on to the next: " in caplog.text and 'backward_kernel does not compile' in caplog.text
    with pytest.raises(UnsupportedCall, match='backward_kernel does not compile'):
        call('triton')
    assert not launched
    with torch.no_grad():
        call('auto')
    assert launched[-1] == 'forward_kernel'


@pytest.mark.parametrize('wanted', [False, True])
def test_backward_kernels_are_compiled_where_a_gradient_is_wanted(
    wanted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    given = (torch.ones(1), None, True, torch.ones(1, requires_grad=wanted))
    assert triton_backend.needs_backward(given) is wanted
    with torch.no_grad():
        assert not triton_backend.needs_backward(given)
    monkeypatch.setattr(triton_backend, 'is_traced', lambda: True)
    assert not triton_backend.needs_backward(given)


def test_kernels_are_left_out_where_triton_cannot_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a C compiler: 'auto' takes another backend, where a launch would end the training."""
    pytest.importorskip('triton', minversion='3.2')

    def no_compiler(device: torch.device) -> Any:
        raise RuntimeError('Failed to find C compiler.')

    on_gpu: Any = SimpleNamespace(device=torch.device('cuda:0'), dtype=torch.float32, shape=(1, 1, 1, 16))
    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    monkeypatch.setattr(triton_backend, 'target_of', no_compiler)
    triton_backend.start_error.cache_clear()
    try:
        reason = triton_backend.why_not_triton(on_gpu)
        assert reason is not None
        assert reason.endswith("needs a C compiler and Python's headers (RuntimeError: Failed to find C compiler.)")
    finally:
        triton_backend.start_error.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_this_gpu_runs_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    inputs = [x.cuda() for x in make()[:6]]
    torch.testing.assert_close(ms_deform_attn(*inputs), ms_deform_attn(*inputs, backend='torch'), rtol=1e-4, atol=1e-5)
    expected = candidates('ms_deform_attn', inputs[0])[0][0].name == 'triton'
    assert ("ms_deform_attn runs on one Triton kernel ('triton')" in caplog.text) is expected


@pytest.mark.parametrize(
    'requested, environment, message',
    [
        ('elsewhere', '', "'elsewhere' cannot run here: it is for another machine. Usable here: numbers, first, torch"),
        ('first', 'elsewhere', "'elsewhere' cannot run here"),
        ('fist', '', "backend='fist' is not a backend; choose one of auto, elsewhere, numbers, first, torch, unproven"),
        (None, 'fist', "MMGATE_SQUARE='fist' is not a backend"),
    ],
)
def test_a_name_is_that_backend_or_an_error(
    requested: str | None, environment: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MMGATE_SQUARE', environment)
    with pytest.raises(ValueError, match=message):
        names(requested)


def test_one_that_refuses_hands_on_unless_it_was_asked_for(have: Have, caplog: pytest.LogCaptureFixture) -> None:
    have('refuses', 'torch')
    for _ in range(2):
        assert square('auto').tolist() == [0, 1, 4, 9, 16]
    assert caplog.text.count("square: 'refuses' hands a call on to the next: this one does not take") == 1
    with pytest.raises(ValueError, match='this one does not take'):
        square('refuses')
    have('refuses', 'refuses')
    with pytest.raises(ValueError, match='this one does not take'):
        square()


@pytest.mark.parametrize('requested', ['auto', 'fails'])
def test_an_error_of_the_input_is_not_handed_on(requested: str, have: Have, caplog: pytest.LogCaptureFixture) -> None:
    """A backend's ValueError says that the input is wrong, for which no other backend is the remedy."""
    have('fails', 'torch')
    with pytest.raises(ValueError, match='x is a bad input'):
        square(requested)
    assert 'hands a call on' not in caplog.text


def test_the_first_call_says_what_runs(have: Have, caplog: pytest.LogCaptureFixture) -> None:
    have('first', 'torch')
    for _ in range(2):
        square()
        square('torch')
    assert [record.getMessage() for record in caplog.records] == [
        "square runs on the plain way ('first'), the first of the order that can run here.",
        "square runs on its backend ('torch'), as asked for.",
    ]


def test_the_line_says_how_to_have_a_better_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    better = replace(backends('elsewhere')[0], advice=lambda x: 'Type: build it')
    monkeypatch.setitem(choice.OPERATORS, 'square', (better, *backends('first')))
    for asked, by_environment in (('first', ''), (None, 'first'), (None, '')):
        assert 'build it' not in caplog.text, 'nothing beside what was asked for'
        choice._logged.clear()
        monkeypatch.setenv('MMGATE_SQUARE', by_environment)
        square(asked)
    assert 'the first of the order that can run here. Type: build it.' in caplog.text


def test_mmengine_gets_the_line_where_it_is_loaded(have: Have, monkeypatch: pytest.MonkeyPatch) -> None:
    logging = pytest.importorskip('mmengine.logging')
    said: list[str] = []
    monkeypatch.setattr(logging.MMLogger.get_instance('a_run'), 'handle', lambda record: said.append(record.msg))
    monkeypatch.setitem(choice.sys.modules, 'mmengine.logging', logging)
    have('first')
    square()
    assert len(said) == 1 and 'square runs on the plain way' in said[0]


class Sampler(torch.nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return ms_deform_attn(*x)


@torch.no_grad()
def test_exports_hold_plain_operators_only() -> None:
    inputs = make()[:6]
    traced = torch.jit.trace(Sampler(), inputs, check_trace=False)
    assert not any(node.kind().startswith('mmgate') for node in traced.inlined_graph.nodes())
    torch.testing.assert_close(traced(*inputs), ms_deform_attn(*inputs, backend='torch'))


@pytest.mark.skipif(TORCH < (2, 7), reason='older ones do not say that they export')
@pytest.mark.parametrize('strict', [True, False])
def test_torch_export_holds_plain_operators_only(strict: bool) -> None:
    inputs = make()[:6]
    program = torch.export.export(Sampler(), tuple(inputs), strict=strict)
    assert not any('mmgate' in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), ms_deform_attn(*inputs, backend='torch'))


def _fake(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x)


def _scaled_sum(x: Tensor, y: Tensor | None, factor: float) -> tuple[Tensor, Tensor]:
    """Annotations are strings here, and hold what a schema needs: an optional, a number, two results."""
    total = x.clone() if y is None else x + y
    return total * factor, x.sign()


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.factor, ctx.second = inputs[2], inputs[1] is not None
    ctx.mark_non_differentiable(output[1])


def _backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return grad * ctx.factor, grad * ctx.factor if ctx.second else None, None


@pytest.fixture(scope='module')
def scaled_sum() -> Operator:
    operator = choice.operator('test_scaled_sum', _fake)(_scaled_sum)
    operator.differentiate(_backward, _setup_context)
    return operator


@pytest.mark.parametrize('second', [True, False], ids=['two_tensors', 'one_tensor'])
def test_eager_gradients(scaled_sum: Operator, second: bool) -> None:
    x, y = torch.randn(3, 4, dtype=torch.float64), torch.randn(3, 4, dtype=torch.float64)
    inputs = [t.requires_grad_() for t in ((x, y) if second else (x,))]
    assert torch.autograd.gradcheck(lambda *t: scaled_sum(t[0], t[1] if second else None, 2.5)[0], inputs)
    with torch.no_grad():
        assert not scaled_sum(x, None, 1.0)[0].requires_grad


@pytest.mark.parametrize('second', [True, False], ids=['two_tensors', 'one_tensor'])
def test_a_second_derivative_is_refused(scaled_sum: Operator, second: bool) -> None:
    """In place of one that lacks the part of the saved inputs; a graph that nobody follows does no harm."""
    x = torch.randn(3, 4, requires_grad=True)
    y = torch.randn(3, 4, requires_grad=True) if second else None
    (first,) = torch.autograd.grad(scaled_sum(x.sin(), y, 2.5)[0].square().sum(), x, create_graph=True)
    plain = 2.5 * (x.sin() + y if second else x.sin())
    torch.testing.assert_close(first, torch.autograd.grad(plain.square().sum(), x)[0])
    with pytest.raises(UnsupportedCall, match='first derivatives alone.*backend="torch"'):
        first.square().sum().backward()


def test_gradients_with_a_graph_may_be_changed_in_place(scaled_sum: Operator) -> None:
    """As a hook does that clips them."""
    x = torch.randn(3, 4, requires_grad=True)
    x.register_hook(lambda grad: grad.clamp_(-1, 1))
    scaled_sum(x, None, 2.5)[0].sum().backward(create_graph=True)
    torch.testing.assert_close(x.grad.detach(), torch.ones(3, 4))


def test_transforms_of_torch_func_are_refused(scaled_sum: Operator) -> None:
    with pytest.raises(UnsupportedCall, match='does not run under transforms of torch.func'):
        torch.func.grad(lambda y: scaled_sum(y, None, 2.0)[0].sum())(torch.randn(3))


@pytest.mark.skipif(TORCH < (2, 11), reason='torch 2.1 to 2.7, at least, read no sizes of levels under torch.func')
def test_transforms_of_torch_func_get_another_backend() -> None:
    value, locations, logits = torch.randn(1, 4, 1, 8), torch.rand(1, 2, 1, 1, 2, 2), torch.randn(1, 2, 1, 1, 2)
    shapes, starts = torch.tensor([(2, 2)]), torch.tensor([0])

    def by(backend: str) -> Tensor:
        def total(y: Tensor) -> Tensor:
            return ms_deform_attn(y, shapes, starts, locations, logits, backend=backend).sum()

        return torch.func.grad(total)(value)

    torch.testing.assert_close(by('auto'), by('torch'))


@one_graph
def test_registered_where_something_traces(scaled_sum: Operator) -> None:
    registered = torch.ops.mmgate.test_scaled_sum.default
    x, y = torch.randn(3, 4, requires_grad=True), torch.randn(3, 4)
    torch.library.opcheck(registered, (x, y, 2.0))
    seen = []

    def spy(graph: Any, inputs: Any) -> Any:
        seen.extend(node.target for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda x: scaled_sum(x, y, 2.0)[0], fullgraph=True, backend=spy)
    torch.testing.assert_close(compiled(x), scaled_sum(x, y, 2.0)[0])
    assert any('test_scaled_sum' in str(target) for target in seen)


def test_without_registration_torch_compile_still_gives_the_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, 'CAN_REGISTER', False)
    operator = Operator('test_unregistered', _scaled_sum, _fake)
    operator.differentiate(_backward, _setup_context)
    outside = choice.outside_graphs(lambda x: operator(x, None, 3.0)[0])
    x = torch.randn(5, requires_grad=True)
    output = torch.compile(lambda x: outside(x) + 1, backend='eager')(x)
    output.sum().backward()
    torch.testing.assert_close(output, 3 * x + 1)
    torch.testing.assert_close(x.grad, torch.full_like(x, 3.0))

"""``auto``: the first of the order that can run, or what a calibration of this very machine says."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TORCH, one_graph
from torch import Tensor

from mmgate.errors import UnsupportedCall
from mmgate.ops import backend as choice
from mmgate.ops import ms_deform_attn, triton_backend
from mmgate.ops.backend import Backend, candidates, ordered, run, size_class

CPU = torch.device('cpu')
SMALL, MEDIUM, LARGE = ((number, 10, 20) for number in (1, 15, 21))


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
    'unproven': dict(in_order=lambda x: False),
}
ORDER = [name for name in KINDS if name not in ('refuses', 'fails')]


def backends(*names: str) -> tuple[Backend, ...]:
    usual: dict[str, Any] = dict(run=lambda x: x * x)
    return tuple(Backend(name, **(usual | KINDS[name])) for name in names or ORDER)


def names(*args: Any, **options: Any) -> list[str]:
    return [backend.name for backend in candidates('square', backends(), torch.rand(5), *args, **options)[0]]


@pytest.fixture(autouse=True)
def _calibration(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """A file of its own, and the log where mmengine's does not take it."""
    monkeypatch.setenv('MMGATE_CALIBRATION', str(tmp_path / 'cache/calibration.json'))
    monkeypatch.setattr(choice, '_logged', set())
    monkeypatch.setitem(choice.OPERATORS, 'square', backends())
    monkeypatch.delitem(choice.sys.modules, 'mmengine.logging', raising=False)
    caplog.set_level(logging.INFO, 'mmgate')
    choice.winners.cache_clear()


def test_order(monkeypatch: pytest.MonkeyPatch) -> None:
    assert names(None) == ['numbers', 'first', 'torch'] and names('unproven') == ['unproven']
    monkeypatch.setattr(choice, 'hides_numbers', lambda tensor: True)
    assert names('auto') == ['first', 'torch']


@pytest.mark.parametrize(
    'architecture, first, before',
    [(90, ['triton', 'mmcv'], 'mmcv'), (80, ['mmcv', 'native'], 'grid_sample'), (120, ['mmcv', 'native'], 'cpu')],
)
def test_kernels_come_first_on_the_gpus_that_they_were_timed_on(
    architecture: int, first: list[str], before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They come before the slow ways on others, and nowhere if they were not compiled for a GPU."""
    on_gpu: Any = SimpleNamespace(device=torch.device('cuda:0'))
    monkeypatch.setattr(triton_backend, '_architecture', lambda index: architecture)
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    order = [backend.name for backend in ordered(choice.OPERATORS['ms_deform_attn'], on_gpu)]
    assert order[:2] == first and order.index('triton') < order.index(before)
    plug = [x.name for x in ordered(choice.OPERATORS['plug_attention'], on_gpu)]
    assert plug == ['triton'] * (architecture == 90) + ['chunked', 'torch']
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: True)
    assert 'triton' not in [x.name for x in ordered(choice.OPERATORS['ms_deform_attn'], on_gpu)]
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    monkeypatch.setattr(triton_backend, '_architecture', lambda index: 75)
    for op in ('ms_deform_attn', 'plug_attention'):
        for tensor in (on_gpu, torch.empty(1, device='meta'), torch.empty(1)):
            assert 'triton' not in [x.name for x in ordered(choice.OPERATORS[op], tensor)]


def test_a_kernel_that_does_not_compile_is_a_call_for_another_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a GPU that this Triton does not know."""
    errors = pytest.importorskip('triton.errors')

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            def run(*arguments: Any, **constants: Any) -> None:
                raise errors.TritonError('ptxas fatal')

            return run

    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    with pytest.raises(UnsupportedCall, match='does not compile on cpu: TritonError: ptxas fatal'):
        triton_backend.launch(Broken(), (1,), torch.empty(1))


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
        reason = triton_backend.why_not(on_gpu)
        assert reason is not None
        assert reason.endswith("needs a C compiler and Python's headers (RuntimeError: Failed to find C compiler.)")
    finally:
        triton_backend.start_error.cache_clear()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_this_gpu_runs_the_kernels(caplog: pytest.LogCaptureFixture) -> None:
    inputs = [x.cuda() for x in sampler()]
    torch.testing.assert_close(ms_deform_attn(*inputs), ms_deform_attn(*inputs, backend='torch'), rtol=1e-4, atol=1e-5)
    expected = candidates('ms_deform_attn', choice.OPERATORS['ms_deform_attn'], inputs[0])[0][0].name == 'triton'
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


def test_a_calibration_decides_by_dtype_and_size() -> None:
    choice.write('square', CPU, {'torch.float32 large': 'unproven', 'torch.float32 small': 'elsewhere'})
    assert names(work=LARGE) == ['unproven', 'numbers', 'first', 'torch']
    assert names(work=MEDIUM) == names(work=SMALL) == ['numbers', 'first', 'torch'], 'a winner has to be usable'
    assert names('first', work=LARGE) == ['first']
    halves = candidates('square', backends(), torch.rand(5).half(), work=LARGE)[0]
    assert [x.name for x in halves] == ['numbers', 'first', 'torch']


@pytest.mark.parametrize(
    'change',
    [
        lambda patch: patch.setattr(choice, 'machine', lambda device: 'another GPU'),
        lambda patch: patch.setitem(choice.OPERATORS, 'plug_attention', backends('torch', 'unproven')),
        lambda patch: patch.setattr(Path, 'read_bytes', lambda path: b'another source'),
        lambda patch: patch.setenv('MMGATE_CALIBRATION', ''),
    ],
    ids=['machine', 'backends', 'sources', 'none'],
)
def test_a_calibration_holds_for_what_it_was_made_with(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    choice.write('plug_attention', CPU, {'torch.float32 small': 'torch'})
    assert choice.winners('plug_attention', 'cpu', None) == {'torch.float32 small': 'torch'}
    change(monkeypatch)
    choice.winners.cache_clear()
    assert not choice.winners('plug_attention', 'cpu', None)


def test_the_key_says_what_it_holds_for(monkeypatch: pytest.MonkeyPatch) -> None:
    key = choice.key('plug_attention', CPU)
    assert key.startswith('plug_attention: chunked torch') and '; sources ' in key
    assert f'torch {torch.__version__}, triton ' in key and ', mmcv ' in key
    monkeypatch.setattr(torch.cuda, 'get_device_name', lambda device: 'a GPU')
    assert choice.machine(torch.device('cuda', 0)).startswith('a GPU, driver ')


@pytest.mark.parametrize('content', ['', '{'])
def test_a_broken_file_is_said_and_replaced(content: str, caplog: pytest.LogCaptureFixture) -> None:
    path = Path(choice.path())
    path.parent.mkdir()
    path.write_text(content)
    assert names() == ['numbers', 'first', 'torch'] and 'cannot be read' in caplog.text
    choice.write('square', CPU, {'torch.float32 small': 'first'})
    assert names()[0] == 'first' and len(json.loads(path.read_text())) == 1
    choice.write('plug_attention', CPU, {})
    assert len(json.loads(path.read_text())) == 2 and list(path.parent.iterdir()) == [path]


def test_one_that_refuses_hands_on_unless_it_was_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.rand(5)
    for _ in range(2):
        assert torch.equal(run('square', backends('refuses', 'torch'), x, 'auto', SMALL, x=x), x * x)
    assert caplog.text.count("square: 'refuses' hands a call on to the next: this one does not take") == 1
    with pytest.raises(ValueError, match='this one does not take'):
        run('square', backends('refuses', 'torch'), x, 'refuses', SMALL, x=x)
    with pytest.raises(ValueError, match='this one does not take'):
        run('square', backends('refuses', 'refuses'), x, None, SMALL, x=x)


@pytest.mark.parametrize('requested', ['auto', 'fails'])
def test_an_error_of_the_input_is_not_handed_on(requested: str, caplog: pytest.LogCaptureFixture) -> None:
    """A backend's ValueError says that the input is wrong, for which no other backend is the remedy."""
    x = torch.rand(5)
    with pytest.raises(ValueError, match='x is a bad input'):
        run('square', backends('fails', 'torch'), x, requested, SMALL, x=x)
    assert 'hands a call on' not in caplog.text


def test_the_first_call_says_what_runs(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        run('square', backends('first'), torch.rand(5), None, SMALL, x=torch.rand(5))
        run('square', backends('first', 'torch'), torch.rand(5), 'torch', SMALL, x=torch.rand(5))
    assert [record.getMessage() for record in caplog.records] == [
        "square runs on the plain way ('first'), the first of the order that can run here.",
        "square runs on its backend ('torch'), as asked for.",
    ]
    choice._logged.clear()
    on_gpu: Any = SimpleNamespace(is_cuda=True, device=torch.device('cuda', 0), dtype=torch.float32)
    run('square', [replace(backends('first')[0], run=lambda x: x)], on_gpu, None, SMALL, x=on_gpu)
    assert 'type once: python -m mmgate.doctor --calibrate' in caplog.text


def test_the_line_says_how_to_have_a_better_one(caplog: pytest.LogCaptureFixture) -> None:
    better = replace(backends('elsewhere')[0], advice=lambda x: 'Type: build it')
    run('square', [better, *backends('first')], torch.rand(5), None, SMALL, x=torch.rand(5))
    assert 'the first of the order that can run here. Type: build it.' in caplog.text
    choice._logged.clear()
    run('square', [better, *backends('first')], torch.rand(5), 'first', SMALL, x=torch.rand(5))
    assert caplog.text.count('build it') == 1, 'nothing beside what was asked for'


def test_mmengine_gets_the_line_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip('mmengine')
    from mmengine import logging

    said: list[str] = []
    monkeypatch.setattr(logging.MMLogger.get_instance('a_run'), 'handle', lambda record: said.append(record.msg))
    monkeypatch.setitem(choice.sys.modules, 'mmengine.logging', logging)
    run('square', backends('first'), torch.rand(5), None, SMALL, x=torch.rand(5))
    assert len(said) == 1 and 'square runs on the plain way' in said[0]


def sampler() -> list[Tensor]:
    value, gate = torch.randn(2, 60, 4, 16), torch.randn(2, 9, 4, 2, 1)
    points, logits = torch.rand(2, 9, 4, 2, 3, 2), torch.randn(2, 9, 4, 2, 3)
    return [value, torch.tensor([(6, 8), (3, 4)]), torch.tensor([0, 48]), points, logits, gate]


@one_graph
def test_traced_models_take_the_calibrated_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    """By one graph, as the answer is a constant there."""
    package = choice.sys.modules['mmgate.ops.ms_deform_attn']
    torchs = choice.find('', package.BACKENDS, 'torch')
    tripled = Backend('tripled', lambda **x: 3 * torchs.run(**x), in_order=lambda x: False)
    monkeypatch.setattr(package, 'BACKENDS', (*package.BACKENDS, tripled))
    monkeypatch.setitem(choice.OPERATORS, 'ms_deform_attn', package.BACKENDS)
    choice.write('ms_deform_attn', CPU, {'torch.float32 small': 'tripled'})
    inputs = sampler()
    compiled = torch.compile(lambda *x: ms_deform_attn(*x), fullgraph=True, backend='eager')
    torch.testing.assert_close(compiled(*inputs), 3 * ms_deform_attn(*inputs, backend='torch'))
    torch.testing.assert_close(ms_deform_attn(*inputs), compiled(*inputs))


def test_sizes_of_calls() -> None:
    edges = [size_class(number, 10, 20) for number in (1, 10, 11, 20, 21)]
    assert edges == ['small', 'small', 'medium', 'medium', 'large']


class Sampler(torch.nn.Module):
    def forward(self, *x: Tensor) -> Tensor:
        return ms_deform_attn(*x)


@torch.no_grad()
def test_exports_hold_plain_operators_only() -> None:
    inputs = sampler()
    traced = torch.jit.trace(Sampler(), inputs, check_trace=False)
    assert not any(node.kind().startswith('mmgate') for node in traced.inlined_graph.nodes())
    torch.testing.assert_close(traced(*inputs), ms_deform_attn(*inputs, backend='torch'))


@pytest.mark.skipif(TORCH < (2, 7), reason='older ones do not say that they export')
@pytest.mark.parametrize('strict', [True, False])
def test_torch_export_holds_plain_operators_only(strict: bool) -> None:
    inputs = sampler()
    program = torch.export.export(Sampler(), tuple(inputs), strict=strict)
    assert not any('mmgate' in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(*inputs), ms_deform_attn(*inputs, backend='torch'))

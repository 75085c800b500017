"""The choice of a backend, by name or ``auto``, what the log says of it, and calls that one hands on to the next."""

from __future__ import annotations

import logging
from contextlib import nullcontext
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import TORCH, needs_native
from helpers import pairs, samplings
from torch import Tensor

from mmgate.errors import ConfigError, UnsupportedCall
from mmgate.ops import backend as choice
from mmgate.ops import native as library
from mmgate.ops import triton_backend
from mmgate.ops.backend import Backend, candidates
from mmgate.ops.deformable import mmcv

PROBLEMS: dict[str, Any] = {'ms_deform_attn': samplings, 'plug_attention': pairs}
GIVEN = samplings.make()


@pytest.fixture(autouse=True)
def _own_log(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """The log is where mmengine's does not take it."""
    monkeypatch.setattr(choice, '_logged', set())
    monkeypatch.delitem(choice.sys.modules, 'mmengine.logging', raising=False)
    caplog.set_level(logging.INFO, 'mmgate')


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """What stands for a tensor on a GPU, on which Triton compiles kernels."""
    monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)
    monkeypatch.setattr(triton_backend, 'why_unavailable', lambda: None)
    return SimpleNamespace(device=torch.device('cuda:0'), dtype=torch.float32, is_cuda=True, shape=(1, 1, 1, 16))


@pytest.mark.parametrize(
    'device, architecture, sampler, plug',
    [
        ('cpu', 0, 'native grid_sample torch', 'native chunked torch'),
        ('mps', 0, 'grid_sample torch', 'chunked torch'),
        ('cuda', 75, 'mmcv grid_sample torch', 'chunked torch'),
        ('cuda', 80, 'mmcv triton grid_sample torch', 'chunked torch'),
        ('cuda', 90, 'triton mmcv grid_sample torch', 'triton chunked torch'),
        ('cuda', 120, 'mmcv triton grid_sample torch', 'chunked torch'),
    ],
)
def test_order_where_everything_is_installed(
    device: str, architecture: int, sampler: str, plug: str, on_gpu: Any, monkeypatch: Any, caplog: Any
) -> None:
    """Kernels come first on the GPUs that they were timed on; on others the log says what to try."""
    for package in (mmcv, library):
        monkeypatch.setattr(package, 'why_unavailable', lambda: None)
    monkeypatch.setattr(triton_backend, '_cannot_start', lambda index: None)
    monkeypatch.setattr(triton_backend, '_architecture', lambda index: architecture)
    on_gpu.device, on_gpu.is_cuda = torch.device(device), device == 'cuda'
    for op, order in (('ms_deform_attn', sampler), ('plug_attention', plug)):
        assert [backend.name for backend in candidates(op, on_gpu)[0]] == order.split()
        choice._log_choice(op, choice.backend_named(op, 'torch'), choice.FIRST, on_gpu)
        untimed = device == 'cuda' and architecture != 90
        assert ('never timed on this kind of GPU: python -m mmgate.doctor --time' in caplog.text) is untimed
        caplog.clear()
        monkeypatch.setattr(triton_backend, 'interpreted', lambda: True)
        assert 'triton' not in [backend.name for backend in candidates(op, on_gpu)[0]]
        monkeypatch.setattr(triton_backend, 'interpreted', lambda: False)


def test_kernels_are_left_out_where_triton_cannot_start(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As without a C compiler: 'auto' takes another backend, where a launch would end the training."""

    def no_compiler(device: torch.device) -> Any:
        raise RuntimeError('Failed to find C compiler.')

    monkeypatch.setattr(torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(triton_backend, 'target_of', no_compiler)
    monkeypatch.setattr(triton_backend, 'start_error', triton_backend.start_error.__wrapped__)
    reason = triton_backend.why_not_triton(on_gpu)
    assert reason is not None
    assert reason.endswith("needs a C compiler and Python's headers (RuntimeError: Failed to find C compiler.)")


def test_a_kernel_that_does_not_compile_is_a_call_for_another_backend(on_gpu: Any) -> None:
    """As with a GPU that this Triton does not know."""
    errors = pytest.importorskip('triton.errors')

    class Broken:
        def __getitem__(self, grid: Any) -> Any:
            return self.warmup

        def warmup(self, *arguments: Any, **constants: Any) -> None:
            raise errors.TritonError('ptxas fatal')

    for start in (triton_backend.launch, triton_backend.compile_only):
        with pytest.raises(UnsupportedCall, match='does not compile on cpu, .*backend: TritonError: ptxas fatal'):
            start(Broken(), (1,), torch.device('cpu'), torch.empty(1), torch.float32, 5, D=32)


@pytest.mark.parametrize('op', PROBLEMS)
def test_kernels_that_do_not_compile_hand_the_call_on(op: str, monkeypatch: Any, caplog: Any) -> None:
    """Those of a backward pass in the forward pass, where another backend can still run, and only if it will come."""
    pytest.importorskip('triton', minversion='3.2')
    folder = dict(ms_deform_attn='deformable', plug_attention='dense')[op]
    kernels: Any = import_module(f'mmgate.ops.{folder}.triton_{folder}')

    def fails(kernel: Any, *arguments: Any, **constants: Any) -> None:
        raise UnsupportedCall(f'{kernel.__name__} does not compile')

    monkeypatch.setattr(triton_backend, 'is_measured', lambda heads: True)  # so that 'auto' takes them first
    monkeypatch.setattr(kernels, 'needs_backward', lambda tensors: torch.is_grad_enabled())
    for start in ('compile_only', 'launch'):
        monkeypatch.setattr(kernels, start, fails)
    given = PROBLEMS[op].make()
    for context, broken in ((nullcontext(), 'backward_kernel'), (torch.no_grad(), 'forward_kernel')):
        choice._logged.clear()
        with context:
            found, expected = (PROBLEMS[op].attend(given, name) for name in ('auto', 'torch'))
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
            with pytest.raises(UnsupportedCall, match=f'{broken} does not compile'):
                PROBLEMS[op].attend(given, 'triton')
        assert f'{broken} does not compile' in caplog.text and "'triton' hands a call on to the next: " in caplog.text


def test_backward_kernels_are_compiled_where_a_gradient_is_wanted(on_gpu: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fixed, learnt = (torch.ones(1), None, True), (torch.ones(1, requires_grad=True), None)
    assert triton_backend.needs_backward(learnt) and not triton_backend.needs_backward(fixed)
    with torch.no_grad():
        assert not triton_backend.needs_backward(learnt)
    monkeypatch.setattr(triton_backend, 'is_traced', lambda: True)
    assert not triton_backend.needs_backward(learnt)


@pytest.mark.parametrize(
    'requested, environment, message',
    [
        ('mmcv', '', "'mmcv' cannot run here: .* on cpu. Usable here: (native, )?(triton, )?grid_sample, torch, auto"),
        ('torch', 'mmcv', "'mmcv' cannot run here"),
        ('fist', '', "backend='fist' is not a backend; choose one of auto, mmcv, native, triton, grid_sample, torch"),
        ('auto', 'fist', "MMGATE_MS_DEFORM_ATTN='fist' is not a backend"),
    ],
)
def test_a_name_is_that_backend_or_an_error(
    requested: str, environment: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv('MMGATE_MS_DEFORM_ATTN', environment)
    with pytest.raises(ConfigError, match=message):
        samplings.attend(GIVEN, requested)


@pytest.mark.parametrize('error', [UnsupportedCall, ValueError])
def test_one_that_refuses_hands_on_unless_it_was_asked_for(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Any other ValueError says that the input is wrong, for which no other backend is the remedy."""

    def refuses(samples: Any) -> Tensor:
        raise error('this one does not take more than 3 queries')

    kinds = (Backend('refuses', refuses), *choice.OPERATORS['ms_deform_attn'])
    monkeypatch.setitem(choice.OPERATORS, 'ms_deform_attn', kinds)
    with pytest.raises(error, match='this one does not take'):
        samplings.attend(GIVEN, 'refuses')
    for _ in range(2):
        with nullcontext() if error is UnsupportedCall else pytest.raises(ValueError, match='this one does not take'):
            torch.testing.assert_close(samplings.attend(GIVEN), samplings.attend(GIVEN, 'torch'))
    said = caplog.text.count("ms_deform_attn: 'refuses' hands a call on to the next: this one does not take")
    assert said == (error is UnsupportedCall)
    monkeypatch.setitem(choice.OPERATORS, 'ms_deform_attn', kinds[:1])
    with pytest.raises(error, match='this one does not take'):
        samplings.attend(GIVEN)


def test_the_first_call_says_what_runs_and_how_to_have_a_better_one(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(library, 'why_unavailable', lambda: 'type: build it')
    for asked, environment in (('grid_sample', ''), ('auto', 'grid_sample'), ('auto', '')):
        assert 'build it' not in caplog.text, 'nothing beside what was asked for'
        monkeypatch.setenv('MMGATE_MS_DEFORM_ATTN', environment)
        for _ in range(2):
            samplings.attend(GIVEN, asked)
        line, *others = [record.getMessage() for record in caplog.records]
        assert not others and line.startswith("ms_deform_attn runs on torch's grid_sample ('grid_sample'), ")
        assert ('as asked for.' in line) is ('grid_sample' in (asked, environment))
        caplog.clear()
        choice._logged.clear()
    assert line.endswith("that can run here. 'native', which is faster, does not run: type: build it.")


def test_mmengine_gets_the_line_where_it_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    logging = pytest.importorskip('mmengine.logging')
    said: list[str] = []
    monkeypatch.setattr(logging.MMLogger.get_instance('a_run'), 'handle', lambda record: said.append(record.msg))
    monkeypatch.setitem(choice.sys.modules, 'mmengine.logging', logging)
    samplings.attend(GIVEN, 'torch')
    assert len(said) == 1 and 'ms_deform_attn runs on the reference' in said[0]


@needs_native
@pytest.mark.skipif(TORCH < (2, 11), reason='torch 2.1 to 2.7, at least, read no sizes of levels under torch.func')
def test_transforms_of_torch_func_get_another_backend() -> None:
    def by(backend: str) -> Tensor:
        return torch.func.grad(lambda x: samplings.attend(GIVEN._replace(value=x), backend).sum())(GIVEN.value)

    torch.testing.assert_close(by('auto'), by('torch'))
    with pytest.raises(UnsupportedCall, match='does not run under transforms of torch.func'):
        by('native')

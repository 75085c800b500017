"""Other packages' operators as backends: against the float64 reference, and what they hand on.

``make test-peers`` installs torch-ms-deform-attn for it. deformops needs Python 3.12, torch 2.11 and CUDA: its backend
is tested on a stand-in of the package's signature, which samples by the reference.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import one_graph
from helpers.samplings import CASES, agree, by_backend, compare, drawn, exactly, make, results, run
from torch import Tensor

from mmgate.errors import UnsupportedCall
from mmgate.ops import ms_deform_attn
from mmgate.ops.backend import OPERATORS, candidates
from mmgate.ops.ms_deform_attn import deformops, mmcv, native
from mmgate.ops.ms_deform_attn import torch_ms_deform_attn as msda

STAND_INS = Path(__file__).parents[2] / 'stand_ins'
needs_msda = pytest.mark.skipif(msda.missing() is not None, reason=str(msda.missing()))
DEVICES = [
    'cpu',
    pytest.param(
        'cuda',
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')],
    ),
    pytest.param('mps', marks=pytest.mark.skipif(not torch.backends.mps.is_available(), reason='needs an Apple GPU')),
]


@pytest.mark.peers
@needs_msda
class TestTorchMSDeformAttn:
    @pytest.mark.parametrize('device', DEVICES)
    @pytest.mark.parametrize('name', [name for name in CASES if name != 'empty_last_level'])
    def test_equals_the_reference(self, name: str, device: str) -> None:
        case = dict(CASES[name])
        options = {key: case.pop(key) for key in ('residual', 'position') if key in case}
        # A logit of 2 * 10^4 has a rounding of 10^-3, by which its weight is off.
        agree('torch_ms_deform_attn', make(device, **case), 5e-3 if name == 'huge_logits' else 2e-5, **options)

    def test_random_problems(self) -> None:
        compared = 0
        for seed in range(60):
            _, given = drawn(seed)
            if not bool((given.spatial_shapes > 0).all()):
                continue
            expected = exactly(given)
            compare(f'problem {seed}', by_backend(given, 'torch_ms_deform_attn'), expected, 1e-4)
            in_float64 = by_backend(given, 'torch_ms_deform_attn', torch.float64)
            compare(f'problem {seed} in float64', in_float64, expected, 1e-9)
            compared += 1
        assert compared > 20

    @pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
    def test_16_bits_are_summed_in_float32(self, dtype: torch.dtype) -> None:
        inputs = make(reference=2, dtype=dtype)
        actual = results('torch_ms_deform_attn', inputs, dtype)
        step = 2.0**-10 if dtype is torch.float16 else 2.0**-7
        for name, value in results('torch', inputs, torch.float32).items():
            assert actual[name].dtype is dtype
            atol = step * (0.05 if name == 'output' else value.abs().max().item())
            torch.testing.assert_close(actual[name].float(), value.float(), rtol=step, atol=atol)

    @pytest.mark.parametrize('bad', ['nan', 'inf', '-inf', '1e30'])
    def test_locations_that_are_no_numbers_add_nothing(self, bad: str) -> None:
        inputs = make()
        inputs[3][0, 1] = float(bad)
        output = run('torch_ms_deform_attn')(*inputs)
        assert torch.equal(output[0, 1], torch.zeros_like(output[0, 1]))
        torch.testing.assert_close(output, run('torch')(*inputs), rtol=1e-4, atol=1e-5)

    @one_graph
    def test_compiles_without_a_graph_break(self) -> None:
        inputs = make()
        compiled = torch.compile(run('torch_ms_deform_attn'), fullgraph=True, backend='aot_eager')
        torch.testing.assert_close(compiled(*inputs), run('torch_ms_deform_attn')(*inputs))

    def test_under_autocast(self) -> None:
        inputs = make()
        with torch.autocast('cpu', torch.bfloat16):
            output = run('torch_ms_deform_attn')(*inputs)
        assert output.dtype is torch.float32
        torch.testing.assert_close(output, run('torch_ms_deform_attn')(*inputs))

    def test_auto_takes_it_on_a_cpu_without_the_native_kernel(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, '_missing', lambda: 'not compiled')
        inputs = make()
        chosen, _ = candidates('ms_deform_attn', OPERATORS['ms_deform_attn'], inputs[0])
        assert [backend.name for backend in chosen][:2] == ['torch_ms_deform_attn', 'cpu']
        assert torch.equal(run('auto')(*inputs), run('torch_ms_deform_attn')(*inputs))

    def test_calls_that_it_does_not_have_go_to_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(native, '_missing', lambda: 'not compiled')
        for inputs, message in (
            (make(levels=[(2, 3), (0, 3)]), 'no level without a pixel'),
            (make(queries=0), 'empty'),
        ):
            with pytest.raises(UnsupportedCall, match=message):
                run('torch_ms_deform_attn')(*inputs)
            torch.testing.assert_close(run('auto')(*inputs), run('torch')(*inputs))


def test_torch_ms_deform_attn_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 'value is on meta' in msda.why_not(torch.empty(1, device='meta'))
    on_mps: Any = SimpleNamespace(device=torch.device('mps'), dtype=torch.float64)
    assert 'no float64 on MPS' in msda.why_not(on_mps)
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    on_cuda: Any = SimpleNamespace(device=torch.device('cuda'), dtype=torch.float32)
    assert 'use_deterministic_algorithms is on' in msda.why_not(on_cuda)


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """deformops' signature over the reference: the backend's module, and the calls that it makes."""
    monkeypatch.syspath_prepend(str(STAND_INS))
    for name in [name for name in sys.modules if name.split('.')[0] == 'deformops']:
        monkeypatch.delitem(sys.modules, name)
    deformops.missing.cache_clear()
    import deformops.registry as registry

    monkeypatch.setattr(registry, 'CALLS', [])
    yield registry
    deformops.missing.cache_clear()


def attend(value: Tensor, shapes: Tensor, starts: Tensor, points: Tensor, logits: Tensor, gate: Any, reference: Any,
           residual: bool = True, position: str = 'pre_softmax') -> Tensor:  # fmt: skip
    return deformops.attend(
        value=value,
        spatial_shapes=shapes,
        level_start_index=starts,
        points=points,
        logits=logits,
        gate=gate,
        residual=residual,
        position=position,
        reference_points=reference,
    )


@pytest.mark.parametrize('name', CASES)
def test_deformops_stand_in_equals_the_reference(name: str, stand_in: Any) -> None:
    case = dict(CASES[name])
    options = {key: case.pop(key) for key in ('residual', 'position') if key in case}
    inputs = make(**case)
    leaves = [inputs[i].requires_grad_() for i in (0, 3, 4)]
    outputs = attend(*inputs, **options), run('torch', **options)(*inputs)
    gradients = [torch.autograd.grad(output.square().sum(), leaves) for output in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    (call,) = stand_in.CALLS
    assert call == dict(method='softmax' if inputs[5] is None else 'linear', fp32acc=True)


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_deformops_gets_weights_in_the_dtype_of_the_values(dtype: torch.dtype, stand_in: Any) -> None:
    """As its kernels read them; the stand-in refuses others, as the package does."""
    inputs = make(reference=2, dtype=dtype)
    output = attend(*inputs)
    assert output.dtype is dtype
    torch.testing.assert_close(output, run('torch')(*inputs), rtol=2e-2, atol=5e-3)


@pytest.mark.parametrize('bad', ['nan', 'inf', '-inf', '1e30'])
def test_deformops_gets_no_locations_that_are_no_numbers(bad: str, stand_in: Any) -> None:
    inputs = make()
    inputs[3][0, 1] = float(bad)
    torch.testing.assert_close(attend(*inputs), run('torch')(*inputs), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    'change, message',
    [
        (dict(queries=0), 'no empty tensors'),
        (dict(dtype=torch.float64), 'no float64'),
    ],
    ids=['empty', 'float64'],
)
def test_deformops_refuses_calls_that_it_does_not_have(change: dict[str, Any], message: str, stand_in: Any) -> None:
    with pytest.raises(UnsupportedCall, match=message):
        attend(*make(**change))


def test_deformops_refuses_more_numbers_than_its_offsets_reach(stand_in: Any) -> None:
    inputs = make()
    inputs[0] = torch.zeros(1).expand(1, 2**26, 2, 16)
    with pytest.raises(UnsupportedCall, match='one has 2147483648'):
        attend(*inputs)


def test_deformops_says_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch, stand_in: Any) -> None:
    on_cuda: Any = SimpleNamespace(device=torch.device('cuda', 0), dtype=torch.float32)
    monkeypatch.setattr(deformops, '_too_old', lambda index: False)
    assert deformops.why_not(on_cuda) is None
    assert 'value is on cpu' in deformops.why_not(torch.zeros(1))
    assert 'float64' in deformops.why_not(SimpleNamespace(device=on_cuda.device, dtype=torch.float64))
    monkeypatch.setattr(deformops, '_too_old', lambda index: True)
    assert 'compute capability 7.0' in deformops.why_not(on_cuda)
    monkeypatch.setattr(torch, 'are_deterministic_algorithms_enabled', lambda: True)
    assert 'use_deterministic_algorithms is on' in deformops.why_not(on_cuda)


def test_without_deformops_the_reason_says_what_to_do() -> None:
    deformops.missing.cache_clear()
    reason = deformops.missing() or ''
    expected = 'pip install "mmgate[deformops]"' if sys.version_info >= (3, 12) else 'needs Python 3.12'
    assert expected in reason or 'deformops' in sys.modules


@pytest.mark.parametrize(
    'device, order',
    [
        ('cuda', ['mmcv', 'torch_ms_deform_attn', 'deformops', 'grid_sample', 'torch']),
        ('mps', ['torch_ms_deform_attn', 'grid_sample', 'torch']),
        ('cpu', ['native', 'torch_ms_deform_attn', 'cpu', 'grid_sample', 'torch']),
    ],
)
def test_order_where_all_packages_are_installed(device: str, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (mmcv, msda, deformops):
        monkeypatch.setattr(module, 'missing', lambda: None)
    monkeypatch.setattr(native, '_missing', lambda: None)
    monkeypatch.setattr(deformops, '_too_old', lambda index: False)
    value: Any = SimpleNamespace(device=torch.device(device), dtype=torch.float32, is_cuda=device == 'cuda', shape=[32])
    chosen, _ = candidates('ms_deform_attn', OPERATORS['ms_deform_attn'], value)
    assert [backend.name for backend in chosen] == order


def test_peers_are_in_the_message_of_an_unknown_backend() -> None:
    with pytest.raises(ValueError, match='native, torch_ms_deform_attn, deformops, cpu'):
        ms_deform_attn(*make()[:5], backend='cuda')

"""torch-ms-deform-attn as a backend: against the float64 reference, and the calls that it hands on.

``make test-peers`` installs the package for it.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import one_graph
from helpers.samplings import CASES, agree, by_backend, compare, drawn, exactly, make, results, run

from mmgate.errors import UnsupportedCall
from mmgate.ops import native as library
from mmgate.ops.backend import OPERATORS, candidates
from mmgate.ops.ms_deform_attn import torch_ms_deform_attn as msda

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
        monkeypatch.setattr(library, 'missing', lambda: 'not compiled')
        inputs = make()
        chosen, _ = candidates('ms_deform_attn', OPERATORS['ms_deform_attn'], inputs[0])
        assert [backend.name for backend in chosen][:2] == ['torch_ms_deform_attn', 'cpu']
        assert torch.equal(run('auto')(*inputs), run('torch_ms_deform_attn')(*inputs))

    def test_calls_that_it_does_not_have_go_to_the_next(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(library, 'missing', lambda: 'not compiled')
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

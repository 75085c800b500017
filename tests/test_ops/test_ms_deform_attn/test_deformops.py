"""deformops as a backend, on a stand-in of its signature that samples by the reference.

The package needs Python 3.12, torch 2.11 and CUDA. The backend ran with it once, on an H100.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.samplings import CASES, make, run
from torch import Tensor

from mmgate.errors import UnsupportedCall
from mmgate.ops import ms_deform_attn
from mmgate.ops.ms_deform_attn import deformops

STAND_INS = Path(__file__).parents[2] / 'stand_ins'


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
           residual: bool = True, position: str = 'pre_softmax', num_points: Any = None) -> Tensor:  # fmt: skip
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
        num_points=num_points,
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


@pytest.mark.parametrize('gated', [True, False])
@pytest.mark.parametrize('reference', [0, 2, 4], ids=['locations', 'points', 'boxes'])
def test_deformops_gets_levels_that_are_filled_up(reference: int, gated: bool, stand_in: Any) -> None:
    """Weights are finished, as no logit of a point that is not there is a finite number."""
    inputs = make(points=12, levels=[(2, 3), (1, 1)], reference=reference)
    there = torch.arange(12) < torch.tensor([2, 12])[:, None]
    inputs[3], inputs[4] = (x[:, :, :, there].requires_grad_() for x in inputs[3:5])
    inputs[5] = torch.randn(1, 5, 2, 14) if gated else None
    inputs[0].requires_grad_()
    expected = ms_deform_attn(*inputs[:6], reference_points=inputs[6], num_points=(2, 12), backend='torch')
    outputs = attend(*inputs, num_points=(2, 12)), expected
    gradients = [torch.autograd.grad(output.square().sum(), [inputs[i] for i in (0, 3, 4)]) for output in outputs]
    torch.testing.assert_close(*outputs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-4)
    assert [call['method'] for call in stand_in.CALLS] == ['linear']


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

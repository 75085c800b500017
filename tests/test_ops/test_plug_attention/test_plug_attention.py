"""PLuG attention in PyTorch: chunks are the whole, in 16 bits as well, and every backend refuses the same shapes."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from conftest import assert_same, half_on_cpu, values_and_gradients
from torch import Tensor, nn
from torch.func import functional_call

from mmgate.layers import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.plug_attention import chunked

SHAPES = dict(query=(2, 4, 5, 8), key=(2, 4, 6, 8), value=(2, 4, 6, 8), gate_query=(2, 1, 5, 3), gate_key=(2, 1, 6, 3))
PER_HEAD = dict(gate_query=(2, 4, 5, 3), gate_key=(2, 4, 6, 3))
CHUNKED = {
    'shared': {},
    'per_head': PER_HEAD,
    'wide_values': dict(value=(2, 4, 6, 11)),
    'bias_of_keys': dict(bias=(6,)),
    'bias_of_pairs': dict(bias=(5, 6)),
    'bias_of_heads': dict(bias=(4, 1, 6)),
    'bias_of_all': dict(bias=(2, 4, 5, 6)) | PER_HEAD,
}
every_position = pytest.mark.parametrize('position', ['pre_softmax', 'post_softmax'])


def make(dtype: torch.dtype = torch.float32, **changed: tuple[int, ...]) -> dict[str, Tensor]:
    return {name: torch.randn(shape, dtype=dtype) for name, shape in {**SHAPES, **changed}.items()}


@every_position
@pytest.mark.parametrize('residual', [True, False], ids=['residual', 'no_residual'])
@pytest.mark.parametrize('learnt', [False, True], ids=['fixed', 'learnt'])
@pytest.mark.parametrize('changed', CHUNKED.values(), ids=CHUNKED)
def test_chunks_are_the_whole(
    changed: dict[str, Any], learnt: bool, residual: bool, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outputs and all gradients, those of a learnt bias and of the gate's scalars as well."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 2 * 2 * 4 * 6)
    gate = GatingModulation(activation='tanh', init='paper').double()
    tensors = make(torch.float64, **changed)
    differentiable = range(len(tensors) if learnt else 5)

    def run(backend: str) -> dict[str, Tensor]:
        def attend(*x: Tensor) -> Tensor:
            options: dict[str, Any] = dict(residual=residual, position=position, backend=backend)
            return plug_attention(*x[:5], gate, *x[5:], **options)

        gate.zero_grad()
        found = values_and_gradients(attend, list(tensors.values()), differentiable)
        return found | {name: x.grad for name, x in gate.named_parameters()}

    assert_same(run('chunked'), run('torch'), rtol=1e-9, atol=1e-10)


class Host(nn.Module):
    def __init__(self, gate: nn.Module) -> None:
        super().__init__()
        self.gate = gate

    def forward(self, backend: str, tensors: dict[str, Tensor]) -> Tensor:
        return plug_attention(**tensors, modulation=self.gate, backend=backend)


@pytest.mark.parametrize('learnt', [False, True], ids=['fixed', 'learnt'])
def test_chunks_formed_anew_have_the_same_gate(learnt: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a gate that is frozen in part, exchanged for the call, and in part a plain attribute as FSDP leaves it."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 2 * 2 * 4 * 6)
    gate, tensors = GatingModulation('mlp', init='paper').double(), make(torch.float64, bias=(5, 6))
    tensors['bias'].requires_grad_(learnt)
    given = {f'gate.{name}': torch.randn_like(x).requires_grad_() for name, x in gate.named_parameters()}
    given['gate.hidden_weight'].requires_grad_(False)
    flat = given.pop('gate.bias')
    del gate.bias
    gate.bias = flat[:]
    sought = [flat, *(x for x in given.values() if x.requires_grad)]

    def run(backend: str) -> dict[str, Tensor]:
        output = functional_call(Host(gate), given, (backend, tensors))
        grads = torch.autograd.grad(output.square().sum(), sought, retain_graph=True)
        return dict(zip(map(str, range(3)), grads, strict=True))

    assert_same(run('chunked'), run('torch'), rtol=1e-9, atol=1e-10)


def test_chunks_run_without_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 'meta', where models are counted, and which autocast does not know."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 2 * 2 * 4 * 6)
    tensors = {name: x.to('meta').requires_grad_() for name, x in make().items()}
    output = plug_attention(**tensors, modulation=GatingModulation().to('meta'), backend='chunked')
    output.sum().backward()
    assert output.shape == SHAPES['query']
    assert {name: x.grad.shape for name, x in tensors.items()} == SHAPES


def test_chunks_formed_anew_drop_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """The output is linear in the values, and its gradient says so."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 2 * 2 * 4 * 6)
    tensors = make(torch.float64)
    value = tensors['value'].requires_grad_()
    output = plug_attention(**tensors, modulation=torch.tanh, dropout=0.5, backend='chunked')
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    assert not torch.allclose(plug_attention(**tensors, modulation=torch.tanh), output)


@every_position
@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('chunk', [1 << 21, 8 * 3], ids=['whole', 'chunks'])
def test_small_gates_count_in_16_bits(
    chunk: int, autocast: bool, position: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 1 + G is 1 for all G below 0.0039."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: chunk)
    query, key = (torch.randn(1, 1, 8, 16) * 8).bfloat16(), torch.randn(1, 1, 8, 16).bfloat16()
    value, gate_key = torch.eye(8, 16).bfloat16()[None, None], torch.ones(1, 1, 8, 4).bfloat16()
    small = torch.tensor(0.0035 / 2).bfloat16()

    def weights(gate: Tensor) -> Tensor:
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast), torch.no_grad():
            gate_query = gate.expand(1, 1, 8, 4)  # the gate is twice its number
            output = plug_attention(query, key, value, gate_query, gate_key, nn.Identity(), position=position)
            return output[..., :8].float()

    factor = 1 + 2 * small.double()
    logits = (query @ key.mT / 4).double()
    exact = (logits * factor).softmax(-1) if position == 'pre_softmax' else logits.softmax(-1) * factor
    moved = (weights(small) != weights(0 * small)).float().mean()
    assert moved > 0.2, f'{moved:.0%} of the weights know of the gate'
    torch.testing.assert_close(weights(small).double(), exact, rtol=2**-6, atol=1e-3)


def test_a_gpu_gets_larger_chunks() -> None:
    """At 4,096 tokens, 8 heads and 2 images a CPU's would be 128 of some 20 launches each."""
    assert chunked.chunk_on(torch.device('cuda')) == 32 * chunked.chunk_on(torch.device('cpu'))


@half_on_cpu
@every_position
@pytest.mark.parametrize('chunk', [1 << 21, 8], ids=['whole', 'chunks'])
def test_products_beyond_half_precision(chunk: int, position: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 channels of 35 and 36 have the logit 10,080 and, before it is scaled, the product 80,640."""
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: chunk)
    query, key = torch.full((1, 1, 4, 64), 35.0), torch.full((1, 1, 4, 64), 36.0)
    query[:, :, 1::2] *= -1
    tensors = [x.half() for x in (query, key, torch.randn(1, 1, 4, 64), query, key)]
    modulation = GatingModulation(activation='tanh').half()
    attend = partial(plug_attention, modulation=modulation, position=position)
    half = values_and_gradients(attend, tensors, range(5))
    assert all(x.isfinite().all() for x in half.values())
    exact = plug_attention(*(x.double() for x in tensors), modulation=modulation.double(), position=position)
    torch.testing.assert_close(half['output'].double(), exact, rtol=0.01, atol=0.01)


@pytest.mark.parametrize('backend', ['torch', 'chunked', 'triton'])
@pytest.mark.parametrize(
    'changed, message',
    [
        (dict(key=(2, 2, 6, 8), value=(2, 2, 6, 8)), r'key must be .* with H = 4 as in query, got \(2, 2, 6, 8\)'),
        (dict(gate_query=(1, 1, 5, 3), gate_key=(1, 1, 6, 3)), 'gate_query must be .* with B = 2'),
        (dict(gate_key=(2, 1, 5, 3)), 'gate_key must be .* with M = 6 as in key'),
        (dict(gate_key=(2, 4, 6, 3)), 'gate_key must be .* with G = 1 as in gate_query'),
        (dict(gate_query=(2, 2, 5, 3), gate_key=(2, 2, 6, 3)), 'gate_query must have 1 head or the 4'),
        (dict(value=(2, 4, 5, 8)), 'value must be .* with M = 6 as in key'),
        (dict(query=(4, 5, 8)), r'query must be \(B, H, N, d\)'),
        (dict(bias=(2, 1, 1, 5)), r'bias must be .* with M = 6 as in key, got \(2, 1, 1, 5\)'),
    ],
    ids=['gqa', 'gate_batch', 'gate_keys', 'gate_heads', 'odd_gate_heads', 'values', '3d', 'bias'],
)
def test_shapes_that_do_not_go_together(changed: dict, message: str, backend: str) -> None:
    with pytest.raises(ValueError, match=message):
        plug_attention(**make(**changed), modulation=torch.tanh, backend=backend)


def test_a_position_that_is_unknown() -> None:
    with pytest.raises(ValueError, match='choose one of pre_softmax, post_softmax'):
        plug_attention(**make(), modulation=torch.tanh, position='pre')

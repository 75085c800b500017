"""Every family of attention: any input, 16 bits, saturation, company in a batch."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from conftest import half_on_cpu
from helpers.families import DEFORMABLE, DENSE, FAMILIES, HEADS, MAP, C, build, call
from helpers.properties import DTYPES, MEMORY, SPOILT, every_number_of_examples, hold, numbers, spoil, stored
from hypothesis import strategies as st
from torch import Tensor, nn

ARGUMENTS = r'\b(x|query|key|value|identity|reference_points|tokens)\b'


@st.composite
def tokens(draw: st.DrawFn, name: str) -> tuple[Any, tuple[int, int], bool]:
    least = 2 if name in DEFORMABLE else 1  # rows, of which the last is the second level
    hw_shape = draw(st.integers(least, 5)), draw(st.integers(1, 5))
    shape = (draw(st.sampled_from([1, 2, 0])), hw_shape[0] * hw_shape[1], C)
    kind = draw(st.sampled_from(['normal', 'normal', 'zeros', 'ones']))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(list(DTYPES)))
    x = stored(numbers(kind, shape, generator).to(dtype), draw(st.sampled_from(MEMORY)))
    spoilt = draw(st.sampled_from([None, None, *SPOILT]))
    return (x if spoilt is None else spoil(x, spoilt, draw(st.integers(0, 2)))), hw_shape, spoilt is not None


def assert_right_or_refused(layer: nn.Module, x: Any, hw_shape: tuple[int, int], spoilt: bool) -> None:
    dtype = x.dtype if isinstance(x, Tensor) and x.is_floating_point() else torch.float32
    narrow = copy.deepcopy(layer).to(dtype)
    x = x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
    try:
        output = call(narrow, hw_shape)(x)
    except (TypeError, ValueError) as error:
        assert spoilt, error
        assert re.search(ARGUMENTS, str(error)), f'names no argument: {error}'
        return
    assert output.dtype is dtype and output.shape == x.shape
    output.float().square().sum().backward()
    gradients = {'x': x.grad, **{name: p.grad for name, p in narrow.named_parameters() if p.grad is not None}}
    for name, value in {'output': output, **gradients}.items():
        assert value.isfinite().all(), f'{name} is not finite'
    exact = call(copy.deepcopy(narrow).double(), hw_shape)(x.detach().double().contiguous())
    tolerance = 2 * DTYPES[dtype] * max(1.0, float(exact.detach().abs().max()) if exact.numel() else 0.0)
    torch.testing.assert_close(output.double(), exact, rtol=0, atol=tolerance)


@every_number_of_examples
@pytest.mark.parametrize('biases', [True, False], ids=['biases', 'none'])
@pytest.mark.parametrize('name', FAMILIES)
def test_a_layer_is_right_on_any_tokens_or_refuses_them(name: str, biases: bool, examples: int) -> None:
    """Without biases, tokens at 0, as padding leaves them, stay at 0."""
    layer = build(name)
    for key, parameter in () if biases else layer.named_parameters():
        if key.endswith('bias') and not key.startswith(('gate.gml', 'sampling_offsets')):
            nn.init.zeros_(parameter)
    hold(min(examples, 100), lambda drawn: assert_right_or_refused(layer, *drawn), drawn=tokens(name))


@every_number_of_examples
@pytest.mark.parametrize('name', DENSE)
def test_masks_of_any_shape_are_right_or_refused(name: str, examples: int) -> None:
    layer, sizes = build(name), st.sampled_from([1, 2, 3, 4, 5, 0])

    def check(shape: list[int], padding: list[int], kind: torch.dtype) -> None:
        query, key = torch.randn(2, 3, C), torch.randn(2, 5, C)
        masks = dict(attn_mask=torch.rand(shape).gt(0.5).to(kind), key_padding_mask=torch.rand(padding).gt(0.5))
        try:
            output = layer(query, key, key, **masks)[0]
        except ValueError as error:
            assert 'mask' in str(error)
            return
        assert output.shape == (2, 3, C) and output.isfinite().all()

    kinds = st.sampled_from([torch.bool, torch.float32, torch.uint8])
    hold(
        min(4 * examples, 400),
        check,
        shape=st.lists(sizes, min_size=1, max_size=5),
        padding=st.one_of(st.just([2, 5]), st.lists(sizes, min_size=1, max_size=3)),
        kind=kinds,
    )


LOGITS = 1e4
HW = (4, 4)
every_family = pytest.mark.parametrize('name', FAMILIES)
PRECISIONS = {
    'float32': (torch.float32, False),
    'bfloat16': (torch.bfloat16, False),
    'float16': (torch.float16, False),
    'autocast': (torch.float32, True),
}
every_precision = pytest.mark.parametrize(
    'precision', [pytest.param(p, marks=half_on_cpu if p == 'float16' else ()) for p in PRECISIONS]
)
# gates through these saturate at a number; others grow with what they read
SATURATING = ('sdpa_g1', 'sdpa_g5', 'dgsa', 'saga', 'plug', 'plug_paper', 'plug_per_head', 'plug_deformable_tanh')


def assert_finite(layer: nn.Module, x: Tensor, precision: str) -> None:
    """Take a step with ``layer`` and look at the output and every gradient."""
    dtype, autocast = PRECISIONS[precision]
    layer, x = layer.to(dtype), x.to(dtype).requires_grad_()
    with torch.autocast('cpu', torch.bfloat16, enabled=autocast):
        output = call(layer, HW)(x)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(4))
    (output.float() * noise).mean().backward()
    gradients = {key: p.grad for key, p in layer.named_parameters() if p.grad is not None}
    found = {'output': output, 'x': x.grad, **gradients}
    wrong = [name for name, value in found.items() if not value.isfinite().all()]
    assert not wrong, f'not finite: {", ".join(wrong)}'


def split_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)


@torch.no_grad()
def saturate(name: str, layer: Any, x: Tensor) -> None:
    """Scale the projections so that the largest logit, or product of features, is 1e4, and gates are at their ends."""
    if name in DENSE:
        query, key, _ = layer.project((x, x, x))
        factor = (LOGITS / (query @ key.mT / query.shape[-1] ** 0.5).abs().max()) ** 0.5
        layer.in_proj_weight[: 2 * C] *= factor
        layer.in_proj_bias[: 2 * C] *= factor
    elif name in MAP:
        query, key = layer.qkv(x)[..., : 2 * C].chunk(2, -1)
        factor = (LOGITS / (split_heads(query) @ split_heads(key).mT).abs().max()) ** 0.5
        layer.qkv.weight[: 2 * C] *= factor
        layer.qkv.bias[: 2 * C] *= factor
    else:
        nn.init.normal_(layer.attention_weights.weight)
        layer.attention_weights.weight *= LOGITS / layer.attention_weights(x).abs().max()
    factor = 1e3 if name in SATURATING else 3.0
    for key, parameter in getattr(layer, 'gate', nn.Module()).named_parameters():
        if key.startswith(('gate_q_proj', 'gate_k_proj')):
            parameter *= factor**0.5  # of which a product is taken
        elif key.startswith(('gate_weight', 'gate_proj', 'gate_k', 'gate_v')):
            parameter *= factor


@every_precision
@every_family
def test_large_logits_and_saturated_gates_stay_finite(name: str, precision: str) -> None:
    layer, x = build(name), torch.randn(2, HW[0] * HW[1], C)
    saturate(name, layer, x)
    assert_finite(layer, x, precision)


@torch.no_grad()
@every_family
def test_an_image_does_not_depend_on_its_company(name: str) -> None:
    run = call(build(name), (5, 3))
    x = torch.randn(3, 15, C)
    x[2] *= 100  # loud company
    together = run(x)
    for i in range(3):
        alone = run(x[i : i + 1])
        # Sums come in another order, and their error is a part of the largest summand, not of a sum near 0.
        size = max(1.0, float(alone.abs().max()))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-5 * size)

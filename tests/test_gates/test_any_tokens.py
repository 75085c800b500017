"""Layers on any input: what they give in float64, or an error that names an argument; no NaN, no crash."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from helpers.families import DEFORMABLE, DENSE, FAMILIES, C, build, call
from helpers.properties import DTYPES, MEMORY, SPOILT, every_number_of_examples, hold, numbers, spoil, stored
from hypothesis import strategies as st
from torch import Tensor

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


def assert_right_or_refused(layer: torch.nn.Module, x: Any, hw_shape: tuple[int, int], spoilt: bool) -> None:
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
            torch.nn.init.zeros_(parameter)
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

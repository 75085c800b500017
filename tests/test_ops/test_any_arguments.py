"""Operators on any input: what the reference says, or an error that names an argument; no NaN, no crash."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from conftest import needs_native
from helpers import pairs, samplings
from helpers.properties import DTYPES, MEMORY, SPOILT, every_number_of_examples, hold, numbers, spoil, stored
from hypothesis import strategies as st
from torch import Tensor

from mmgate.ops import agent_attention, differential_attention, gated_linear_attention, kernel_attention
from mmgate.ops.agent import agent_attention_reference
from mmgate.ops.deformable.samples import Samples
from mmgate.ops.dense import chunked
from mmgate.ops.dense.reference import Pairs
from mmgate.ops.differential import differential_map, shared_key_attention, shared_key_map
from mmgate.ops.gated_linear import gated_linear_attention_reference
from mmgate.ops.layout import check_layout
from mmgate.ops.linear_attention import kernel_attention_reference


@dataclass(frozen=True)
class Op:
    """An operator, its reference, and by argument the axes, ``?`` if it is optional, and the numbers if not normal."""

    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    axes: dict[str, str]
    kinds: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # of the sizes of an axis
    fixed: str = ''  # arguments whose gradients are not compared, or not there


def plug(run: Callable[[Pairs], Tensor], position: str) -> Callable[..., Tensor]:
    return lambda **given: run(Pairs(modulation=pairs.make().modulation, position=position, **given))


def sampler(run: Callable[[Samples], Tensor]) -> Callable[..., Tensor]:
    levels = dict(spatial_shapes=torch.tensor([(2, 3), (0, 3), (3, 1)]), level_start_index=torch.tensor([3, 9, 0]))
    return lambda sampling_locations, **given: run(Samples(points=sampling_locations, **levels, **given))


def saga(q: Tensor, k: Tensor, v: Tensor, gate_k: Tensor | None = None, gate_v: Tensor | None = None) -> Tensor:
    gates = (torch.ones_like(x) if gate is None else gate for x, gate in ((k, gate_k), (v, gate_v)))
    return gated_linear_attention_reference(q, k, v, *gates)


LINEAR = dict(q='BHNd', k='BHMd', v='BHMe')
DIFFERENTIAL = dict(query='BHNd', key='BHMd', value='BHMe', bias='B1NM?')
PLUG = dict(query='BHNd', key='BHMd', value='BHMe', gate_query='BhNg', gate_key='BhMg', bias='BHNM?')
SAMPLES = dict(value='B9HD', sampling_locations='BQH3P2', logits='BQH3P', gate='BqH3P?', reference_points='BQ34?')
OPS = {
    'agent': Op(
        agent_attention,
        lambda q, bias1=None, bias2=None, **others: agent_attention_reference(
            q, **others, bias1=bias1, bias2=bias2, scale=q.shape[-1] ** -0.5
        ),
        {**LINEAR, 'agents': 'BHnd', 'bias1': '1HnM?', 'bias2': '1HNn?'},
    ),
    'differential': Op(
        differential_attention,
        lambda value, **others: differential_map(**others) @ value,
        {**DIFFERENTIAL, 'gate': 'BHN1'},
        dict(gate='share'),
        dict(d=2),
    ),
    'shared_keys': Op(
        shared_key_attention,
        lambda value, **others: shared_key_map(**others) @ value,
        {**DIFFERENTIAL, 'second_query': 'BHNd', 'weight': 'BHN1'},
        dict(weight='share'),
    ),
    'saga': Op(
        gated_linear_attention,
        saga,
        {**LINEAR, 'gate_k': 'BHMd?', 'gate_v': 'BHM1?'},
        dict(gate_k='share', gate_v='share'),
    ),
    'kernel': Op(
        kernel_attention,
        kernel_attention_reference,
        {**LINEAR, 'norm_q': 'BHNf', 'norm_k': 'BHMf'},
        dict.fromkeys(('q', 'k', 'norm_q', 'norm_k'), 'positive'),
    ),
    **{
        f'plug_{backend}_{position}': Op(
            plug(partial(pairs.attend, backend=backend), position),
            plug(pairs.by_maps, position),
            PLUG,
            fixed='bias' if backend == 'native' else '',
        )
        for position in ('pre_softmax', 'post_softmax')
        for backend in ('torch', 'chunked', 'native')
    },
    **{
        f'sampler_{backend}': Op(
            sampler(partial(samplings.attend, backend=backend)),
            sampler(samplings.by_hats),
            SAMPLES,
            fixed='sampling_locations reference_points',  # their gradients jump at a pixel's centre
        )
        for backend in ('torch', 'grid_sample', 'native')
    },
}


@dataclass
class Call:
    """Arguments, and whether they ought to be refused."""

    tensors: dict[str, Any]
    dtype: torch.dtype
    spoilt: str | None
    empty: str | None
    large: bool


@st.composite
def calls(draw: st.DrawFn, op: Op) -> Call:
    letters = sorted({letter for axes in op.axes.values() for letter in axes if letter.isalpha()})
    sizes = {letter: draw(st.integers(1, 3)) * op.steps.get(letter, 1) for letter in letters}
    for part in [letter for letter in 'hq' if letter in sizes]:  # heads or queries, or one for all of them
        sizes[part] = draw(st.sampled_from([1, sizes[part.upper()]]))
    empty = draw(st.sampled_from([None, None, *letters]))
    sizes.update({} if empty in (None, 'h', 'q') else {empty: 0})
    dtype = draw(st.sampled_from(list(DTYPES)))
    extreme = draw(st.sampled_from([None, None, 'zeros', 'large', 'ones']))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors: dict[str, Any] = {}
    for number, (name, axes) in enumerate(op.axes.items()):
        if '?' in axes and draw(st.booleans()):
            continue
        kind = op.kinds.get(name, 'normal')
        if extreme is not None and (kind == 'normal' or extreme == 'zeros' or (kind, extreme) == ('share', 'ones')):
            # values stay moderate, as in a network; what makes logits and gates is what saturates
            kind = extreme if extreme == 'zeros' or number < 2 or kind == 'share' or 'gate' in name else kind
        shape = tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes.strip('?'))
        x = numbers(kind, shape, generator).to(dtype)
        tensors[name] = stored(x, draw(st.sampled_from(MEMORY)))
    spoilt = draw(st.sampled_from([None, None, None, *tensors]))
    if spoilt is not None:
        tensors[spoilt] = spoil(tensors[spoilt], draw(st.sampled_from(SPOILT)), draw(st.integers(0, 3)))
    return Call(tensors, dtype, spoilt, empty, extreme == 'large')


def solved(run: Callable[..., Tensor], given: dict[str, Any], fixed: str, size: float) -> dict[str, Tensor]:
    leaves = dict(given)
    for name, x in given.items():
        if isinstance(x, Tensor) and x.is_floating_point():
            leaves[name] = x.detach().requires_grad_(name not in fixed.split())
    output = run(**leaves)
    noise = torch.linspace(-size, size, output.numel()).view(output.shape)
    (output * noise.to(torch.promote_types(output.dtype, torch.float32))).sum().backward()
    return {'output': output.detach(), **{name: x.grad for name, x in leaves.items() if x.grad is not None}}


def assert_right_or_refused(op: Op, call: Call) -> None:
    # what saturates has gradients of 1e6, in half precision only with the loss as small as a scaler makes it
    size = 2.0**-10 if call.large else 1.0
    try:
        found = solved(op.run, call.tensors, op.fixed, size)
    except (TypeError, ValueError) as error:
        assert call.spoilt or call.empty, error
        assert any(re.search(rf'\b{name}\b', str(error)) for name in op.axes), f'names no argument: {error}'
        return
    for name, x in found.items():
        assert x.isfinite().all(), f'{name} is not finite'
        assert x.dtype is call.dtype, name
    if call.large:
        return
    exact = {name: x.detach().double().contiguous() for name, x in call.tensors.items()}
    for name, expected in solved(op.reference, exact, op.fixed, size).items():
        tolerance = DTYPES[call.dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        actual = found.get(name, torch.zeros_like(expected)).double()
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance, msg=lambda m, n=name: f'{n}: {m}')


@every_number_of_examples
@pytest.mark.parametrize('name', [pytest.param(name, marks=needs_native if 'native' in name else ()) for name in OPS])
def test_an_operator_is_right_on_any_arguments_or_refuses_them(
    name: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 12)
    op = OPS[name]
    hold(examples, lambda call: assert_right_or_refused(op, call), call=calls(op))


X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ('name', 'y', 'layout', 'message'),
    [
        ('y', torch.zeros(3), 'B', r'y must be \(B\) with B = 2 as in x, got \(3,\)'),
        ('y', torch.zeros(2, 2), 'B|1 N|1', r'y must be \(B\|1, N\|1\) with N = 3 as in x, got \(2, 2\)'),
        ('y', torch.zeros(2, 3), 'B 2', r'y must be \(B, 2\), got \(2, 3\)'),
        ('y', torch.zeros(2, 3).double(), 'B N', 'y is torch.float64, x is torch.float32; convert one to the other'),
        ('y', torch.zeros(2, 3, device='meta'), 'B N', 'y is on meta, x on cpu; move one to the other'),
        ('index', torch.zeros(2, 3, dtype=torch.bool), 'B N', 'index must be integer, got torch.bool'),
        ('y', torch.zeros(2, 0), 'B M', 'y is empty: its axis M must be 1 or more'),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, y: Any, layout: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f'^{message}'):
        check_layout(('x', X, 'B N d'), (name, y, layout), filled='M', integer='index')


def test_dtypes_may_differ_where_that_is_said_or_autocast_converts() -> None:
    mixed = ('x', X, 'B N d'), ('y', X.bfloat16(), 'B N d')
    check_layout(*mixed, one_dtype=False)
    with torch.autocast('cpu', torch.bfloat16):
        check_layout(*mixed)

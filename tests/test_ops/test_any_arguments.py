"""Operators on any input: what the reference says, or an error that names an argument; no NaN, no crash."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from conftest import needs_native
from helpers.properties import DTYPES, MEMORY, SPOILT, every_number_of_examples, hold, numbers, spoil, stored
from hypothesis import strategies as st
from torch import Tensor

from mmgate.gates import GatingModulation
from mmgate.ops import agent_attention, differential_attention, gated_linear_attention, ms_deform_attn, plug_attention
from mmgate.ops import linear_attention as linear
from mmgate.ops.agent import agent_attention_reference
from mmgate.ops.dense import chunked
from mmgate.ops.differential import differential_map, shared_key_attention, shared_key_map
from mmgate.ops.gated_linear import gated_linear_attention_reference


@dataclass(frozen=True)
class Op:
    """An operator, its reference, and by argument the axes, and the numbers where they are not normal."""

    run: Callable[..., Tensor]
    reference: Callable[..., Tensor]
    axes: dict[str, str]
    kinds: dict[str, str] = field(default_factory=dict)
    steps: dict[str, int] = field(default_factory=dict)  # of the sizes of an axis

    def is_optional(self, name: str) -> bool:
        """Return whether a call may leave the argument out."""
        return inspect.signature(self.run).parameters[name].default is None


def saga(q: Tensor, k: Tensor, v: Tensor, gate_k: Tensor | None = None, gate_v: Tensor | None = None) -> Tensor:
    gates = (torch.ones_like(x) if gate is None else gate for x, gate in ((k, gate_k), (v, gate_v)))
    return gated_linear_attention_reference(q, k, v, *gates)


def agent(q: Tensor, k: Tensor, v: Tensor, agents: Tensor, bias1: Any = None, bias2: Any = None) -> Tensor:
    return agent_attention_reference(q, k, v, agents, bias1, bias2, q.shape[-1] ** -0.5)


def differential(query: Tensor, key: Tensor, value: Tensor, gate: Tensor, bias: Tensor | None = None) -> Tensor:
    return differential_map(query, key, gate, bias) @ value


def shared_keys(
    query: Tensor, second_query: Tensor, key: Tensor, value: Tensor, weight: Tensor, bias: Any = None
) -> Tensor:
    return shared_key_map(query, second_query, key, weight, bias) @ value


def plug(function: Callable[..., Tensor], **options: Any) -> Callable[..., Tensor]:
    def run(
        query: Tensor, key: Tensor, value: Tensor, gate_query: Tensor, gate_key: Tensor, bias: Any = None
    ) -> Tensor:
        modulation = GatingModulation(init='paper', activation='tanh')
        modulation.weight.data, modulation.bias.data = torch.tensor([0.5, -1.0]), torch.tensor([0.3, 0.2])
        return function(query, key, value, gate_query, gate_key, modulation, bias, **options)

    return run


def plug_reference(position: str) -> Callable[..., Tensor]:
    def products(rows: Tensor, columns: Tensor) -> Tensor:
        return torch.einsum('bhnd,bhmd->bhnm', rows, columns) / rows.shape[-1] ** 0.5

    def run(
        query: Tensor, key: Tensor, value: Tensor, gate_query: Tensor, gate_key: Tensor, gml: Any, bias: Any
    ) -> Tensor:
        factor = 1 + gml(products(gate_query, gate_key))
        logits = products(query, key) * (factor if position == 'pre_softmax' else 1)
        weights = (logits if bias is None else logits + bias).softmax(-1)
        return weights * (factor if position == 'post_softmax' else 1) @ value

    return plug(run)


LINEAR = dict(q='BHNd', k='BHMd', v='BHMe')
PLUG = dict(query='BHNd', key='BHMd', value='BHMe', gate_query='BhNg', gate_key='BhMg', bias='BHNM')
DIFFERENTIAL = dict(query='BHNd', key='BHMd', value='BHMe', gate='BHN1', bias='B1NM')
SHARED_KEYS = dict(query='BHNd', second_query='BHNd', key='BHMd', value='BHMe', weight='BHN1', bias='B1NM')
OPS = {
    'agent': Op(agent_attention, agent, {**LINEAR, 'agents': 'BHnd', 'bias1': '1HnM', 'bias2': '1HNn'}),
    'differential': Op(differential_attention, differential, DIFFERENTIAL, dict(gate='share'), dict(d=2)),
    'shared_keys': Op(shared_key_attention, shared_keys, SHARED_KEYS, dict(weight='share')),
    'saga': Op(
        gated_linear_attention,
        saga,
        {**LINEAR, 'gate_k': 'BHMd', 'gate_v': 'BHM1'},
        dict(gate_k='share', gate_v='share'),
    ),
    'kernel': Op(
        lambda q, k, v, norm_q, norm_k: linear.kernel_attention(q, k, v, norm_q, norm_k),
        linear.kernel_attention_reference,
        {**LINEAR, 'norm_q': 'BHNf', 'norm_k': 'BHMf'},
        dict.fromkeys(('q', 'k', 'norm_q', 'norm_k'), 'positive'),
    ),
    **{
        f'plug_{backend}_{position}': Op(
            plug(plug_attention, backend=backend, position=position), plug_reference(position), PLUG
        )
        for backend in ('torch', 'chunked')
        for position in ('pre_softmax', 'post_softmax')
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
    if 'h' in sizes:  # heads, or one for all of them
        sizes['h'] = draw(st.sampled_from([1, sizes['H']]))
    empty = draw(st.sampled_from([None, None, *letters]))
    sizes.update({} if empty in (None, 'h') else {empty: 0})
    dtype = draw(st.sampled_from(list(DTYPES)))
    extreme = draw(st.sampled_from([None, None, 'zeros', 'large', 'ones']))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    tensors: dict[str, Any] = {}
    for number, (name, axes) in enumerate(op.axes.items()):
        if op.is_optional(name) and draw(st.booleans()):
            continue
        kind = op.kinds.get(name, 'normal')
        if extreme is not None and (kind == 'normal' or extreme == 'zeros' or (kind, extreme) == ('share', 'ones')):
            # values stay moderate, as in a network; what makes logits and gates is what saturates
            kind = extreme if extreme == 'zeros' or number < 2 or kind == 'share' or 'gate' in name else kind
        shape = tuple(int(axis) if axis.isdigit() else sizes[axis] for axis in axes)
        x = numbers(kind, shape, generator).to(dtype)
        tensors[name] = stored(x, draw(st.sampled_from(MEMORY)))
    spoilt = draw(st.sampled_from([None, None, None, *tensors]))
    if spoilt is not None:
        tensors[spoilt] = spoil(tensors[spoilt], draw(st.sampled_from(SPOILT)), draw(st.integers(0, 3)))
    return Call(tensors, dtype, spoilt, empty, extreme == 'large')


def leaves_of(tensors: dict[str, Any]) -> dict[str, Any]:
    return {
        name: x.detach().requires_grad_() if isinstance(x, Tensor) and x.is_floating_point() else x
        for name, x in tensors.items()
    }


def assert_right_or_refused(op: Op, call: Call) -> None:
    leaves = leaves_of(call.tensors)
    try:
        output = op.run(**leaves)
    except (TypeError, ValueError) as error:
        assert call.spoilt or call.empty, error
        assert any(re.search(rf'\b{name}\b', str(error)) for name in op.axes), f'names no argument: {error}'
        return
    assert output.dtype is call.dtype
    # what saturates has gradients of 1e6, in half precision only with the loss as small as a scaler makes it
    (output.float().sum() * (2**-10 if call.large else 1)).backward()
    results = {'output': output, **{name: x.grad for name, x in leaves.items() if x.grad is not None}}
    for name, x in results.items():
        assert x.isfinite().all(), f'{name} is not finite'
    if not call.large:
        expected = op.reference(**{name: x.detach().double().contiguous() for name, x in leaves.items()})
        tolerance = DTYPES[call.dtype] * max(1.0, float(expected.abs().max()) if expected.numel() else 0.0)
        torch.testing.assert_close(output.detach().double(), expected, rtol=0, atol=tolerance)


@every_number_of_examples
@pytest.mark.parametrize('name', OPS)
def test_an_operator_is_right_on_any_arguments_or_refuses_them(
    name: str, examples: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked, 'chunk_on', lambda device: 12)
    op = OPS[name]
    hold(examples, lambda call: assert_right_or_refused(op, call), call=calls(op))


@st.composite
def samplings(draw: st.DrawFn) -> tuple[dict[str, Any], str | None]:
    size = st.integers(0, 3)
    levels = draw(st.lists(st.tuples(size, size), max_size=3))
    batch, queries, heads, dim, points = (draw(st.sampled_from([1, 2, 3, 0])) for _ in range(5))
    shapes = torch.tensor(levels, dtype=torch.long).view(-1, 2)
    areas = shapes.prod(1)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    dtype = draw(st.sampled_from(list(DTYPES)))

    def random(*shape: int, kind: str = 'normal') -> Tensor:
        return stored(numbers(kind, shape, generator).to(dtype), draw(st.sampled_from(MEMORY)))

    samples = (batch, queries, heads, len(levels), points)
    locations = random(*samples, 2) * draw(st.sampled_from([0.5, 3.0, 1e4]))
    if draw(st.booleans()) and locations.numel():
        locations[..., 0] = draw(st.sampled_from([float('inf'), -float('inf'), float('nan'), 0.0, 1.0]))
    given: dict[str, Any] = dict(
        value=random(batch, int(areas.sum()), heads, dim),
        spatial_shapes=shapes,
        level_start_index=areas.cumsum(0) - areas,
        sampling_locations=locations,
        logits=random(*samples, kind=draw(st.sampled_from(['normal', 'zeros', 'large']))),
    )
    if draw(st.booleans()):
        given['gate'] = random(*(draw(st.sampled_from([1, n])) for n in samples), kind='large')
    if draw(st.booleans()):
        given['reference_points'] = random(batch, queries, len(levels), draw(st.sampled_from([2, 4])))
    spoilt = draw(st.sampled_from([None, None, None, *given]))
    if spoilt is not None:
        given[spoilt] = spoil(given[spoilt], draw(st.sampled_from(SPOILT)), draw(st.integers(0, 5)))
    return given, spoilt


def sampled(given: dict[str, Any], spoilt: str | None, backend: str) -> None:
    leaves = leaves_of(given)
    try:
        output = ms_deform_attn(**leaves, backend=backend)
    except (TypeError, ValueError) as error:
        assert spoilt, error
        assert any(name in str(error) for name in given), f'names no argument: {error}'
        return
    assert output.dtype is given['value'].dtype and output.isfinite().all()
    output.float().sum().backward()
    for name in ('value', 'logits', 'gate'):
        if leaves.get(name) is not None and leaves[name].grad is not None:
            assert leaves[name].grad.isfinite().all(), name
    near = given['sampling_locations'].nan_to_num(nan=0, posinf=0, neginf=0).abs().lt(10).all()
    if near and given['value'].dtype in (torch.float64, torch.float32):
        exact = {name: x.double() if x.is_floating_point() else x for name, x in given.items()}
        torch.testing.assert_close(output.double(), ms_deform_attn(**exact, backend='torch'), rtol=1e-3, atol=1e-3)


@every_number_of_examples
@pytest.mark.parametrize('backend', ['grid_sample', pytest.param('native', marks=needs_native)])
def test_sampling_is_right_or_refused(backend: str, examples: int) -> None:
    hold(examples, lambda call: sampled(*call, backend), call=samplings())

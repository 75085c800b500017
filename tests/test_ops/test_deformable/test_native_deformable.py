"""mmgate's own CPU kernel: on random problems, by threads and sets of instructions; every number of 16 bits; refusals.

``make sanitize`` runs this file beside the address, undefined-behaviour and thread sanitizers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import needs_native
from helpers.samplings import CASES, TOLERANCES, agree, attend, compare, make, problems, solved

from mmgate.ops import ms_deform_attn
from mmgate.ops import native as library
from mmgate.ops.deformable.samples import Samples

pytestmark = needs_native


@pytest.mark.usefixtures('poisoned_memory', 'threads', 'instructions')
def test_random_problems_equal_a_float64_program() -> None:
    """Any channels, more points than a block has, gates of fewer axes and levels of different numbers among them."""
    for name, given, expected in problems():
        compare(solved(given, 'native', torch.float64), expected, 1e-9, name)
        compare(solved(given, 'native'), expected, 1e-4, f'{name} in float32')


@pytest.mark.parametrize('name', CASES)
@pytest.mark.usefixtures('poisoned_memory', 'threads', 'instructions')
def test_many_queries_equal_the_reference(name: str) -> None:
    """By a copy of each head's values, and in several parts of a head's queries."""
    agree('native', make(**{'queries': 300, **CASES[name]}), TOLERANCES[name])


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
def test_16_bit_numbers_are_read_and_rounded_as_by_torch(dtype: torch.dtype) -> None:
    """Every number there is: a sample at a pixel's centre is that pixel's value."""
    numbers = torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(dtype)
    numbers = numbers[numbers.isfinite()]
    values = numbers[: len(numbers) // 16 * 16].view(1, -1, 1, 16)
    tokens = values.shape[1]
    points = (torch.arange(tokens) + 0.5).view(1, -1, 1, 1, 1, 1) / torch.tensor([1.0, tokens])
    points[..., 0] = 0.5
    shapes, starts = torch.tensor([(tokens, 1)]), torch.tensor([0])
    for many in (False, True):  # read where they lie, or copied
        at = points.expand(-1, -1, -1, -1, 3 if many else 1, -1)
        output = ms_deform_attn(values, shapes, starts, at, torch.zeros(at.shape[:-1]), backend='native')
        torch.testing.assert_close(output.view_as(values), values, rtol=2e-3, atol=0)
    logits, gate = torch.zeros(points.shape[:-1]), torch.full((1, 1, 1, 1, 1), 1 / 3)
    doubled, rounded = (
        attend(Samples(x, shapes, starts, points, logits, gate, position='post_softmax'), 'native')
        for x in (values.float(), values)
    )
    assert torch.equal(rounded, doubled.to(dtype))


@pytest.mark.parametrize('bad', ['nan', 'inf'])
def test_logits_that_are_no_numbers_give_what_the_reference_gives(bad: str) -> None:
    given = make()
    given.logits[0, 0, 0, 0, 0] = float(bad)
    given.logits[0, 1, 0] = -float('inf')
    given.logits[0, 2, 0, 0, 0] = -float('inf')  # one that weighs nothing
    torch.testing.assert_close(attend(given, 'native'), attend(given, 'torch'), equal_nan=True)


@pytest.mark.parametrize('count', [2, 3, 7])
def test_the_same_bits_by_any_threads_up_to_the_heads(count: int, set_threads: Any, monkeypatch: Any) -> None:
    """By more than heads twice, and by threads that are started, as for sanitizers."""
    given = make(queries=300, heads=3, dim=32, points=4)
    found = []
    for number, own in ((count if count > 3 else 1, False), (count, False), (count, True)):
        set_threads(number)
        monkeypatch.setattr(library, 'OWN_THREADS', own)
        found.append(solved(given, 'native'))
    assert all(torch.equal(other[name], value) for name, value in found[0].items() for other in found[1:])


def test_what_the_kernel_does_not_take_is_refused() -> None:
    given = make()
    with pytest.raises(ValueError, match=r'takes float32, float64, bfloat16 and float16, got torch.float8'):
        attend(given._replace(logits=given.logits.to(torch.float8_e4m3fn), gate=None), 'native')
    one = torch.zeros(1, 1, 1, 1, 1)
    at, shapes = one[..., None].expand(*one.shape, 2), torch.tensor([(2**15, 2**15)])
    with pytest.raises(ValueError, match=r'up to 2\^30 tokens an image, got 1073741824'):
        attend(Samples(one[0].expand(1, 2**30, 1, 1), shapes, torch.tensor([0]), at, one), 'native')

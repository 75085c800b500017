"""Sampling on a CPU, in chunks."""

from __future__ import annotations

import pytest
from conftest import assert_same, values_and_gradients
from helpers.sampler_inputs import make_inputs

from mmgate.ops import ms_deform_attn
from mmgate.ops.ms_deform_attn import cpu


@pytest.mark.parametrize('chunk', [16, 1 << 20], ids=['many_chunks', 'one_chunk'])
def test_sampling_in_chunks_is_the_whole(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    monkeypatch.setattr(cpu, 'CHUNK', chunk)
    inputs = make_inputs('two_levels', gate=(2, 2, 1))
    expected = values_and_gradients(lambda *x: ms_deform_attn(*x, backend='torch'), inputs, (0, 3, 4, 5))
    actual = values_and_gradients(lambda *x: ms_deform_attn(*x, backend='cpu'), inputs, (0, 3, 4, 5))
    assert_same(actual, expected, rtol=1e-9, atol=1e-10)

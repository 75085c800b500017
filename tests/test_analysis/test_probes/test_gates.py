"""Gates over a model: what their maps are, and that an identity's is 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from helpers.gated_layers import HEADS, PLUG, SDPA, TOKENS, gated
from torch import nn

from mmgate.analysis.figures.gates import _apart
from mmgate.analysis.probes.gates import gate_statistics, mean_maps

# options of the gate, what its map is of, the map's shape for two layers, and the gate that changes nothing
GATES: dict[str, tuple[dict[str, Any], str, tuple[int, int], int | None]] = {
    'plug': (PLUG, 'pairs', (TOKENS, TOKENS), 0),
    'plug_without_residual': (dict(PLUG, residual=False, activation='none'), 'pairs', (TOKENS, TOKENS), 1),
    'sdpa': (SDPA, 'heads', (2, HEADS), 1),
    'sdpa_additive': (dict(SDPA, form='additive'), 'heads', (2, HEADS), 0),
    'differential_v2_identity': (
        dict(type='DifferentialV2MultiheadAttention', init='identity'),
        'heads',
        (2, HEADS),
        None,
    ),
}


@pytest.mark.parametrize('name', GATES)
def test_a_gate_has_its_mean_map(name: str) -> None:
    options, kind, shape, unchanged = GATES[name]
    gates = gate_statistics(*gated(options))
    assert [gate.path for gate in gates] == ['0', '1'] and {gate.axes for gate in gates} == {kind}
    (found,) = mean_maps(gates)
    assert found.values.shape == shape and found.axes == kind and list(found.gates) == gates
    assert {gate.unchanged for gate in gates} == {unchanged} == {found.unchanged}
    if 'plug' in name:
        assert (found.values == unchanged).all()  # an identity's
    else:
        np.testing.assert_allclose(found.values.mean(1), [gate.statistics.mean for gate in gates], atol=1e-5)


def test_a_map_of_pairs_keeps_each_pair_and_the_class_token_apart() -> None:
    """A self-interaction of -1 stays one, beside a class token of 0.5, in the values, the rows and the picture."""
    model, _ = gated(PLUG)
    model.cls_token = nn.Parameter(torch.zeros(1))
    gate = torch.zeros(1, 1, 1 + TOKENS, 1 + TOKENS)
    gate[..., range(1, 7), range(1, 7)] = -1
    gate[:, :, 0] = 0.5
    for layer in model:
        layer.gate.gml.forward = lambda raw: gate[..., : raw.shape[-1], : raw.shape[-1]]
    images = [torch.randn(1, tokens, 8) for tokens in (1 + TOKENS, 1 + TOKENS, 4)]  # the last has other pairs
    (found,) = mean_maps(gate_statistics(model, images))
    np.testing.assert_array_equal(found.values, gate[0, 0])
    assert found.class_tokens == 1
    rows = {(row['row'], row['column']): row['gate'] for row in found.rows()}
    assert rows['class', 3] == 0.5 and rows[2, 2] == -1 and rows[2, 3] == rows[2, 'class'] == 0
    shown = _apart(found)
    np.testing.assert_array_equal(shown[2:, 2:], gate[0, 0, 1:, 1:])
    assert (shown[0, 2:] == 0.5).all() and np.isnan(shown[1]).all() and np.isnan(shown[:, 1]).all()


def test_a_gate_shared_by_the_heads_has_no_map() -> None:
    gates = gate_statistics(*gated(dict(type='SDPAGatedMultiheadAttention', head_shared='average')))
    assert len(gates) == 2 and mean_maps(gates) == []

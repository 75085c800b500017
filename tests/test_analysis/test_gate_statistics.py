"""Gates over a model: what their maps are, and that an identity's is 0."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import mmgate
from mmgate.analysis.figures.style import layer_labels
from mmgate.analysis.probes.gates import gate_statistics, mean_map

HEADS, TOKENS = 2, 6
PLUG, SDPA = dict(type='PLuGMultiheadAttention'), dict(type='SDPAGatedMultiheadAttention')
# options of the gate, what its map is of, the map's shape for two layers, and the gate that changes nothing
GATES: dict[str, tuple[dict[str, Any], str, tuple[int, int], int | None]] = {
    'plug': (PLUG, 'pairs', (64, 64), 0),
    'plug_per_head': (dict(PLUG, heads='per_head'), 'pairs', (64, 64), 0),
    'plug_without_residual': (dict(PLUG, residual=False, activation='none'), 'pairs', (64, 64), 1),
    'sdpa': (SDPA, 'heads', (2, HEADS), 1),
    'sdpa_headwise': (dict(SDPA, granularity='headwise'), 'heads', (2, HEADS), 1),
    'sdpa_additive': (dict(SDPA, form='additive'), 'heads', (2, HEADS), 0),
    'dgsa': (dict(type='DifferentialGatedMultiheadAttention'), 'heads', (2, HEADS), None),
}


class Model(nn.ModuleList):
    """Two layers of attention that take a batch as detectors do."""

    def test_step(self, batch: Tensor) -> list[Tensor]:
        for layer in self:
            batch = layer(batch, batch, batch)[0]
        return [batch]


def gated(options: dict[str, Any]) -> tuple[nn.Module, list[Tensor]]:
    model = Model(nn.MultiheadAttention(8, HEADS, batch_first=True) for _ in range(2))
    mmgate.swap_attention(model, dict(options, path='*'))
    return model.eval(), [torch.randn(1, TOKENS, 8) for _ in range(3)]


@pytest.mark.parametrize('name', GATES)
def test_maps(name: str) -> None:
    options, kind, shape, unchanged = GATES[name]
    gates = gate_statistics(*gated(options))
    assert [gate.path for gate in gates] == ['0', '1'] and {gate.kind for gate in gates} == {kind}
    found = mean_map(gates)
    assert found is not None and found[0].shape == shape and found[1] == kind
    assert {gate.unchanged for gate in gates} == {unchanged}
    if 'plug' in name:
        assert (found[0] == unchanged).all()  # an identity's
    else:
        np.testing.assert_allclose(found[0].mean(1), [gate.statistics.mean for gate in gates], atol=1e-5)


def test_a_gate_shared_by_the_heads_has_no_map() -> None:
    gates = gate_statistics(*gated(dict(type='SDPAGatedMultiheadAttention', head_shared='average')))
    assert len(gates) == 2 and mean_map(gates) is None


@pytest.mark.parametrize(
    ('paths', 'labels'),
    [
        (['backbone.layers.0.attn', 'backbone.layers.1.attn'], ['0', '1']),
        (['encoder.0.self_attn', 'decoder.0.attn'], ['encoder.0.self_attn', 'decoder.0.attn']),
        (['layers.0.self_attn.attn', 'layers.0.cross_attn.attn'], ['0.self_attn', '0.cross_attn']),
        (['a.attn'], ['a.attn']),
    ],
)  # fmt: skip
def test_labels_leave_out_what_all_share(paths: list[str], labels: list[str]) -> None:
    assert layer_labels(paths) == labels

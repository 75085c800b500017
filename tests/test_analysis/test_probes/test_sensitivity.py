"""Figures of attention before a gate: as worked out by hand, and without a change of the model's output."""

from __future__ import annotations

import math

import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor, nn

import mmgate
from mmgate.analysis.probes.sensitivity import measure_attention, sensitivity


class Model(nn.ModuleDict):
    """Layers that take a batch as detectors do, one after the other."""

    def test_step(self, batch: Tensor) -> list[Tensor]:
        for layer in self.values():
            found = layer(batch, batch, batch) if isinstance(layer, nn.MultiheadAttention) else layer(batch)
            batch = found[0] if isinstance(found, tuple) else found
        return [batch]


def by_hand(layer: nn.MultiheadAttention, x: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return output and weights with the logits multiplied."""
    parts = zip(layer.in_proj_weight.chunk(3), layer.in_proj_bias.chunk(3), strict=True)
    q, k, v = (nn.functional.linear(x, weight, bias) for weight, bias in parts)
    q, k, v = (y.unflatten(-1, (layer.num_heads, -1)).transpose(1, 2) for y in (q, k, v))
    weights = (scale * q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)
    return layer.out_proj((weights @ v).transpose(1, 2).flatten(2)), weights


def test_of_dense_attention_as_by_hand() -> None:
    x = 3 * torch.randn(1, 7, 8)
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.normal_(layer.in_proj_weight)
    plain, weights = by_hand(layer, x, 1)
    moved = [float((by_hand(layer, x, scale)[0] - plain).norm() / plain.norm()) for scale in (0.9, 1.1)]
    (row,) = measure_attention(Model(dict(attn=layer)).eval(), [x]).values()
    assert [row['at_0.9'], row['at_1.1']] == pytest.approx(moved, rel=1e-4) and min(moved) > 0
    entropy = torch.special.entr(weights).sum(-1).mean() / math.log(7)
    assert row['entropy'] == pytest.approx(float(entropy), rel=1e-4)
    assert row['sink'] == pytest.approx(float(weights.mean((1, 2)).max()), rel=1e-4)
    assert row['uniform'] == pytest.approx(1 / 7) and math.isnan(row['rank'])
    assert sensitivity(row) == pytest.approx(sum(moved) / 2, rel=1e-4)


def test_uniform_attention_has_full_entropy_and_does_not_move() -> None:
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    nn.init.zeros_(layer.in_proj_weight[:8])
    nn.init.zeros_(layer.in_proj_bias)
    (row,) = measure_attention(Model(dict(attn=layer)).eval(), [torch.randn(1, 5, 8)] * 2).values()
    assert row['entropy'] == pytest.approx(1) and row['sink'] == pytest.approx(0.2)
    assert row['at_0.9'] == row['at_1.1'] == pytest.approx(0, abs=1e-6)


class Deformable(nn.Module):
    """A layer of deformable attention over one level of 4 x 4."""

    def __init__(self) -> None:
        super().__init__()
        self.attn = MultiScaleDeformableAttention(8, 2, num_levels=1, num_points=4, batch_first=True, dropout=0.0)
        nn.init.normal_(self.attn.attention_weights.weight)

    def forward(self, x: Tensor) -> Tensor:
        shapes = torch.tensor([[4, 4]])
        points = torch.rand(1, 16, 1, 2, generator=torch.Generator().manual_seed(0))
        start = torch.tensor([0])
        return self.attn(x, reference_points=points, spatial_shapes=shapes, level_start_index=start)


def test_of_deformable_attention_without_what_the_host_adds() -> None:
    """The distance is over the attention's own output, so that a large identity changes nothing."""
    model = Model(dict(layer=Deformable())).eval()
    x = torch.randn(1, 16, 8)
    before = model.test_step(x)[0]
    (row,) = measure_attention(model, [x]).values()
    assert torch.allclose(model.test_step(x)[0], before, atol=1e-6)
    assert 0 < row['at_0.9'] < 0.5 and 0 < row['at_1.1'] < 0.5
    assert 0 < row['entropy'] < 1 and row['sink'] > row['uniform'] == 0.25


def test_gated_and_linear_attention_beside_vanilla() -> None:
    """A gated module keeps its gate: its map is read, and its logits are not scaled."""
    model = Model({name: nn.MultiheadAttention(8, 2, batch_first=True) for name in 'ab'})
    mmgate.swap_attention(model, dict(path='a', type='PLuGMultiheadAttention'))
    found = measure_attention(model.eval(), [torch.randn(1, 5, 8)])
    assert list(found) == ['a', 'b']
    assert math.isnan(found['a']['at_0.9']) and sensitivity(found['a']) == -1 < sensitivity(found['b'])
    assert 0 < found['a']['entropy'] <= 1


def test_what_wraps_torchs_module_is_measured_once() -> None:
    model = Model(dict(attn=MultiheadAttention(8, 2, batch_first=True))).eval()
    found = measure_attention(model, [torch.randn(1, 5, 8)])
    assert list(found) == ['attn.attn'] and found['attn.attn']['at_0.9'] > 0

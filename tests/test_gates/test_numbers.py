"""Numbers of every family of attention: 16 bits, saturation, company in a batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from conftest import half_on_cpu
from helpers.families import DEFORMABLE, DENSE, FAMILIES, HEADS, MAP, C, build, call
from torch import Tensor, nn

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


@torch.no_grad()
@pytest.mark.parametrize('name', DEFORMABLE)
def test_padded_levels_do_not_count(name: str) -> None:
    """Levels of 4 x 3 and 2 x 3 beside padding to 6 x 5 and 4 x 5, reference points scaled to it."""
    layer: Any = build(name)
    nn.init.normal_(layer.sampling_offsets.weight, std=0.3)
    query, points = torch.randn(1, 7, C), torch.rand(1, 7, 1, 2).expand(-1, -1, 2, -1)
    maps = [torch.randn(1, 4, 3, C), torch.randn(1, 2, 3, C)]
    padded = [F.pad(x, (0, 0, 0, 2, 0, 2), value=1e3) for x in maps]
    mask = torch.cat([F.pad(torch.zeros(x.shape[:3]), (0, 2, 0, 2), value=1.0).flatten(1) for x in maps], 1).bool()

    def attend(maps: list[Tensor], points: Tensor, **mask: Tensor) -> Tensor:
        shapes = torch.tensor([x.shape[1:3] for x in maps])
        areas = shapes.prod(1)
        value = torch.cat([x.flatten(1, 2) for x in maps], 1)
        starts = dict(spatial_shapes=shapes, level_start_index=areas.cumsum(0) - areas)
        return layer(query, value=value, reference_points=points, **starts, **mask)

    share = torch.tensor([[3 / 5, 4 / 6], [3 / 5, 2 / 4]])  # of width and height
    together = attend(padded, points * share, key_padding_mask=mask)
    torch.testing.assert_close(together, attend(maps, points), rtol=1e-5, atol=1e-5)

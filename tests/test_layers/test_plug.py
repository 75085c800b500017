"""PLuG in deformable attention, with its gate closed and open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import filled, one_graph
from helpers.deformable import SIZES, make_call, pair
from mmcv.ops import MultiScaleDeformableAttention
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch
from torch import Tensor, nn

from mmgate import swap_attention
from mmgate.layers import PLuGMultiScaleDeformableAttention
from mmgate.layers.gml import VARIANTS
from mmgate.layers.plug import GRANULARITIES

GATED = {
    **{f'granularity_{name}': dict(granularity=name) for name in GRANULARITIES},
    **{f'gml_{name}': dict(gml=name) for name in VARIANTS},
    'tanh': dict(activation='tanh'),
    'softsign': dict(activation='softsign'),
    'post_softmax': dict(position='post_softmax'),
    'post_softmax_no_residual': dict(position='post_softmax', residual=False),
    'no_residual': dict(residual=False),
    **{f'no_residual_{name}': dict(residual=False, gml=name) for name in VARIANTS},
}


@pytest.mark.parametrize('options', GATED.values(), ids=GATED)
def test_identity_start_is_exact_and_trains(options: dict) -> None:
    vanilla, gated = pair(**options)
    call = make_call()
    expected = vanilla(**call)
    torch.testing.assert_close(gated(**call), expected, rtol=0, atol=1e-6)

    before = {name: p.detach().clone() for name, p in gated.named_parameters() if name.startswith('gate.')}
    optimizer = torch.optim.SGD(gated.parameters(), lr=0.1)
    for _ in range(2):  # one step moves one factor of a product, from then on the other moves too
        optimizer.zero_grad()
        gated(**call).square().sum().backward()
        optimizer.step()
        first = [name for name in before if not torch.equal(gated.get_parameter(name), before[name])]
        assert first, 'no gate parameter moved'
    assert set(first) == set(before)


def modulated(gml: Any, r: Tensor) -> Tensor:
    """Table 4 and the activations, written out."""
    activation = dict(tanh=torch.tanh, softsign=lambda x: x / (1 + x.abs())).get(gml.activation, lambda x: x)
    if gml.variant == 'none':
        return activation(r)
    first, second = (gml.weight[i] * r + gml.bias[i] for i in (0, -1))
    if gml.variant == 'mlp':
        hidden = (r[..., None] * gml.hidden_weight + gml.hidden_bias).relu()
        first, second = (hidden @ gml.weight.view(2, 4).T + gml.bias).unbind(-1)
    return activation({'single': first, 'sum': first + second}.get(gml.variant, first * second))


@torch.no_grad()
@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
@pytest.mark.parametrize('options', GATED.values(), ids=GATED)
def test_an_open_gate_is_the_equation(options: dict[str, Any], columns: int) -> None:
    """Eq. 8 to 12, Eq. 17 behind the softmax, with the samples that mmcv takes."""
    layer = filled(pair(**options)[1], 0.4).double()
    call = {name: x.double() if x.is_floating_point() else x for name, x in make_call(columns).items()}
    z, value = call['query'] + call['query_pos'], layer.value_proj(call['value'])
    value = value.masked_fill(call['key_padding_mask'][..., None], 0).view(2, 30, 4, 4)
    offsets, logits = layer.sampling_offsets(z).view(2, 5, 4, 2, 3, 2), layer.attention_weights(z).view(2, 5, 4, 2, 3)
    sizes = dict(head=4, level=2, point=3)
    shape = [size if name in options.get('granularity', 'head_level') else 1 for name, size in sizes.items()]
    factor = modulated(layer.gate.gml, layer.gate.gate_proj(z).view(2, 5, *shape)) + options.get('residual', True)
    before = 'position' not in options
    weights = (logits * factor if before else logits).flatten(3).softmax(-1).view_as(logits)
    weights = weights if before else weights * factor
    shapes, at = call['spatial_shapes'], call['reference_points'][:, :, None, :, None]  # (B, Q, 1, L, 1, 2|4)
    # offsets are in pixels of the level, or in halves of the box's sides, shared out among the points
    unit = 1 / shapes.flip(1)[:, None].double() if columns == 2 else at[..., 2:] / 2 / 3
    heads = multi_scale_deformable_attn_pytorch(value, shapes, at[..., :2] + offsets * unit, weights)
    expected = layer.output_proj(heads) + call['identity']
    torch.testing.assert_close(layer(**call), expected, rtol=1e-9, atol=1e-9)


@one_graph
def test_layer_compiles_without_graph_break() -> None:
    _, gated = pair()
    call = make_call()
    compiled = torch.compile(gated, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(**call), gated(**call))


@pytest.mark.parametrize(
    'options, error, message',
    [
        (dict(granularity='points'), ValueError, 'choose one of head_level, head_level_point'),
        (dict(gml='prod'), ValueError, 'choose one of product'),
        (dict(activation='relu'), ValueError, 'choose one of none, tanh'),
        (dict(position='after'), ValueError, 'pre_softmax, post_softmax'),
        (dict(init='zero'), ValueError, 'identity, paper'),
        (dict(backend='cuda'), ValueError, 'choose one of auto'),
        (dict(residual=False, activation='tanh'), ValueError, "use init='paper'"),
        (dict(granularty='head'), TypeError, 'granularty'),
    ],
)
def test_plug_refuses_options_that_do_not_fit(options: dict, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        PLuGMultiScaleDeformableAttention(**SIZES, **options)


def test_a_host_of_any_width_and_a_gate_that_was_loaded() -> None:
    model = nn.ModuleDict(dict(attn=MultiScaleDeformableAttention(88, 8, 2, 3, value_proj_ratio=120.5 / 88)))
    swap_attention(model, dict(path='attn', type='PLuGMultiScaleDeformableAttention'))
    gated: Any = model['attn']
    assert gated.value_proj.out_features == 120
    for layer in (gated, PLuGMultiScaleDeformableAttention(88, 8, 2, 3)):
        layer.load_state_dict(dict(layer.state_dict(), **{'gate.gml.bias': torch.tensor([5.0, 6.0])}))
        layer.init_weights()
        assert layer.gate.gml.bias.tolist() == [5.0, 6.0]


def test_a_checkpoint_of_mmgate_0_1_loads() -> None:
    """Its gate lay beside the projections."""
    saved = filled(PLuGMultiScaleDeformableAttention(**SIZES), 0.5).state_dict()
    ours = PLuGMultiScaleDeformableAttention(**SIZES)
    ours.load_state_dict({key.removeprefix('gate.'): value for key, value in saved.items()})
    assert all(torch.equal(value, saved[key]) for key, value in ours.state_dict().items())

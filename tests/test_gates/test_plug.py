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
from mmgate.gates import MultiScaleDeformableAttention as MultiScaleDeformableAttentionOfOurs
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.gates.gml import VARIANTS
from mmgate.gates.plug import GRANULARITIES

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
    rounding = 1e-6 * expected.abs().max().item()
    torch.testing.assert_close(gated(**call), expected, rtol=0, atol=rounding)

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


COUNTS = (1, 3)
UNEVEN: dict[str, Any] = dict(embed_dims=8, num_heads=2, num_levels=2, num_points=COUNTS, batch_first=True, dropout=0.0)


def uneven_call(columns: int) -> dict[str, Tensor]:
    """Return what a layer of :data:`UNEVEN` is called with, in float64."""
    call = {name: x.double() if x.is_floating_point() else x for name, x in make_call(columns).items()}
    return {name: x[..., :8] if x.shape[-1] == 16 else x for name, x in call.items()}


@torch.no_grad()
@pytest.mark.parametrize('columns', [2, 4], ids=['points', 'boxes'])
@pytest.mark.parametrize('options', GATED.values(), ids=GATED)
def test_a_gate_on_levels_with_different_numbers_of_points_is_the_equation(
    options: dict[str, Any], columns: int
) -> None:
    """The same equations, level by level, with the samples that mmcv takes."""
    layer = filled(PLuGMultiScaleDeformableAttention(**UNEVEN, **options), 0.4).double()
    call = uneven_call(columns)
    z, value = call['query'] + call['query_pos'], layer.value_proj(call['value'])
    value = value.masked_fill(call['key_padding_mask'][..., None], 0).view(2, 30, 2, 4)
    offsets = layer.sampling_offsets(z).view(2, 5, 2, 4, 2).split(COUNTS, 3)
    logits = layer.attention_weights(z).view(2, 5, 2, 4).split(COUNTS, 3)
    granularity = options.get('granularity', 'head_level')
    raw = layer.gate.gate_proj(z).view(2, 5, 2 if 'head' in granularity else 1, -1)
    factor = modulated(layer.gate.gml, raw) + options.get('residual', True)
    kinds = {
        'point': lambda: factor.split(COUNTS, 3),
        'level': lambda: factor.split(1, 3),
        'head': lambda: [factor] * 2,
    }
    factors = kinds[granularity.split('_')[-1]]()
    assert (
        layer.gate.gate_proj.out_features == raw.shape[2] * dict(point=4, level=2, head=1)[granularity.split('_')[-1]]
    )
    before = 'position' not in options
    gated = [a * f if before else a for a, f in zip(logits, factors, strict=True)]
    weights = torch.cat(gated, 3).softmax(-1).split(COUNTS, 3)
    heads: Any = 0
    for level, shape in enumerate(call['spatial_shapes']):
        of_level = weights[level] if before else weights[level] * factors[level]
        at = call['reference_points'][:, :, None, level, None]  # (B, Q, 1, 1, 2|4)
        unit = 1 / shape.flip(0).double() if columns == 2 else at[..., 2:] / 2 / COUNTS[level]
        places = (at[..., :2] + offsets[level] * unit)[:, :, :, None]
        tokens = value[:, call['level_start_index'][level] :][:, : shape.prod()]
        heads = heads + multi_scale_deformable_attn_pytorch(tokens, shape[None], places, of_level[:, :, :, None])
    expected = layer.output_proj(heads) + call['identity']
    torch.testing.assert_close(layer(**call), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize('gml', VARIANTS)
@pytest.mark.parametrize('granularity', GRANULARITIES)
def test_gates_on_levels_with_different_numbers_of_points_pass_gradcheck(granularity: str, gml: str) -> None:
    """By the reference; that every backend has its gradients is a test of the operator."""
    options = dict(granularity=granularity, gml=gml, backend='torch')
    layer = filled(PLuGMultiScaleDeformableAttention(**UNEVEN, **options), 0.4).double()
    call = uneven_call(4)
    tensors = [call.pop('query')[:, :2].clone(), *layer.gate.parameters()]
    for name in ('query_pos', 'identity', 'reference_points'):
        call[name] = call[name][:, :2]

    def attend(query: Tensor, *parameters: Tensor) -> Tensor:
        return layer(query, **call)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in tensors], fast_mode=True)


def test_identity_start_on_levels_with_different_numbers_of_points() -> None:
    """And a step moves the gate, for every option."""
    vanilla: Any = filled(MultiScaleDeformableAttentionOfOurs(**UNEVEN), 0.3)
    call = {name: x.float() if x.is_floating_point() else x for name, x in uneven_call(4).items()}
    expected = vanilla(**call)
    rounding = 1e-6 * expected.abs().max().item()
    for name, options in GATED.items():
        gated: Any = PLuGMultiScaleDeformableAttention(**UNEVEN, **options)
        gated.load_state_dict(vanilla.state_dict(), strict=False)
        torch.testing.assert_close(gated(**call), expected, rtol=0, atol=rounding, msg=name)
        gated(**call).square().sum().backward()
        assert any(p.grad.abs().sum() > 0 for p in gated.gate.parameters() if p.grad is not None), name


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

"""PLuG in deformable attention, with its gate closed and open, even and uneven; and the starts of all its gates."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import filled, one_graph
from helpers.deformable import SIZES, make_call, pair
from helpers.starts import C, H, assert_uniform, deformable, dense, initialised
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch
from torch import Tensor

from mmgate.gates import MultiScaleDeformableAttention, PLuGMultiheadAttention, PLuGMultiScaleDeformableAttention
from mmgate.gates.plug import GRANULARITIES, VARIANTS, GatingModulation

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
every_option = pytest.mark.parametrize('options', GATED.values(), ids=GATED)
every_count = pytest.mark.parametrize('counts', [(3, 3), (1, 3)], ids=['even', 'uneven'])


def layer_of(kind: Any, counts: tuple[int, ...], **options: Any) -> Any:
    return kind(**SIZES | dict(num_points=list(counts)), batch_first=True, dropout=0.0, **options)


@every_count
@every_option
def test_identity_start_is_exact_and_trains(options: dict[str, Any], counts: tuple[int, ...]) -> None:
    vanilla = filled(layer_of(MultiScaleDeformableAttention, counts), 0.3)
    gated = layer_of(PLuGMultiScaleDeformableAttention, counts, **options)
    gated.load_state_dict(vanilla.state_dict(), strict=False)
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
@every_count
@every_option
def test_an_open_gate_is_the_equation(options: dict[str, Any], counts: tuple[int, ...], columns: int) -> None:
    """Eq. 8 to 12, Eq. 17 behind the softmax, level by level, with the samples that mmcv takes."""
    layer = filled(layer_of(PLuGMultiScaleDeformableAttention, counts, **options), 0.4).double()
    call = {name: x.double() if x.is_floating_point() else x for name, x in make_call(columns).items()}
    z, value = call['query'] + call['query_pos'], layer.value_proj(call['value'])
    value = value.masked_fill(call['key_padding_mask'][..., None], 0).view(2, 30, 4, 4)
    offsets = layer.sampling_offsets(z).view(2, 5, 4, -1, 2).split(counts, 3)
    logits = layer.attention_weights(z).view(2, 5, 4, -1).split(counts, 3)
    of_heads, of_levels, of_points = GRANULARITIES[options.get('granularity', 'head_level')]
    raw = layer.gate.gate_proj(z).view(2, 5, 4 if of_heads else 1, -1)
    assert raw.shape[3] == (sum(counts) if of_points else 2 if of_levels else 1)
    factor = modulated(layer.gate.gml, raw) + options.get('residual', True)
    factors = factor.split(counts if of_points else 1, 3) if of_levels else [factor] * 2
    before = 'position' not in options
    gated = [a * f if before else a for a, f in zip(logits, factors, strict=True)]
    weights = torch.cat(gated, 3).softmax(-1).split(counts, 3)
    heads: Any = 0
    for level, shape in enumerate(call['spatial_shapes']):
        of_level = weights[level] if before else weights[level] * factors[level]
        at = call['reference_points'][:, :, None, level, None]  # (B, Q, 1, 1, 2|4)
        # offsets are in pixels of the level, or in halves of the box's sides, shared out among the points
        unit = 1 / shape.flip(0).double() if columns == 2 else at[..., 2:] / 2 / counts[level]
        places = (at[..., :2] + offsets[level] * unit)[:, :, :, None]
        tokens = value[:, call['level_start_index'][level] :][:, : shape.prod()]
        heads = heads + multi_scale_deformable_attn_pytorch(tokens, shape[None], places, of_level[:, :, :, None])
    expected = layer.output_proj(heads) + call['identity']
    torch.testing.assert_close(layer(**call), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    'granularity, gml',
    [*((name, 'product') for name in GRANULARITIES), *(('head_level_point', name) for name in VARIANTS[1:])],
)
def test_gates_on_levels_with_different_numbers_of_points_pass_gradcheck(granularity: str, gml: str) -> None:
    """By the reference; that every backend has its gradients is a test of the operator."""
    options = dict(granularity=granularity, gml=gml, backend='torch')
    layer = filled(layer_of(PLuGMultiScaleDeformableAttention, (1, 3), **options), 0.4).double()
    call = {name: x.double() if x.is_floating_point() else x for name, x in make_call(4).items()}
    tensors = [call.pop('query')[:, :2].clone(), *layer.gate.parameters()]
    for name in ('query_pos', 'identity', 'reference_points'):
        call[name] = call[name][:, :2]

    def attend(query: Tensor, *parameters: Tensor) -> Tensor:
        return layer(query, **call)

    assert torch.autograd.gradcheck(attend, [x.requires_grad_() for x in tensors], fast_mode=True)


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


def test_a_layer_keeps_a_gate_that_was_loaded() -> None:
    layer: Any = PLuGMultiScaleDeformableAttention(88, 8, 2, 3)
    layer.load_state_dict(dict(layer.state_dict(), **{'gate.gml.bias': torch.tensor([5.0, 6.0])}))
    layer.init_weights()
    assert layer.gate.gml.bias.tolist() == [5.0, 6.0]


@pytest.mark.parametrize(
    'variant, bounds',
    {
        'product': {'weight': 2**0.5, 'bias': 1},
        'sum': {'weight': 2**0.5, 'bias': 1},
        'single': {'weight': 3**0.5, 'bias': 1},
        'mlp': {'hidden_weight': 1.2**0.5, 'hidden_bias': 1, 'weight': 1, 'bias': 0.5},
        'none': {},
    }.items(),
    ids=VARIANTS[:2] + ('single', 'mlp', 'none'),
)
def test_paper_start_of_the_gml(variant: str, bounds: dict[str, float]) -> None:
    starts = [GatingModulation(variant, init='paper').state_dict() for _ in range(200)]
    assert all(set(start) == set(bounds) for start in starts)
    for name, bound in bounds.items():
        assert_uniform(torch.stack([start[name] for start in starts]), bound)


@pytest.mark.parametrize('variant', VARIANTS)
def test_start_of_vision_transformers(variant: str) -> None:
    """Every weight normal of deviation 0.02, every bias 0; whatever the host draws afterwards, and without a swap."""
    rules = [
        dict(type='PLuGMultiheadAttention', gml=variant, init='vit'),
        dict(type='PLuGMultiScaleDeformableAttention', gml=variant, init='vit', granularity='head_level_point'),
    ]
    layers = initialised('mask2former', (dense, rules[0]), (deformable, rules[1])).layers
    for layer in (*layers, PLuGMultiheadAttention(C, H, gml=variant, init='vit').attn):
        for name, parameter in layer.named_parameters():
            if name.startswith('g') and name.endswith('bias'):
                assert not parameter.any(), name
            elif name.startswith('g'):
                assert 0 < parameter.abs().max() < 0.1, name
                assert parameter.numel() < 200 or 0.018 < parameter.std() < 0.022, name


@pytest.mark.parametrize('init, narrow', [(b'vit', True), (b'paper', False)])
def test_a_start_is_known_by_its_letters(init: bytes, narrow: bool) -> None:
    """A name that was read from a file is another object than the one in the code."""
    gml = GatingModulation(init=str(init, 'ascii'))
    gml.reset_parameters()
    assert gml.bias.eq(0).all() == narrow

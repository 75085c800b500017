"""The deformable attentions against mmcv's: the one that gates nothing, and PLuG with its gate closed and open."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import assert_same, filled, one_graph, values_and_gradients
from mmcv.ops import MultiScaleDeformableAttention
from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch
from mmengine.registry import MODELS as ROOT
from torch import Tensor, nn

from mmgate import layers, swap_attention
from mmgate.layers import PLuGMultiScaleDeformableAttention
from mmgate.layers.base.deformable import DeformableGate
from mmgate.layers.gml import VARIANTS
from mmgate.layers.plug import GRANULARITIES
from mmgate.registry import MODELS

SIZES = dict(embed_dims=16, num_heads=4, num_levels=2, num_points=3)
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


def make_call(columns: int = 2, batch_first: bool = True) -> dict[str, Tensor]:
    tokens = dict(query=5, value=30, query_pos=5, identity=5)
    call = {name: torch.randn(2, count, 16) for name, count in tokens.items()}
    return dict(
        **{name: x if batch_first else x.transpose(0, 1) for name, x in call.items()},
        key_padding_mask=torch.arange(30) >= torch.tensor([[30], [26]]),
        reference_points=torch.rand(2, 5, 2, columns),
        spatial_shapes=torch.tensor([(4, 6), (2, 3)]),
        level_start_index=torch.tensor([0, 24]),
    )


def pair(kind: Any = PLuGMultiScaleDeformableAttention, host: Any = (), **options: Any) -> tuple[Any, Any]:
    """Return mmcv's attention with ``host``'s arguments, and ours with its weights, loaded from its state dict."""
    common: dict[str, Any] = dict(batch_first=True, dropout=0.0) | dict(host)
    vanilla, ours = MultiScaleDeformableAttention(**SIZES, **common), kind(**SIZES, **common, **options)
    keys = ours.load_state_dict(filled(vanilla, 0.3).state_dict(), strict=False)
    assert not keys.unexpected_keys
    assert all(key.startswith(('gate.gate_proj.', 'gate.gml.')) for key in keys.missing_keys)
    return vanilla, ours


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


def test_defaults_of_value_and_identity() -> None:
    vanilla, gated = pair()
    call = {k: v for k, v in make_call().items() if k not in ('identity', 'value', 'query_pos', 'key_padding_mask')}
    call['query'] = torch.randn(2, 30, 16)
    call['reference_points'] = torch.rand(2, 30, 2, 2)
    torch.testing.assert_close(gated(**call), vanilla(**call), rtol=0, atol=1e-6)


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


def test_the_arguments_of_mmcv_are_taken() -> None:
    """The constructor's, and the deprecated name of ``identity``."""
    host = dict(im2col_step=32, norm_cfg=None, init_cfg=None, value_proj_ratio=0.5)
    vanilla, gated = pair(host=host)
    call = make_call()
    call['residual'] = call.pop('identity')
    with pytest.warns(DeprecationWarning, match='residual'):
        output = gated(**call)
    torch.testing.assert_close(output, vanilla(**call), rtol=0, atol=1e-6)


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


@pytest.mark.parametrize('missing', ['reference_points', 'spatial_shapes', 'level_start_index'])
def test_missing_arguments_are_named(missing: str) -> None:
    with pytest.raises(ValueError, match='reference_points, spatial_shapes and level_start_index are needed'):
        PLuGMultiScaleDeformableAttention(**SIZES)(**make_call() | {missing: None})


@pytest.mark.parametrize('kind', [layers.MultiScaleDeformableAttention, PLuGMultiScaleDeformableAttention])
@pytest.mark.parametrize('batch_first', [True, False])
@pytest.mark.parametrize('columns', [2, 4])
@pytest.mark.parametrize('ratio', [1.0, 0.5])
def test_outputs_and_gradients_are_mmcvs(batch_first: bool, columns: int, ratio: float, kind: type) -> None:
    attentions = pair(kind, host=dict(batch_first=batch_first, value_proj_ratio=ratio))
    call = make_call(columns, batch_first)
    names = ('query', 'query_pos', 'value', 'identity', 'reference_points')
    tensors = [call.pop(name) for name in names]

    def run(attention: nn.Module) -> dict[str, Tensor]:
        def attend(*x: Tensor) -> Tensor:
            return attention(**dict(zip(names, x, strict=True)), **call)

        return values_and_gradients(attend, tensors, range(len(names)))

    expected, actual = (run(attention) for attention in attentions)
    assert_same(actual, expected, rtol=1e-5, atol=1e-5)


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


def test_the_name_means_ours_in_a_rule_and_mmcvs_elsewhere() -> None:
    assert MODELS.get('MultiScaleDeformableAttention') is layers.MultiScaleDeformableAttention
    assert ROOT.get('mmgate.MultiScaleDeformableAttention') is layers.MultiScaleDeformableAttention
    assert ROOT.get('MultiScaleDeformableAttention') is MultiScaleDeformableAttention
    vanilla = MultiScaleDeformableAttention(**SIZES)
    names = list(vanilla.state_dict())
    model = nn.ModuleDict(dict(attn=vanilla))
    swap_attention(model, dict(path='attn', type='mmgate.MultiScaleDeformableAttention', backend='torch'))
    ours: Any = model['attn']
    assert ours is vanilla and type(ours.gate) is DeformableGate and ours.gate.backend == 'torch'
    assert list(ours.state_dict()) == names
    with pytest.raises(ValueError, match='backend'):
        layers.MultiScaleDeformableAttention(32, 4, 2, 3, backend='gpu')
    with pytest.raises(TypeError, match='embed_dim'):
        layers.MultiScaleDeformableAttention(embed_dim=32)

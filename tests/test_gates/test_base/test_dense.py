"""The dense gates in torch's and mmcv's MultiheadAttention."""

from __future__ import annotations

from copy import deepcopy
from itertools import cycle, product
from typing import Any

import pytest
import torch
from conftest import filled, one_graph
from helpers.families import DENSE
from helpers.gated import gated_attention
from mmcv.cnn.bricks.transformer import MultiheadAttention
from torch import Tensor, nn

from mmgate import record, restore_attention, swap_attention
from mmgate.gate import Sizes
from mmgate.gates import (
    DGSAGate,
    DifferentialGate,
    DifferentialGatedMultiheadAttention,
    DifferentialV2Gate,
    PLuGGate,
    PLuGMultiheadAttention,
    SDPAGate,
    SDPAGatedMultiheadAttention,
    plug,
)
from mmgate.gates.base.dense import DenseGate

C, H, N, M, B = 16, 4, 5, 7, 2
PLUG = {
    'default': {},
    'per_head': dict(heads='per_head'),
    'ratio': dict(ratio=0.5),
    'sum': dict(gml='sum'),
    'single': dict(gml='single'),
    'mlp': dict(gml='mlp'),
    'softsign': dict(activation='softsign'),
    'hardtanh': dict(activation='hardtanh'),
    'post_softmax': dict(position='post_softmax'),
    'no_residual': dict(residual=False, activation='none'),
}
SDPA = {
    **{
        f'{p}_{g}': dict(position=p, granularity=g)
        for p in ('G1', 'G2', 'G3', 'G4', 'G5')
        for g in ('elementwise', 'headwise')
        if (p, g) != ('G5', 'headwise')  # no heads any more
    },
    'average': dict(head_shared='average'),
    'average_headwise': dict(head_shared='average', granularity='headwise'),
    'projection': dict(head_shared='projection'),
    'projection_headwise': dict(head_shared='projection', granularity='headwise'),
    'additive': dict(form='additive', act='silu'),
    'silu': dict(act='silu'),
    'ns_sigmoid': dict(act='NS-sigmoid'),
    'narrow': dict(gate_channels=3),
    'narrow_G2_headwise': dict(gate_channels=1, position='G2', granularity='headwise'),
    'narrow_G5': dict(gate_channels=C, position='G5'),
}
DGSA = {'query': {}, 'input': dict(residual='input'), 'none': dict(residual='none')}
ALL = {
    **{f'plug_{k}': (PLuGGate, v) for k, v in PLUG.items()},
    'plug_none': (PLuGGate, dict(gml='none', init='paper')),
    'plug_none_vit': (PLuGGate, dict(gml='none', init='vit')),
    **{f'sdpa_{k}': (SDPAGate, v) for k, v in SDPA.items()},
    **{f'dgsa_{k}': (DGSAGate, v) for k, v in DGSA.items()},
    'differential_v2_paper': (DifferentialV2Gate, {}),
    'differential_v2_identity': (DifferentialV2Gate, dict(init='identity', lambda_init=0.3)),
}
# the other gates of the table of families; V1 of the differential transformer is compared with its equation
THERE = {DifferentialGate, *(kind for kind, _ in ALL.values())}
ALL.update({name: (kind, options) for name, (kind, options) in DENSE.items() if kind not in THERE})
PADDING = torch.arange(M) >= torch.tensor([[M], [4]])  # of the second image's keys
IDENTITIES = {
    **{f'plug_{k}': (PLuGGate, v) for k, v in PLUG.items()},
    'sdpa': (SDPAGate, dict(act='silu')),
    'sdpa_narrow': (SDPAGate, dict(act='silu', gate_channels=3)),
    'differential_v2': (DifferentialV2Gate, {}),
    'differential_v2_small': (DifferentialV2Gate, dict(lambda_init=0.01)),
}
MASKS: dict[str, dict[str, Tensor]] = {
    'none': {},
    'padding': dict(key_padding_mask=PADDING),
    'causal': dict(attn_mask=torch.ones(N, M, dtype=torch.bool).triu(1)),
    'both': dict(attn_mask=torch.arange(N)[:, None] < torch.arange(M) - 2, key_padding_mask=PADDING),
    'float': dict(
        attn_mask=torch.linspace(-2, 2, N * M).view(N, M).double(),
        key_padding_mask=torch.linspace(-1, 1, B * M).view(B, M).double(),
    ),
    'per_head': dict(attn_mask=(torch.arange(B * H * N * M) % 5 == 1).view(B * H, N, M), key_padding_mask=PADDING),
    # together they hide all keys of one query of the second image
    'dead_row': dict(attn_mask=(torch.arange(N)[:, None] == 2) & (torch.arange(M) < 4), key_padding_mask=PADDING),
}
LIVE = [mask for mask in MASKS if mask != 'dead_row']


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, N, C, dtype=dtype), torch.randn(B, M, C, dtype=dtype), torch.randn(B, M, C, dtype=dtype)


def build(name: str, **extra) -> nn.MultiheadAttention:
    cls, options = ALL[name]
    return filled(gated_attention(cls, C, H, batch_first=True, **options, **extra).double(), 0.4)


# a row for each gate; the masks, with either kind of weights, take turns
STARTS = [(name, *call) for name, call in zip(IDENTITIES, cycle(product(LIVE, [True, False])), strict=False)]


@pytest.mark.parametrize('name, mask, average', STARTS)
def test_identity_start_is_torchs_attention(name: str, mask: str, average: bool) -> None:
    """In outputs and weights, whatever the gate's projections are; and what makes the gate has a gradient."""
    kind, options = IDENTITIES[name]
    vanilla = filled(nn.MultiheadAttention(C, H, batch_first=True).double(), 0.4)
    gated = gated_attention(kind, C, H, batch_first=True, init='identity', dtype=torch.float64, **options)
    keys = gated.load_state_dict(vanilla.state_dict(), strict=False)
    assert not keys.unexpected_keys and all(key.startswith('gate.') for key in keys.missing_keys)
    for name, parameter in gated.named_parameters():
        if name.startswith(('gate.gate_q_proj', 'gate.gate_k_proj')):
            nn.init.normal_(parameter)  # as a detector's own initialisation may
    x, call = inputs(), dict(need_weights=True, average_attn_weights=average, **MASKS[mask])
    actual, expected = gated(*x, **call), vanilla(*x, **call)
    assert actual[1].shape == ((B, N, M) if average else (B, H, N, M))
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    assert gated(*x, need_weights=False, **MASKS[mask])[1] is None
    actual[0].square().sum().backward()
    of_gate = [p for n, p in gated.named_parameters() if n.startswith(('gate.gml', 'gate.gate_w', 'gate.lambda'))]
    assert any(parameter.grad.abs().max() > 0 for parameter in of_gate)


def of_torch(**options: Any) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Return torch's module and the same with a gate that starts as the identity, by a rule."""
    vanilla = filled(nn.MultiheadAttention(C, H, **options).double(), 0.4)
    model = nn.Sequential(deepcopy(vanilla))
    swap_attention(model, dict(path='0', type='PLuGMultiheadAttention'))
    return vanilla, model[0]


CALLS: dict[str, dict[str, Any]] = {
    'default': {},
    'heads': dict(average_attn_weights=False),
    'none': dict(need_weights=False),
    'masks': dict(attn_mask=MASKS['causal']['attn_mask'], key_padding_mask=PADDING[1]),
    'mask of heads': dict(attn_mask=MASKS['per_head']['attn_mask'][:H], average_attn_weights=False),
}


@pytest.mark.parametrize('batched', [True, False])
@pytest.mark.parametrize('call', CALLS)
@pytest.mark.parametrize('sizes', [dict(batch_first=True), dict(kdim=C // 2, vdim=C // 4)], ids=['first', 'second'])
def test_torchs_module_called_as_in_torch(call: str, batched: bool, sizes: dict[str, Any]) -> None:
    """With weights unless they are declined, with one sequence without a batch, and with its masks."""
    vanilla, gated = of_torch(**sizes)
    given = dict(CALLS[call])
    key = torch.randn(M, vanilla.kdim).double()
    x = [torch.randn(N, C).double(), key, key[:, : vanilla.vdim]]
    if batched:
        x = [one.unsqueeze(0 if vanilla.batch_first else 1) for one in x]
        given.update({'key_padding_mask': given['key_padding_mask'][None]} if 'key_padding_mask' in given else {})
    torch.testing.assert_close(gated(*x, **given), vanilla(*x, **given))


def test_mmcvs_attention_asks_for_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    """They would be a second map of all pairs, whose output it drops."""
    monkeypatch.setattr(plug, 'attention_map', lambda *_, **__: pytest.fail('weights are computed'))
    model = nn.ModuleDict(dict(host=MultiheadAttention(C, H)))
    swap_attention(model, dict(path='host', type='PLuGMultiheadAttention'))
    for attention in (model['host'], PLuGMultiheadAttention(C, H)):
        assert attention(torch.randn(N, B, C)).shape == (N, B, C)


def test_a_gate_without_a_map_has_no_weights() -> None:
    class Plain(DenseGate):
        def reset(self) -> None:
            pass

        def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, bias: Tensor | None) -> Tensor:
            return nn.functional.scaled_dot_product_attention(query, key, value, bias)

    model = nn.Sequential(nn.MultiheadAttention(C, H))
    swap_attention(model, dict(path='0', type=Plain))
    x = torch.randn(N, B, C)
    output, weights = model[0](x, x, x, need_weights=True)
    assert output.shape == x.shape and weights is None


@pytest.mark.parametrize('name, mask', zip(ALL, cycle(MASKS), strict=False))
def test_gradcheck(name: str, mask: str) -> None:
    module = build(name)
    x = [t.requires_grad_() for t in inputs()]
    masks = MASKS[mask]
    output = module(*x, **masks)[0]
    assert torch.isfinite(output).all()
    wanted = [*x, *module.parameters()]
    assert torch.autograd.gradcheck(lambda *_: module(*x, **masks)[0], wanted, fast_mode=True)


@pytest.mark.parametrize('name', ALL)
def test_fully_masked_row_is_zero_and_has_no_nan_gradient(name: str) -> None:
    module = build(name)
    if isinstance(module.gate, DGSAGate):
        module.gate.residual = 'none'
    nn.init.zeros_(module.out_proj.bias)
    x = [t.requires_grad_() for t in inputs()]
    output, weights = module(*x, **MASKS['dead_row'], need_weights=True)
    assert torch.count_nonzero(output[1, 2]) == 0 and torch.count_nonzero(weights[1, 2]) == 0
    assert output[0, 2].any() and weights[0, 2].any() and output[1, 3].any()
    output.square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in [*x, *module.parameters()])


@pytest.mark.parametrize('name', ALL)
def test_weights_are_those_of_the_output(name: str) -> None:
    """The heads of a token depend on the values as the sum by its weights does, whatever the gate does to that sum."""
    module = build(name)
    x, bias = inputs(), torch.randn(N, M, dtype=torch.float64)
    query, key, value = module.project(x)
    _, weights = module(*x, need_weights=True, average_attn_weights=False, attn_mask=bias)

    def by_value(heads: Tensor) -> Tensor:
        return torch.stack([torch.autograd.grad(heads[:, :, n].sum(), value, retain_graph=True)[0] for n in range(N)])

    with record(module, 'values', graph=True) as recording:
        heads = module.gate.attend(query, key, value, x, bias)
    actual = by_value(heads)  # (N, B, H, M, d)
    expected = by_value(weights @ recording['']['values'].last)
    assert actual.abs().amax(-2).min() > 0
    torch.testing.assert_close(actual * expected.sum(-2, keepdim=True), expected * actual.sum(-2, keepdim=True))


@pytest.mark.parametrize('batch_first', [True, False], ids=['batch_first', 'sequence_first'])
def test_drop_in_for_mmcv(batch_first: bool) -> None:
    """Positions, identity and masks are in the equations of the gates, too."""
    vanilla = filled(MultiheadAttention(C, H, batch_first=batch_first), 0.4).eval()
    gated = PLuGMultiheadAttention(C, H, batch_first=batch_first)
    assert not gated.load_state_dict(vanilla.state_dict(), strict=False).unexpected_keys
    query, key, value = (x if batch_first else x.transpose(0, 1) for x in inputs(torch.float32))
    call = dict(query_pos=torch.randn_like(query), key_pos=torch.randn_like(key), identity=torch.randn_like(query))
    for given in ((query, key, value), (query,)):
        expected = vanilla(*given, **(dict(call, **MASKS['padding']) if len(given) > 1 else {}))
        found = gated(*given, **(dict(call, **MASKS['padding']) if len(given) > 1 else {}))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-6 * expected.abs().max().item())


def test_torchs_fast_paths_do_not_skip_the_gate() -> None:
    """An encoder in eval mode would read the weights itself, and hand on nested tensors where tokens are padding."""
    encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(C, H, 8, batch_first=True, dropout=0.0), 2)
    swap_attention(encoder, dict(path='layers.*.self_attn', type='PLuGMultiheadAttention'))
    x, padding = torch.randn(B, N, C), torch.zeros(B, N, dtype=torch.bool)
    padding[0, -1] = True
    filled(encoder, 0.4)
    for mask in (None, padding):
        expected = encoder.train()(x, src_key_padding_mask=mask)
        with torch.inference_mode():
            actual = encoder.eval()(x, src_key_padding_mask=mask)
        torch.testing.assert_close(actual[~padding], expected[~padding])


@pytest.mark.parametrize('enabled', [True, False])
def test_torch_encoder_packs_padded_sequences_again_without_gates(enabled: bool) -> None:
    """After the last of them is removed, if it did before."""
    layer = nn.TransformerEncoderLayer(C, H, 8, batch_first=True, dropout=0.0)
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=enabled)
    names = {name for name in vars(encoder)}
    for number in range(2):
        swap_attention(encoder, dict(path=f'layers.{number}.self_attn', type='PLuGMultiheadAttention'))
        assert not encoder.use_nested_tensor
    restore_attention(encoder)
    assert encoder.use_nested_tensor == enabled and vars(encoder).keys() == names


@pytest.mark.parametrize('sizes', [{}, dict(kdim=C // 2, vdim=C // 2)], ids=['one projection', 'three'])
def test_torchs_start_can_be_drawn_anew(sizes: dict[str, int]) -> None:
    module = gated_attention(PLuGGate, C, H, **sizes)
    before = module.out_proj.bias, module.gate.gate_q_proj.weight.clone()
    nn.init.ones_(before[0])
    module._reset_parameters()
    assert not module.out_proj.bias.any() and torch.equal(module.gate.gate_q_proj.weight, before[1])


@one_graph
@pytest.mark.parametrize('name', ['plug_default', 'sdpa_G1_elementwise', 'dgsa_query', 'differential_v2_identity'])
def test_compiles_without_graph_break(name: str) -> None:
    torch._dynamo.reset()  # the forwards of all gated classes have one code, of which Dynamo compiles eight variants
    module, x = build(name), inputs()
    compiled = torch.compile(module, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(*x)[0], module(*x)[0])


def test_heads_that_share_an_average_add_as_much_as_without() -> None:
    """The paper prints 201 M for both, and 1.6 for one score a head: 24 layers of 2048 channels, 32 heads of 128."""

    def added(**options: str) -> float:
        with torch.device('meta'):
            gate = SDPAGate(Sizes(4096, 32, inputs=(2048, 2048, 2048)), **options)
        return round(24 * gate.gate_weight.numel() / 1e6, 2)

    assert added() == added(head_shared='average') == 201.33
    assert added(granularity='headwise') == 1.57
    assert added(head_shared='projection') == 6.29


def test_mmcv_arguments_reach_the_core() -> None:
    """mmcv hands what it does not know to torch's module; all of it is taken or refused."""
    for cls in (PLuGMultiheadAttention, SDPAGatedMultiheadAttention, DifferentialGatedMultiheadAttention):
        layer = cls(C, H, kdim=6, vdim=10, bias=False, device='meta', dtype=torch.float64)
        assert (layer.attn.kdim, layer.attn.vdim, layer.attn.in_proj_bias) == (6, 10, None)
        assert all(p.device.type == 'meta' and p.dtype is torch.float64 for p in layer.parameters())
        with pytest.warns(DeprecationWarning, match='dropout'):
            layer = cls(C, H, dropout=0.3)
        assert layer.attn.dropout == 0.3 and layer.dropout_layer.p == 0.3
        assert cls(C, H).dropout_layer.p == 0.0, 'the deprecated argument stays with its own layer'
        with pytest.raises(TypeError, match='bais'):
            cls(C, H, bais=False)


def test_bad_sizes_and_masks() -> None:
    with pytest.raises(ValueError, match='not a multiple'):
        PLuGGate(Sizes(10, 4))
    with pytest.raises(ValueError, match='must be even'):
        gated_attention(DGSAGate, 12, 4)
    module, x = build('plug_default'), inputs()
    with pytest.raises(ValueError, match='key_padding_mask must be'):
        module(*x, key_padding_mask=torch.zeros(3, M, dtype=torch.bool))
    with pytest.raises(ValueError, match=r'must fit \(B, H, N, M\) = .*, got \(3, 7\)'):
        module(*x, attn_mask=torch.zeros(3, 7))
    alone = x[1][0]  # one sequence
    for wrong, said in (
        ((alone, x[1], alone), 'key must be'),
        ((alone, alone, alone[:-1]), 'M'),
        ((alone[:, 1:], alone, alone), 'query must be'),
    ):
        with pytest.raises(ValueError, match=said):
            module(*wrong)
    with pytest.raises(ValueError, match='key_padding_mask must be'):
        module(alone, alone, alone, key_padding_mask=torch.zeros(1, M, dtype=torch.bool))


def test_rows_of_the_differential_transformers_map_sum_to_what_lambda_leaves() -> None:
    module = DifferentialGate(Sizes(C, H), lambda_init=0.3, learnable=False)
    query, key = torch.randn(2, 2, H, N, C // H)
    with record(module, 'attention') as recording:
        module.attend(query, key, key, (query, key, key), None)
    sums = recording['']['attention'].last.sum(-1)
    torch.testing.assert_close(sums, torch.full_like(sums, 0.7))

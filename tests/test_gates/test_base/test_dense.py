"""The dense gates in torch's and mmcv's MultiheadAttention."""

from __future__ import annotations

from copy import deepcopy
from itertools import cycle, product
from typing import Any

import pytest
import torch
from conftest import filled
from helpers.families import DENSE, HEADS, IDENTITIES, C
from helpers.gated import gated_attention
from torch import Tensor, nn

from mmgate import record, swap_attention
from mmgate.gate import Sizes
from mmgate.gates import (
    DGSAGate,
    DifferentialGate,
    PLuGGate,
    PLuGMultiheadAttention,
    SDPAGate,
)

H, N, M, B = HEADS, 5, 7, 2
PADDING = torch.arange(M) >= torch.tensor([[M], [4]])  # of the second image's keys
MASKS: dict[str, dict[str, Tensor]] = {
    'none': {},
    'padding': dict(key_padding_mask=PADDING),
    'causal': dict(attn_mask=torch.ones(N, M, dtype=torch.bool).triu(1)),
    'both': dict(attn_mask=torch.arange(N)[:, None] < torch.arange(M) - 2, key_padding_mask=PADDING),
    'float': dict(
        attn_mask=torch.linspace(-2, 2, N * M).view(N, M).double(),
        key_padding_mask=torch.linspace(-1, 1, B * M).view(B, M).double(),
    ),
    'per_head': dict(attn_mask=(torch.arange(B * H * N * M) % 6 == 1).view(B * H, N, M), key_padding_mask=PADDING),
    # together they hide all keys of one query of the second image
    'dead_row': dict(attn_mask=(torch.arange(N)[:, None] == 2) & (torch.arange(M) < 4), key_padding_mask=PADDING),
}


def inputs() -> list[Tensor]:
    return [torch.randn(B, count, C).double() for count in (N, M, M)]


def build(name: str) -> Any:
    cls, options = DENSE[name]
    return filled(gated_attention(cls, C, H, batch_first=True, **options).double(), 0.4)


CALLS: dict[str, dict[str, Any]] = {
    'default': {},
    'heads': dict(average_attn_weights=False),
    'none': dict(need_weights=False),
    **{name: MASKS[name] for name in ('causal', 'both', 'float')},
    'per_head': dict(MASKS['per_head'], average_attn_weights=False),
}
WIDTHS = [dict(batch_first=True), dict(kdim=C // 2, vdim=C // 4)]
# each gate in each call; batches and widths take turns
STARTS = [(*pair, *turn) for pair, turn in zip(product(IDENTITIES, CALLS), cycle(product([True, False], WIDTHS)))]


@pytest.mark.parametrize('name, call, batched, sizes', STARTS, ids=str)
def test_identity_start_is_torchs_attention(name: str, call: str, batched: bool, sizes: dict[str, Any]) -> None:
    """With weights unless they are declined, with one sequence without a batch, masks, keys and values of other widths.

    So it is whatever the gate's projections are, and what makes the gate has a gradient.
    """
    vanilla = filled(nn.MultiheadAttention(C, H, **sizes).double(), 0.4)
    model: Any = nn.Sequential(deepcopy(vanilla))
    swap_attention(model, dict(IDENTITIES[name], path='0'))
    gate = model[0].gate
    for key, parameter in gate.named_parameters():
        if key.startswith(('gate_q_proj', 'gate_k_proj')):
            nn.init.normal_(parameter)  # as a detector's own initialisation may
    given, counts = dict(CALLS[call]), ((N, C), (M, vanilla.kdim), (M, vanilla.vdim))
    x = [torch.randn(B, *count).double() for count in counts]
    if not batched:
        x = [one[1] for one in x]
        if 'key_padding_mask' in given:
            given['key_padding_mask'] = given['key_padding_mask'][1]
        if call == 'per_head':
            given['attn_mask'] = given['attn_mask'][H:]
    elif not vanilla.batch_first:
        x = [one.transpose(0, 1) for one in x]
    actual, expected = model[0](*x, **given), vanilla(*x, **given)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-12)
    actual[0].square().sum().backward()
    of_gate = [p for key, p in gate.named_parameters() if key.startswith(('gml', 'gate_w', 'lambda'))]
    assert any(parameter.grad.abs().max() > 0 for parameter in of_gate)


@pytest.mark.parametrize('name, mask', zip(DENSE, cycle(MASKS), strict=False))
def test_gradcheck(name: str, mask: str) -> None:
    module = build(name)
    x = [t.requires_grad_() for t in inputs()]
    masks = MASKS[mask]
    output = module(*x, **masks)[0]
    assert torch.isfinite(output).all()
    wanted = [*x, *module.parameters()]
    assert torch.autograd.gradcheck(lambda *_: module(*x, **masks)[0], wanted, fast_mode=True)


@pytest.mark.parametrize('name', DENSE)
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


# the norm of the first differential transformer makes more of a sum than a multiple
@pytest.mark.parametrize('name', [name for name in DENSE if name != 'differential'])
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


@pytest.mark.parametrize('sizes', [{}, dict(kdim=C // 2, vdim=C // 2)], ids=['one projection', 'three'])
def test_torchs_start_can_be_drawn_anew(sizes: dict[str, int]) -> None:
    module = gated_attention(PLuGGate, C, H, **sizes)
    before = module.out_proj.bias, module.gate.gate_q_proj.weight.clone()
    nn.init.ones_(before[0])
    module._reset_parameters()
    assert not module.out_proj.bias.any() and torch.equal(module.gate.gate_q_proj.weight, before[1])


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
    pytest.importorskip('mmcv')
    layer: Any = PLuGMultiheadAttention(C, H, kdim=6, vdim=10, bias=False, device='meta', dtype=torch.float64)
    assert (layer.attn.kdim, layer.attn.vdim, layer.attn.in_proj_bias) == (6, 10, None)
    assert all(p.device.type == 'meta' and p.dtype is torch.float64 for p in layer.parameters())
    with pytest.warns(DeprecationWarning, match='dropout'):
        layer = PLuGMultiheadAttention(C, H, dropout=0.3)
    assert layer.attn.dropout == 0.3 and layer.dropout_layer.p == 0.3
    assert PLuGMultiheadAttention(C, H).dropout_layer.p == 0.0, 'the deprecated argument stays with its own layer'
    with pytest.raises(TypeError, match='bais'):
        PLuGMultiheadAttention(C, H, bais=False)


def test_rows_of_the_differential_transformers_map_sum_to_what_lambda_leaves() -> None:
    module = DifferentialGate(Sizes(C, H), lambda_init=0.3, learnable=False)
    query, key = torch.randn(2, 2, H, N, C // H)
    with record(module, 'attention') as recording:
        module.attend(query, key, key, (query, key, key), None)
    sums = recording['']['attention'].last.sum(-1)
    torch.testing.assert_close(sums, torch.full_like(sums, 0.7))


@pytest.mark.parametrize('appended', [{}, dict(add_bias_kv=True), dict(add_zero_attn=True)], ids=str)
def test_weights_and_values_that_are_recorded_make_the_output(appended: dict[str, bool]) -> None:
    """Those of the keys that torch appends among them."""
    module = filled(nn.MultiheadAttention(8, 2, batch_first=True, **appended), 0.5)
    given = {name: torch.randn(2, count, 8) for name, count in dict(query=3, key=5, value=5).items()}
    mask = torch.tensor([[False, False, True, False, False]] * 3)
    with record(module) as recording:
        recorded = module(**given, attn_mask=mask)
    weights, values = (recording[''][name].last for name in ('attention', 'values'))
    heads = (weights @ values).transpose(1, 2).flatten(2)
    expected = module(**given, attn_mask=mask)
    torch.testing.assert_close(module.out_proj(heads), expected[0])
    torch.testing.assert_close(recorded, expected)


def test_sizes_that_do_not_fit_are_refused() -> None:
    """Masks, and what is no batch of tokens, are refused in each family."""
    with pytest.raises(ValueError, match='not a multiple'):
        PLuGGate(Sizes(10, 4))
    with pytest.raises(ValueError, match='must be even'):
        gated_attention(DGSAGate, 12, 4)
    module, x = build('plug'), inputs()
    alone = x[1][0]  # one sequence
    for wrong, said in (
        ((alone, x[1], alone), 'key must be'),
        ((alone, alone, alone[:-1]), 'M'),
        ((alone[:, 1:], alone, alone), 'query must be'),
    ):
        with pytest.raises(ValueError, match=said):
            module(*wrong)


@pytest.mark.parametrize(
    ('mask', 'padding', 'message'),
    [
        ((B, N, M), None, r'attn_mask must be \(N, M\), .* with B=2, H=2, got \(2, 5, 7\)'),
        ((B, 3, N, M), None, r'attn_mask must be .*, got \(2, 3, 5, 7\)'),
        (None, (3, M), r'key_padding_mask must be \(B, M\) with B=2, got \(3, 7\)'),
        ((N, M), (B, 4), r'key_padding_mask \(2, 4\) and attn_mask \(1, 1, 5, 7\) differ in keys'),
    ],
    ids=['images alone', 'heads', 'padding of more images', 'other keys'],
)
def test_a_mask_of_another_shape_is_refused(mask: Any, padding: Any, message: str) -> None:
    names = dict(attn_mask=mask, key_padding_mask=padding)
    masks = {name: torch.zeros(shape, dtype=torch.bool) for name, shape in names.items() if shape}
    with pytest.raises(ValueError, match=message):
        build('plug')(*inputs(), **masks)

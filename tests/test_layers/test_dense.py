"""The dense gates: drop-ins for mmcv's and torch's MultiheadAttention."""

from __future__ import annotations

import pytest
import torch
from conftest import one_graph
from mmcv.cnn.bricks.transformer import MultiheadAttention, TransformerLayerSequence
from torch import Tensor, nn

from mmgate.layers import (
    DifferentialAttention,
    DifferentialGatedAttention,
    DifferentialGatedMultiheadAttention,
    GatingModulation,
    PLuGAttention,
    PLuGMultiheadAttention,
    SDPAGatedAttention,
    SDPAGatedMultiheadAttention,
)
from mmgate.layers.base.dense import DenseAttention
from mmgate.ops.plug_attention import chunked, plug_attention

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
    'shared': dict(head_shared=True),
    'shared_headwise': dict(head_shared=True, granularity='headwise'),
    'additive': dict(form='additive', act='silu'),
    'silu': dict(act='silu'),
    'ns_sigmoid': dict(act='ns_sigmoid'),
}
DGSA = {'query': {}, 'input': dict(residual='input'), 'none': dict(residual='none')}
ALL = {
    **{f'plug_{k}': (PLuGAttention, v) for k, v in PLUG.items()},
    'plug_none': (PLuGAttention, dict(gml='none', init='paper')),
    **{f'sdpa_{k}': (SDPAGatedAttention, v) for k, v in SDPA.items()},
    **{f'dgsa_{k}': (DifferentialGatedAttention, v) for k, v in DGSA.items()},
}
MASKS = ['none', 'padding', 'bool', 'float', 'per_head', 'dead_row']


def make_masks(kind: str) -> dict[str, Tensor]:
    if kind == 'padding':
        mask = torch.zeros(B, M, dtype=torch.bool)
        mask[1, -3:] = True
        return dict(key_padding_mask=mask)
    if kind == 'bool':
        return dict(attn_mask=torch.rand(N, M, generator=torch.Generator().manual_seed(3)) > 0.7)
    if kind == 'float':
        return dict(attn_mask=torch.randn(N, M, generator=torch.Generator().manual_seed(3), dtype=torch.float64))
    if kind == 'per_head':
        mask = torch.rand(B * H, N, M, generator=torch.Generator().manual_seed(3)) > 0.7
        mask[..., 0] = False
        return dict(attn_mask=mask)
    if kind == 'dead_row':
        mask = torch.zeros(N, M, dtype=torch.bool)
        mask[2] = True
        return dict(attn_mask=mask)
    return {}


def inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(B, N, C, dtype=dtype), torch.randn(B, M, C, dtype=dtype), torch.randn(B, M, C, dtype=dtype)


def randomise(module: nn.Module) -> nn.Module:
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def build(name: str, **extra) -> DenseAttention:
    cls, options = ALL[name]
    return randomise(cls(C, H, batch_first=True, **options, **extra).double())


def identity_pair(cls: type, **options) -> tuple[nn.Module, nn.Module]:
    vanilla = randomise(nn.MultiheadAttention(C, H, batch_first=True).double())
    gated = cls(C, H, batch_first=True, init='identity', **options).double()
    keys = gated.load_state_dict(vanilla.state_dict(), strict=False)
    assert not keys.unexpected_keys and all('g' in key for key in keys.missing_keys)
    return vanilla, gated


@pytest.mark.parametrize('mask', [m for m in MASKS if m != 'dead_row'])
@pytest.mark.parametrize('options', PLUG.values(), ids=PLUG)
def test_plug_identity_start(options: dict, mask: str) -> None:
    vanilla, gated = identity_pair(PLuGAttention, **options)
    for parameter in [*gated.gate_q_proj.parameters(), *gated.gate_k_proj.parameters()]:
        nn.init.normal_(parameter)  # as a detector's own initialisation may
    x = inputs()
    expected, _ = vanilla(*x, **make_masks(mask))
    output, weights = gated(*x, **make_masks(mask))
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    assert weights is None
    output.square().sum().backward()
    assert any(p.grad.abs().max() > 0 for p in gated.gml.parameters())


@pytest.mark.parametrize('mask', MASKS)
@pytest.mark.parametrize('name', ALL)
def test_gradcheck(name: str, mask: str) -> None:
    module = build(name)
    x = [t.requires_grad_() for t in inputs()]
    masks = make_masks(mask)
    output = module(*x, **masks)[0]
    assert torch.isfinite(output).all()
    wanted = [*x, *module.parameters()]
    assert torch.autograd.gradcheck(lambda *_: module(*x, **masks)[0], wanted, fast_mode=True)


@pytest.mark.parametrize('name', ALL)
def test_fully_masked_row_is_zero_and_has_no_nan_gradient(name: str) -> None:
    module = build(name)
    if hasattr(module, 'residual') and isinstance(module, DifferentialGatedAttention):
        module.residual = 'none'
    nn.init.zeros_(module.out_proj.bias)
    x = [t.requires_grad_() for t in inputs()]
    output, weights = module(*x, **make_masks('dead_row'), need_weights=True)
    assert torch.count_nonzero(output[:, 2]) == 0 and torch.count_nonzero(weights[:, 2]) == 0
    output.square().sum().backward()
    assert all(torch.isfinite(t.grad).all() for t in [*x, *module.parameters()])


def test_chunks_with_dropout_or_a_learnt_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    query, key, gate_query, gate_key = (torch.randn(2, h, 6, 4, dtype=torch.float64) for h in (2, 2, 1, 1))
    value = torch.randn(2, 2, 6, 4, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(2, 2, 6, 6, dtype=torch.float64, requires_grad=True)
    gml = GatingModulation('product', activation='tanh', init='paper').double()
    results = []
    for chunk in (1 << 20, 2 * 2 * 2 * 6):
        monkeypatch.setattr(chunked, 'CHUNK', chunk)
        output = plug_attention(query, key, value, gate_query, gate_key, gml, bias, backend='chunked')
        results.append([output, *torch.autograd.grad(output.square().sum(), (value, bias))])
    for expected, actual in zip(*results, strict=True):
        torch.testing.assert_close(actual, expected)
    output = plug_attention(query, key, value, gate_query, gate_key, gml, dropout=0.5, backend='chunked')
    # linear in the values, if what is recomputed drops the same weights
    (gradient,) = torch.autograd.grad(output.sum(), value)
    torch.testing.assert_close((gradient * value).sum(), output.sum())
    whole = plug_attention(query, key, value, gate_query, gate_key, gml)
    assert not torch.allclose(whole, output)


@pytest.mark.parametrize('name', [n for n in ALL if not build(n).beyond_weights])
def test_weights_are_those_of_the_output(name: str) -> None:
    module = build(name)
    x = inputs()
    _, weights = module(*x, need_weights=True, average_attn_weights=False)
    value = module.project(x)[2]
    heads = weights @ value
    if isinstance(module, DifferentialGatedAttention):
        heads = module.head_norm(heads) * 0.2
    torch.testing.assert_close(module.merge(heads, module.project(x)[0], x), module(*x)[0])


def count(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def test_parameter_counts() -> None:
    vanilla = count(nn.MultiheadAttention(256, 8))
    assert count(DifferentialGatedAttention(256, 8)) - vanilla == 8 * (256 + 1) + 32
    assert count(DifferentialGatedAttention(256, 8, gate_depth=3)) - vanilla == 8 * 257 + 32 + 2 * 256 * 257
    assert DifferentialGatedAttention(256, 8, learnable=True).lambda_init.tolist() == [pytest.approx(0.8)]
    assert count(PLuGAttention(256, 8)) - vanilla == 2 * (256 * 32 + 32) + 4
    assert count(SDPAGatedAttention(256, 8)) - vanilla == 256 * 256 + 256
    assert count(SDPAGatedAttention(256, 8, granularity='headwise')) - vanilla == 8 * 257
    assert count(SDPAGatedAttention(256, 8, head_shared=True)) - vanilla == 32 * 257


@pytest.mark.parametrize('batch_first', [True, False], ids=['batch_first', 'sequence_first'])
@pytest.mark.parametrize(
    'cls', [PLuGMultiheadAttention, SDPAGatedMultiheadAttention, DifferentialGatedMultiheadAttention]
)
def test_drop_in_for_mmcv(cls: type, batch_first: bool) -> None:
    identity = {PLuGMultiheadAttention: {}, SDPAGatedMultiheadAttention: dict(init='identity', act='silu')}.get(cls)
    # mmcv writes a model's `dropout` into the default of those that come after it
    vanilla = randomise(MultiheadAttention(C, H, batch_first=batch_first)).eval()
    gated = cls(C, H, batch_first=batch_first, **(identity or {}))
    keys = gated.load_state_dict(vanilla.state_dict(), strict=False)
    assert not keys.unexpected_keys and keys.missing_keys
    order = (lambda t: t) if batch_first else (lambda t: t.transpose(0, 1))
    query, key, value = (order(t) for t in inputs(torch.float32))
    call = dict(query_pos=torch.randn_like(query), key_pos=torch.randn_like(key), identity=torch.randn_like(query))
    masks = make_masks('padding')
    output = gated(query, key, value, **call, **masks)
    assert output.shape == query.shape
    if identity is not None:
        torch.testing.assert_close(output, vanilla(query, key, value, **call, **masks), rtol=0, atol=2e-6)
        torch.testing.assert_close(gated(query), vanilla(query), rtol=0, atol=2e-6)


def test_torch_encoder_layer_does_not_skip_the_gate() -> None:
    """torch's encoder layer has a fast path in eval mode that would read the weights and leave the gate out."""
    layer = nn.TransformerEncoderLayer(C, H, 8, batch_first=True, dropout=0.0)
    layer.self_attn = randomise(PLuGAttention(C, H, batch_first=True))
    x = torch.randn(B, N, C)
    expected = layer.train()(x)
    with torch.inference_mode():
        torch.testing.assert_close(layer.eval()(x), expected)


@one_graph
@pytest.mark.parametrize('name', ['plug_default', 'sdpa_G1_elementwise', 'dgsa_query'])
def test_compiles_without_graph_break(name: str) -> None:
    module, x = build(name), inputs()
    compiled = torch.compile(module, fullgraph=True, backend='aot_eager')
    torch.testing.assert_close(compiled(*x)[0], module(*x)[0])


@pytest.mark.parametrize(
    'cls, options, message',
    [
        (PLuGAttention, dict(heads='all'), 'shared, per_head'),
        (PLuGAttention, dict(ratio=0.01), 'leaves no gate channel'),
        (PLuGAttention, dict(gml='none'), "use init='paper'"),
        (PLuGAttention, dict(residual=False), "use init='paper'"),
        (PLuGAttention, dict(backend='cuda'), 'chunked'),
        (SDPAGatedAttention, dict(position='G6'), 'G1, G2'),
        (SDPAGatedAttention, dict(init='identity'), 'scale=2'),
        (SDPAGatedAttention, dict(init='identity', form='additive'), "act='silu'"),
        (SDPAGatedAttention, dict(init='identity', act='silu', scale=2.0), 'scale=1'),
        (SDPAGatedAttention, dict(init='identity', act='ns_sigmoid'), 'scale=1.333333'),
        (SDPAGatedAttention, dict(act='relu'), 'sigmoid, silu, ns_sigmoid'),
        (SDPAGatedAttention, dict(position='G5', granularity='headwise'), 'there are no heads'),
        (SDPAGatedAttention, dict(position='G5', head_shared=True), 'there are no heads'),
        (PLuGAttention, dict(add_bias_kv=True), 'has no add_bias_kv'),
        (SDPAGatedMultiheadAttention, dict(add_zero_attn=True), 'has no add_zero_attn'),
        (SDPAGatedAttention, dict(granularity='head'), 'elementwise, headwise'),
        (DifferentialGatedAttention, dict(residual='q'), 'query, input, none'),
        (DifferentialGatedAttention, dict(gate_depth=0), 'gate_depth=0'),
        (DifferentialAttention, dict(depth=0), 'depth=0'),
    ],
)
def test_bad_options(cls: type, options: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        cls(C, H, **options)


def test_the_papers_spelling_of_ns_sigmoid() -> None:
    module = SDPAGatedAttention(C, H, act='NS-sigmoid', init='identity', scale=4 / 3)
    assert module.act == 'ns_sigmoid'
    nn.init.constant_(module.gate_bias, -100.0)  # not sparse: half of the heads is left
    heads = torch.ones(1, H, 3, C // H)
    torch.testing.assert_close(module._gated(heads, (torch.ones(1, 3, C),) * 3), heads * (2 / 3))


def test_a_checkpoint_with_the_gate_in_one_dimension_loads() -> None:
    """As mmgate 0.1 wrote it."""
    module = build('sdpa_G1_headwise')
    state = module.state_dict()
    state['gate_weight'] = state['gate_weight'].flatten()
    other = SDPAGatedAttention(C, H, batch_first=True, granularity='headwise').double()
    other.load_state_dict(state)
    assert torch.equal(other.gate_weight, module.gate_weight) and other.gate_weight.shape == (H, C)


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


@pytest.mark.parametrize(
    'name', ['PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention', 'DifferentialGatedMultiheadAttention']
)
def test_mmcv_builds_its_layers_with_a_gate(name: str) -> None:
    """By type, with the arguments of configs of its 1.x, deprecated ones included."""
    attention = dict(type=f'mmgate.{name}', embed_dims=C, num_heads=H)
    with pytest.warns(DeprecationWarning, match='dropout'):
        layers = TransformerLayerSequence(
            num_layers=2,
            transformerlayers=dict(
                type='BaseTransformerLayer',
                attn_cfgs=[dict(attention, dropout=0.1), attention],
                ffn_cfgs=dict(type='FFN', embed_dims=C, feedforward_channels=8),
                operation_order=('self_attn', 'norm', 'cross_attn', 'norm', 'ffn', 'norm'),
            ),
        )
    assert [attn.attn.dropout for attn in layers.layers[0].attentions] == [0.1, 0.0]
    query, memory = torch.randn(N, B, C), torch.randn(M, B, C)
    assert layers(query, memory, memory).shape == query.shape
    attn = layers.eval().layers[0].attentions[1]
    with pytest.warns(DeprecationWarning, match='residual'):
        output = attn(query, residual=torch.ones_like(query))
    torch.testing.assert_close(output, attn(query) - query + 1)


@pytest.mark.parametrize('chunk', [1 << 21, 8 * 3], ids=['whole', 'chunks'])
@pytest.mark.parametrize('autocast', [False, True], ids=['bfloat16', 'autocast'])
@pytest.mark.parametrize('position', ['pre_softmax', 'post_softmax'])
def test_small_gates_count_in_16_bits(
    monkeypatch: pytest.MonkeyPatch, position: str, autocast: bool, chunk: int
) -> None:
    """In bfloat16 1 + G is 1 for all G below 0.0039."""
    monkeypatch.setattr(chunked, 'CHUNK', chunk)
    query, key = (torch.randn(1, 1, 8, 16) * 8).bfloat16(), torch.randn(1, 1, 8, 16).bfloat16()
    value = torch.eye(8, 16).bfloat16()[None, None]  # the output begins with the weights
    gate_query, gate_key = torch.ones(1, 1, 8, 4).bfloat16(), torch.ones(1, 1, 8, 4).bfloat16()

    class Constant(nn.Module):
        def __init__(self, gate: float) -> None:
            super().__init__()
            self.gate = nn.Parameter(torch.tensor(gate))

        def forward(self, r: Tensor) -> Tensor:
            return torch.full_like(r, 1.0) * self.gate

    def weights(gate: float) -> Tensor:
        with torch.autocast('cpu', torch.bfloat16, enabled=autocast), torch.no_grad():
            output = plug_attention(query, key, value, gate_query, gate_key, Constant(gate), position=position)
            return output[..., :8].float()

    exact = torch.softmax((query @ key.transpose(-1, -2) / 4).double() * 1.0035, -1)
    if position == 'post_softmax':
        exact = torch.softmax((query @ key.transpose(-1, -2) / 4).double(), -1) * 1.0035
    moved = (weights(0.0035) != weights(0.0)).float().mean()
    assert moved > 0.2, f'{moved:.0%} of the weights know of the gate'
    torch.testing.assert_close(weights(0.0035).double(), exact, rtol=2**-6, atol=1e-3)


def test_rms_norm_is_torchs() -> None:
    from mmgate.layers.rms_norm import _RMSNorm

    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 8).to(dtype)
        norm = _RMSNorm(8, eps=1e-5).to(dtype)
        nn.init.normal_(norm.weight)
        expected = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + 1e-5) * norm.weight.double()
        assert norm(x).dtype is dtype
        torch.testing.assert_close(norm(x).double(), expected, rtol=torch.finfo(dtype).eps * 4, atol=1e-6)
        if hasattr(nn, 'RMSNorm'):
            own = nn.RMSNorm(8, eps=1e-5).to(dtype)
            own.load_state_dict(norm.state_dict())
            torch.testing.assert_close(norm(x), own(x))


def test_bad_sizes_and_masks() -> None:
    with pytest.raises(ValueError, match='not a multiple'):
        PLuGAttention(10, 4)
    with pytest.raises(ValueError, match='must be even'):
        DifferentialGatedAttention(12, 4)
    module, x = build('plug_default'), inputs()
    with pytest.raises(ValueError, match='key_padding_mask must be'):
        module(*x, key_padding_mask=torch.zeros(3, M, dtype=torch.bool))
    with pytest.raises(ValueError, match='attn_mask must be'):
        module(*x, attn_mask=torch.zeros(3, N, M, dtype=torch.bool))

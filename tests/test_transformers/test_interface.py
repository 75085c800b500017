"""transformers' attentions that call its attention interface: each class of the table is exact; what is refused."""

from __future__ import annotations

import copy
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

from helpers.interface_models import HEADS, OWN, TOKENS, C, build, feed, first, form_of, names
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import ViTAttention

import mmgate
from mmgate.adapter import Adapter
from mmgate.errors import ConfigError
from mmgate.hosts import adapter_for, gates_for
from mmgate.hosts.interface import FORMS, OUTPUTS, Form, InterfaceAdapter, SelfAttention, fingerprint
from mmgate.hosts.interface_classes import CLASSES

PLUG = dict(type='PLuGMultiheadAttention')
GATES: dict[str, dict[str, Any]] = {
    'plug': PLUG,
    'sdpa': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu'),
    'sdpa_g5': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu', position='G5'),
    'sdpa_narrow': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu', gate_channels=3),
}
RATES = dict.fromkeys(
    (
        *('attention_dropout', 'attention_probs_dropout_prob', 'dropout_prob', 'dropout_rate'),
        *('memory_attention_rope_dropout', 'perceiver_resampler_attention_dropout'),
    ),
    0.25,
)
ALL = names()
POOLED = 'modeling_sam2.Sam2MultiScaleAttention'
# One class of each form, and those with adapters of their own.
SAMPLE = [next(name for name in ALL if CLASSES.get(name, ('',))[0] == form) for form in FORMS]
SAMPLE += [*OWN, 'modeling_vit.ViTAttention', 'modeling_sam.SamAttention', 'modeling_yolos.YolosSelfAttention']
SAMPLE = [name for name in dict.fromkeys(SAMPLE) if name in ALL]


class Seeing(mmgate.DenseGate):
    """A gate that changes nothing, and keeps what it is given."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Any, bias: Tensor | None) -> Tensor:
        self.inputs = inputs
        return super().attend(query, key, value, inputs, bias)

    def finish(self, output: Tensor, query: Tensor, inputs: Any) -> Tensor:
        assert query.shape[2] == output.shape[1] and inputs is self.inputs
        self.finished = output
        return output


def run(model: Any, fed: dict[str, Any]) -> Tensor:
    return first(model['attn'](**fed))


def keep_input(read: dict[str, Tensor], child: str, _: Any, args: tuple[Tensor, ...]) -> None:
    read[child] = args[0]


def keep_output(made: list[Tensor], _: Any, args: Any, output: Tensor) -> None:
    made.append(output)


def is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def with_gradients(model: Any, fed: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the gradients of all that is read and of all parameters, by name."""
    states = {key: value.clone().requires_grad_() for key, value in fed.items() if is_states(value)}
    output = run(model, {**fed, **states})
    output.square().sum().backward()
    leaves = {**dict(model.named_parameters()), **states}
    return output.detach(), {name: leaf.grad for name, leaf in leaves.items() if leaf.grad is not None}


@pytest.mark.parametrize('name', ALL)
def test_every_class_of_the_table_is_exact(name: str) -> None:
    """Outputs, gradients, what its projections get, what the output projection gives, heads and dropout."""
    fed = feed(name, torch.float64)
    for training in (False, True):
        vanilla = build(name).double().train(training)
        model = copy.deepcopy(vanilla)
        mmgate.swap_attention(model, dict(path='attn', type=Seeing))
        host = model['attn']
        form = form_of(name)
        read: dict[str, Tensor] = {}
        made: list[Tensor] = []
        projections = form.projections_of(host)
        for child in dict.fromkeys(projections):
            host.get_submodule(child).register_forward_pre_hook(partial(keep_input, read, child))
        output = next((one for one in OUTPUTS if hasattr(host, one)), '')
        if output:
            host.get_submodule(output).register_forward_hook(partial(keep_output, made))
        found, gradients = with_gradients(model, fed)
        expected, wanted = with_gradients(vanilla, fed)
        # Some rotate in single precision.
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert wanted.keys() <= gradients.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(gradients[key], value, rtol=1e-7, atol=1e-7, msg=lambda m, k=key: f'{k}: {m}')
        for child, x in zip(projections, host.gate.inputs, strict=True):
            assert torch.equal(x, read[child].reshape(x.shape))
            assert read[child].dim() != 3 or x.shape == read[child].shape
        finished = host.gate.finished
        projected = made[0] if output else found
        if name == 'modeling_mlcd.MLCDAttention':  # which projects (N, B, C)
            projected = projected.transpose(0, 1)
        assert torch.equal(finished, projected.reshape(finished.shape))
        assert bool(output) == bool(InterfaceAdapter.sizes(host).output)


@pytest.mark.parametrize('name', ALL)
def test_every_class_of_the_table_tells_its_sizes(name: str) -> None:
    """They are those with which it calls the attention function, in training."""
    seen: list[Any] = []

    def note(module: Any, query: Tensor, *args: Any, dropout: float = 0.0, scaling: Any = None, **kwargs: Any) -> Any:
        usual = query.shape[3] ** -0.5
        seen.append((query.shape[1], query.shape[3], dropout))
        assert sizes.why_whole_heads or (scaling or usual) == (sizes.scale or usual)
        return sdpa_attention_forward(module, query, *args, dropout=dropout, scaling=scaling, **kwargs)

    AttentionInterface.register('noted', note)
    model = build(name, RATES).train()
    adapter, _ = adapter_for(mmgate.DenseGate, model['attn'])  # type: ignore[misc]
    sizes = adapter.sizes(model['attn'])
    model['attn'].config._attn_implementation = 'noted'
    run(model, feed(name))
    assert seen == [(sizes.heads, sizes.head_dim, sizes.dropout)]


def test_the_table_covers_what_detectors_and_vision_transformers_have() -> None:
    kinds = [name.partition('.')[2] for name in (*CLASSES, *OWN)]
    for family in ('ViT', 'DeiT', 'Dinov2', 'DINOv3ViT', 'Swin', 'Segformer', 'CLIP', 'Siglip', 'OwlViT', 'Beit'):
        assert f'{family}Attention' in kinds
    for family in ('Detr', 'DeformableDetr', 'ConditionalDetr', 'RTDetr', 'RTDetrV2', 'DFine', 'MaskFormerDetr'):
        assert f'{family}SelfAttention' in kinds
    assert {'SamAttention', 'Sam2Attention', 'YolosSelfAttention', 'LwDetrAttention', 'EomtAttention'} <= {*kinds}
    assert len(kinds) >= 137


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('name', SAMPLE)
def test_a_gate_starts_as_its_host_learns_and_comes_off(name: str, gate: str) -> None:
    model, fed = build(name), feed(name)
    vanilla = copy.deepcopy(model)
    sizes = InterfaceAdapter.sizes(model['attn'])
    if gate == 'sdpa_g5' and sizes.output != sizes.channels:
        with pytest.raises(ConfigError, match=f'goes from {sizes.channels} to {sizes.output} channels'):
            mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
        return
    mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
    assert isinstance(model['attn'], Adapter)
    model = copy.deepcopy(model)
    found, gradients = with_gradients(model, fed)
    expected, wanted = with_gradients(vanilla, fed)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    for key, value in wanted.items():
        torch.testing.assert_close(gradients[key], value, rtol=1e-3, atol=1e-3, msg=lambda m, k=key: f'{name} {k}: {m}')
    gates = mmgate.gate_parameters(model)
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in gates.values())
    for parameter in gates.values():
        nn.init.normal_(parameter)
    assert (run(model, fed) - expected).abs().max() > 1e-3
    mmgate.restore_attention(model)
    assert torch.equal(run(model, fed), expected) and type(model['attn']) is type(vanilla['attn'])


@pytest.mark.parametrize('gate', ['DifferentialMultiheadAttention', 'DifferentialV2MultiheadAttention'])
@pytest.mark.parametrize('name', [name for name in SAMPLE if form_of(name).why_whole_heads])
def test_gates_that_attend_twice_refuse_rotated_heads(name: str, gate: str) -> None:
    with pytest.raises(ConfigError, match='the gate .*, but the host rotates, scales or normalises'):
        mmgate.swap_attention(build(name), dict(type=gate, path='attn'))


def test_pooled_queries_are_refused() -> None:
    """SAM 2 pools the queries of some of its layers, whose gate would have more tokens than queries."""
    with pytest.raises(ConfigError, match=r'pools its queries, query_stride=\(2, 2\)'):
        mmgate.swap_attention(build(POOLED, query_stride=(2, 2)), dict(PLUG, path='attn'))


def test_masks_of_other_implementations_are_refused() -> None:
    model = build('modeling_vit.ViTAttention')
    model['attn'].config._attn_implementation = 'flash_attention_2'
    with pytest.raises(ConfigError, match=r"attends by 'flash_attention_2'.* call model.set_attn_implementation\('mm"):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))


class Theirs(nn.Module):
    """An attention of somebody's, causal where it is told no mask."""

    def __init__(self, kv_heads: int = HEADS, implementation: str = 'sdpa') -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config._attn_implementation = implementation
        self.is_causal = True
        self.num_key_value_groups = HEADS // kv_heads
        self.head_dim = C // HEADS
        self.attention_dropout = nn.Dropout(0.1)
        self.norm = nn.LayerNorm(self.head_dim)
        self.query, self.key = nn.Linear(C, C), nn.Linear(C, kv_heads * C // HEADS)
        self.value, self.out_proj = nn.Linear(C, kv_heads * C // HEADS), nn.Linear(C, C)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Any:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q = self.norm(self.query(hidden_states).view(shape)).transpose(1, 2)
        k = self.norm(self.key(hidden_states).view(shape)).transpose(1, 2)
        v = self.value(hidden_states).view(shape).transpose(1, 2)
        if cache is not None:
            k, v = torch.cat([cache, k], 2), torch.cat([cache, v], 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        out, weights = attend(self, q, k, v, attention_mask, dropout=0.1 if self.training else 0.0, scaling=0.5)
        return self.out_proj(out.flatten(2)), weights


class OtherAttention(Theirs):
    """Another, which nothing declares."""


class GroupedAttention(Theirs):
    """One whose heads share keys."""


class NamedAttention(nn.Module):
    """One by names that transformers does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config._attn_implementation = 'sdpa'
        self.num_heads = HEADS
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, place: Tensor) -> Tensor:
        def split(y: Tensor) -> Tensor:
            return y.unflatten(-1, (HEADS, -1)).transpose(1, 2)

        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        heads = (split(self.to_q(x)), split(self.to_k(memory + place)), split(self.to_v(memory)))
        return self.to_out(attend(self, *heads, None, is_causal=False)[0].flatten(2))


mmgate.adapts(mmgate.DenseGate, Theirs, GroupedAttention, like=ViTAttention)


@mmgate.adapts(mmgate.DenseGate, NamedAttention)
class GatedNamedAttention(InterfaceAdapter):
    """The adapter that docs/hosts.md shows."""

    form = Form('x', 'memory', key_position='place', projections=('to_q', 'to_k', 'to_v'), output='to_out')


def test_a_class_of_ones_own_is_declared_like_one_of_the_table() -> None:
    """With norms of heads, another scale, and causal where it has no mask; it is copied and pickled, too."""
    model: Any = nn.ModuleDict(dict(attn=Theirs())).eval()
    x = torch.randn(2, TOKENS, C)
    expected = run(model, dict(hidden_states=x))
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run(one, dict(hidden_states=x)), expected, rtol=1e-4, atol=1e-5)
    assert model['attn'].gate.dropout == 0.1
    changed = x.clone()
    changed[:, -1] += 1.0
    torch.testing.assert_close(run(model, dict(hidden_states=changed))[:, :-1], expected[:, :-1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match='call the model without a cache'):
        run(model, dict(hidden_states=x, cache=torch.randn(2, HEADS, 3, C // HEADS)))


def test_a_class_by_names_of_its_own_is_declared_by_a_form() -> None:
    model: Any = nn.ModuleDict(dict(attn=NamedAttention())).eval()
    x, memory, place = (torch.randn(2, count, C) for count in (5, 7, 7))
    expected = model['attn'](x, memory, place=place)
    mmgate.swap_attention(model, dict(path='attn', type=Seeing))
    torch.testing.assert_close(model['attn'](x, memory, place=place), expected)
    for found, wanted in zip(model['attn'].gate.inputs, (x, memory + place, memory), strict=True):
        assert torch.equal(found, wanted)


def test_a_class_that_nothing_declares_is_refused_with_the_row() -> None:
    model: Any = nn.ModuleDict(dict(attn=OtherAttention()))
    assert not gates_for(model['attn'])
    (listed,) = mmgate.list_attention(model)
    assert listed.path == 'attn' and not listed.gates
    with pytest.raises(
        ConfigError, match=r'attn is a .*\.OtherAttention, .* declare it: .*OtherAttention, like=Theirs'
    ):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))
    alone: Any = nn.ModuleDict(dict(attn=type('BareAttention', (nn.Module,), {})()))
    with pytest.raises(ConfigError, match=r'No adapter knows that class.*, BareAttention, like=\.\.\.'):
        mmgate.swap_attention(alone, dict(PLUG, path='attn'))


def test_shared_heads_of_keys_are_refused() -> None:
    model: Any = nn.ModuleDict(dict(attn=GroupedAttention(kv_heads=2)))
    with pytest.raises(ConfigError, match='as many heads of keys as of queries, .*GroupedAttention have 32, 16, 16'):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))


def test_another_source_than_the_tables_is_refused_until_somebody_answers_for_it() -> None:
    class Changed(Theirs):
        __module__ = ViTAttention.__module__
        __qualname__ = 'ViTAttention'

        def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Any:
            return super().forward(hidden_states, attention_mask)

    assert fingerprint(ViTAttention) == CLASSES['modeling_vit.ViTAttention'][1] != fingerprint(Changed)
    model: Any = nn.ModuleDict(dict(attn=Changed())).eval()
    rule = dict(PLUG, path='attn')
    with pytest.raises(ConfigError, match=r'forward of .*ViTAttention in transformers .* is not .* class .*SelfAtt'):
        mmgate.swap_attention(model, rule)

    @mmgate.adapts(mmgate.DenseGate, Changed)
    class Mine(SelfAttention):
        pass

    assert mmgate.swap_attention(model, rule) == ['attn'] and isinstance(model['attn'], Mine)


def test_a_fingerprint_is_that_of_the_code_alone() -> None:
    class One(nn.Module):
        def forward(self, x, y=None):  # type: ignore[no-untyped-def]
            return self.a(x) + 1.0

    class Same(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            """Words."""
            # A comment.
            return (
                self.a(x) +
                1.0
            )  # fmt: skip

    class Other(nn.Module):
        def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
            return self.a(x) + 2.0

    assert fingerprint(One) == fingerprint(Same) != fingerprint(Other)
    assert fingerprint(type('Without', (nn.Module,), dict(forward=eval('lambda self, x: x')))) == ''


def test_a_host_that_passes_over_the_gate_is_an_error() -> None:
    """One that looks its attention function up elsewhere."""

    class Eager(Theirs):
        def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Any:
            return self.out_proj(self.value(hidden_states)), None

    mmgate.adapts(mmgate.DenseGate, Eager, like=ViTAttention)
    model: Any = nn.ModuleDict(dict(attn=Eager()))
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    with pytest.raises(RuntimeError, match='Eager has not called the attention function of its config'):
        run(model, dict(hidden_states=torch.randn(2, TOKENS, C)))


@pytest.mark.parametrize('gate', ['plug', 'sdpa_g5'])
@pytest.mark.parametrize('name', ['modeling_vit.ViTAttention', 'modeling_detr.DetrCrossAttention'])
def test_a_gated_attention_is_compiled_as_one_graph(name: str, gate: str) -> None:
    model, fed = build(name), feed(name)
    mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    expected = run(model, fed)
    torch.compiler.reset()
    compiled = torch.compile(model['attn'], backend='eager', fullgraph=True)
    torch.testing.assert_close(first(compiled(**fed)), expected, rtol=1e-4, atol=1e-5)


def test_the_config_of_a_gated_attention_is_the_models() -> None:
    config = PretrainedConfig(hidden_size=8, num_attention_heads=2, attention_probs_dropout_prob=0.0, qkv_bias=True)
    config._attn_implementation = 'sdpa'
    model = nn.ModuleDict(dict(attn=ViTAttention(config)))
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    for copied in (copy.deepcopy(model['attn'].config), pickle.loads(pickle.dumps(model['attn'].config))):
        assert copied.hidden_size == 8
    model['attn'].config.hidden_size = 16
    assert config.hidden_size == 16
    other = copy.copy(config)
    model['attn'].config = other
    mmgate.restore_attention(model)
    assert model['attn'].config is other

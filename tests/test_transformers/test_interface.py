"""transformers' attentions that call its attention interface: each class of the table is exact; what is refused."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

import transformers
from helpers.interface_models import HEADS, OWN, RATES, TOKENS, C, build, feed, first, form_of, names
from transformers import AttentionInterface, PretrainedConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.vit.modeling_vit import ViTAttention

import mmgate
from mmgate.adapter import Adapter
from mmgate.errors import ConfigError
from mmgate.hosts import adapter_for, gates_for
from mmgate.hosts.interface import FORMS, OUTPUTS, Form, InterfaceAdapter, SelfAttention, fingerprint
from mmgate.hosts.interface_classes import CLASSES, WRITTEN_WITH
from mmgate.hosts.table import _ADAPTERS

PLUG = dict(type='PLuGMultiheadAttention')
GATES: dict[str, dict[str, Any]] = {
    'plug': PLUG,
    'sdpa': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu'),
    'sdpa_g5': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu', position='G5'),
    'sdpa_narrow': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu', gate_channels=3),
}
TWICE = ('DifferentialMultiheadAttention', 'DifferentialV2MultiheadAttention')
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


def noted(module: nn.Module) -> list[Tensor]:
    """Return a list of what a module reads and returns, once it has been called."""
    found: list[Tensor] = []
    module.register_forward_hook(lambda module, args, out: found.extend([args[0], out]))
    return found


def in_order(tensors: Iterable[Tensor]) -> Tensor:
    """Return the values of several tensors by size."""
    return torch.cat([tensor.flatten() for tensor in tensors]).sort().values


def with_gradients(model: Any, fed: dict[str, Any]) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the output, and the gradients of all that is read and of all parameters, by name."""
    floating = {key: value for key, value in fed.items() if isinstance(value, Tensor) and value.is_floating_point()}
    states = {key: value.clone().requires_grad_() for key, value in floating.items()}
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
        projections = form_of(name).projections_of(host)
        output = next((one for one in OUTPUTS if hasattr(host, one)), '')
        calls = {child: noted(host.get_submodule(child)) for child in {*projections, output} - {''}}
        found, gradients = with_gradients(model, fed)
        expected, wanted = with_gradients(vanilla, fed)
        # Some rotate in single precision.
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)
        assert wanted.keys() <= gradients.keys()
        for key, value in wanted.items():
            torch.testing.assert_close(gradients[key], value, rtol=1e-7, atol=1e-7, msg=lambda m, k=key: f'{k}: {m}')
        for child, x in zip(projections, host.gate.inputs, strict=True):
            read = calls[child][0]
            assert torch.equal(x, read.reshape(x.shape))
            assert read.dim() != 3 or x.shape == read.shape
        finished = host.gate.finished
        projected = calls[output][1] if output else found
        if name == 'modeling_mlcd.MLCDAttention':  # which projects (N, B, C)
            projected = projected.transpose(0, 1)
        assert torch.equal(finished, projected.reshape(finished.shape))
        assert bool(output) == bool(InterfaceAdapter.sizes(host).output)


@pytest.mark.parametrize('name', ALL)
def test_every_class_of_the_table_tells_what_a_gate_has_to_know(name: str) -> None:
    """Sizes are those with which it calls the attention function, in training; whether it hands on what it projects."""
    seen: list[Any] = []

    def note(module: Any, *heads: Tensor, dropout: float = 0.0, scaling: Any = None, **kwargs: Any) -> Any:
        usual = heads[0].shape[3] ** -0.5
        seen.append((heads[0].shape[1], heads[0].shape[3], dropout))
        assert sizes.why_whole_heads or (scaling or usual) == (sizes.scale or usual)
        # A norm of the heads of a value is its projection's part.
        count = 3 if len(projections) == 1 else 2
        projected = [calls[child][1] for child in projections[:2]]
        assert torch.equal(in_order(heads[:count]), in_order(projected)) == (not sizes.why_whole_heads)
        return sdpa_attention_forward(module, *heads, dropout=dropout, scaling=scaling, **kwargs)

    AttentionInterface.register('noted', note)
    model = build(name, dict.fromkeys(RATES, 0.25)).train()
    adapter, _ = adapter_for(mmgate.DenseGate, model['attn'])  # type: ignore[misc]
    sizes = adapter.sizes(model['attn'])
    projections = list(dict.fromkeys(form_of(name).projections_of(model['attn'])))
    calls = {child: noted(model['attn'].get_submodule(child)) for child in projections}
    model['attn'].config._attn_implementation = 'noted'
    # A position that is added to heads is nothing that a gate has to know.
    run(model, {key: value for key, value in feed(name).items() if key != 'positional_encoding'})
    assert seen == [(sizes.heads, sizes.head_dim, sizes.dropout)]


def test_every_row_of_the_table_has_its_class() -> None:
    """In the release that it was written with; in another one a class may have another source, or be gone."""
    if transformers.__version__ != WRITTEN_WITH:
        pytest.skip(f'the table was written with transformers {WRITTEN_WITH}')
    assert [*CLASSES, *OWN] == ALL


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('name', SAMPLE)
def test_a_gate_starts_as_its_host_learns_and_comes_off(name: str, gate: str) -> None:
    """Gates that attend twice refuse hosts that rotate, scale or normalise heads."""
    model, fed = build(name), feed(name)
    vanilla = copy.deepcopy(model)
    for twice in TWICE if form_of(name).why_whole_heads else ():
        with pytest.raises(ConfigError, match='the gate .*, but the host rotates, scales or normalises'):
            mmgate.swap_attention(model, dict(type=twice, path='attn'))
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


class NamedAttention(nn.Module):
    """One by names that transformers does not have."""

    def __init__(self) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config._attn_implementation = 'sdpa'
        self.num_heads = HEADS
        self.to_q, self.to_k, self.to_v, self.to_out = (nn.Linear(C, C) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, place: Tensor, cached: int = 0) -> Tensor:
        heads = [self.to_q(x), self.to_k(memory + place), self.to_v(memory)]
        heads = [one.unflatten(-1, (HEADS, -1)).transpose(1, 2) for one in heads]
        heads[1:] = [nn.functional.pad(one, (0, 0, cached, 0)) for one in heads[1:]]
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        return self.to_out(attend(self, *heads, None, is_causal=False)[0].flatten(2))


@mmgate.adapts(mmgate.DenseGate, NamedAttention)
class GatedNamedAttention(InterfaceAdapter):
    """The adapter that docs/hosts.md shows."""

    form = Form('x', 'memory', key_position='place', projections=('to_q', 'to_k', 'to_v'), output='to_out')


def test_a_class_by_names_of_its_own_is_declared_by_a_form() -> None:
    """Keys of a cache, which a gate could not read, are an error."""
    model: Any = nn.ModuleDict(dict(attn=NamedAttention())).eval()
    x, memory, place = (torch.randn(2, count, C) for count in (5, 7, 7))
    expected = model['attn'](x, memory, place=place)
    mmgate.swap_attention(model, dict(path='attn', type=Seeing))
    torch.testing.assert_close(model['attn'](x, memory, place=place), expected)
    for found, wanted in zip(model['attn'].gate.inputs, (x, memory + place, memory), strict=True):
        assert torch.equal(found, wanted)
    with pytest.raises(ValueError, match='call the model without a cache'):
        model['attn'](x, memory, place, cached=3)


class Theirs(ViTAttention):
    """A class that is declared like another."""


class GroupedAttention(Theirs):
    """One whose heads share keys."""


class OtherAttention(Theirs):
    """One that nothing declares."""


class Eager(Theirs):
    """One that looks its attention function up elsewhere."""

    def forward(self, hidden_states: Tensor) -> Any:
        return self.o_proj(self.v_proj(hidden_states)), None


mmgate.adapts(mmgate.DenseGate, Theirs, GroupedAttention, Eager, like=ViTAttention)


def of_class(kind: Any = ViTAttention, implementation: str = 'sdpa', **attributes: Any) -> Any:
    """Return ViT's attention as one of another class."""
    model = build('modeling_vit.ViTAttention')
    attention = model['attn']
    attention.__class__ = kind
    attention.config._attn_implementation = implementation
    for name, value in attributes.items():
        setattr(attention, name, value)
    return model


def test_a_class_of_ones_own_is_declared_like_one_of_the_table() -> None:
    """With another scale, and causal where it has no mask; it is copied and pickled, and its config is the model's."""
    model = of_class(Theirs, scaling=0.5, is_causal=True, attention_dropout=nn.Dropout(0.1))
    config = model['attn'].config
    fed = dict(hidden_states=torch.randn(2, TOKENS, C))
    expected = run(model, fed)
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    for one in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        torch.testing.assert_close(run(one, fed), expected, rtol=1e-4, atol=1e-5)
        assert one['attn'].config.hidden_size == C
    assert model['attn'].gate.dropout == 0.1
    fed['hidden_states'][:, -1] += 1.0
    torch.testing.assert_close(run(model, fed)[:, :-1], expected[:, :-1], rtol=1e-4, atol=1e-5)
    model['attn'].config.hidden_size = 16
    assert config.hidden_size == 16
    model['attn'].config = other = copy.copy(config)
    model['attn'].config = model['attn'].config
    mmgate.restore_attention(model)
    assert model['attn'].config is other


REFUSED: dict[str, tuple[Callable[[], Any], str]] = {
    'pooled queries': (lambda: build(POOLED, query_stride=(2, 2)), r'pools its queries, query_stride=\(2, 2\)'),
    'masks of another implementation': (
        lambda: of_class(implementation='flash_attention_2'),
        r"attends by 'flash_attention_2'.* call model.set_attn_implementation\('mm",
    ),
    'like a declared class': (
        lambda: of_class(OtherAttention),
        r'attn is a .*\.OtherAttention, .* declare it: .*OtherAttention, like=Theirs',
    ),
    'like none': (
        lambda: nn.ModuleDict(dict(attn=type('BareAttention', (nn.Module,), {})())),
        r'No adapter knows that class.*, BareAttention, like=\.\.\.',
    ),
    'shared heads of keys': (
        lambda: of_class(GroupedAttention, k_proj=nn.Linear(C, 16), v_proj=nn.Linear(C, 16)),
        'as many heads of keys as of queries, .*GroupedAttention have 32, 16, 16',
    ),
}


@pytest.mark.parametrize('case', REFUSED)
def test_attention_that_no_gate_fits_is_listed_and_refused(case: str) -> None:
    make, words = REFUSED[case]
    model = make()
    if case.startswith('like'):
        (listed,) = mmgate.list_attention(model)
        assert listed.path == 'attn' and not listed.gates and not gates_for(model['attn'])
    with pytest.raises(ConfigError, match=words):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))


def test_another_source_than_the_tables_is_refused_until_somebody_answers_for_it() -> None:
    class Changed(ViTAttention):
        __module__ = ViTAttention.__module__
        __qualname__ = 'ViTAttention'

        def forward(self, hidden_states: Tensor) -> Any:
            return super().forward(hidden_states)

    assert fingerprint(ViTAttention) == CLASSES['modeling_vit.ViTAttention'][1] != fingerprint(Changed)
    model = of_class(Changed)
    with pytest.raises(ConfigError, match=r'forward of .*ViTAttention in transformers .* is not .* class .*SelfAtt'):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))

    @mmgate.adapts(mmgate.DenseGate, Changed)
    class Mine(SelfAttention):
        pass

    assert mmgate.swap_attention(model, dict(PLUG, path='attn')) == ['attn'] and isinstance(model['attn'], Mine)
    _ADAPTERS.pop((mmgate.DenseGate, Changed))  # which would be in the page's table, by its name


def test_a_host_that_passes_over_the_gate_is_an_error() -> None:
    model = of_class(Eager)
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    with pytest.raises(RuntimeError, match='Eager has not called the attention function of its config'):
        run(model, dict(hidden_states=torch.randn(2, TOKENS, C)))


@pytest.mark.parametrize('name, gate', [
    ('modeling_vit.ViTAttention', 'plug'),
    ('modeling_detr.DetrCrossAttention', 'sdpa_g5'),
])  # fmt: skip
def test_a_gated_attention_is_compiled_as_one_graph(name: str, gate: str) -> None:
    model, fed = build(name), feed(name)
    mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter, std=0.1)
    expected = run(model, fed)
    torch.compiler.reset()
    compiled = torch.compile(model['attn'], backend='eager', fullgraph=True)
    torch.testing.assert_close(first(compiled(**fed)), expected, rtol=1e-4, atol=1e-5)

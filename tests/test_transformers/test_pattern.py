"""transformers' attentions that are recognised by what their forward does: identity, gradients, and refusals."""

from __future__ import annotations

import copy
import inspect
import re
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

import transformers
from helpers.interface_models import HEADS, NAMES, REFUSED, ROTATED, TOKENS, C, build, feed, first, kind_of
from transformers import PretrainedConfig
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import mmgate
from mmgate.errors import ConfigError
from mmgate.gates.base.gating import Adapter
from mmgate.hosts import gates_for
from mmgate.hosts.interface import goes_through_interface, read_forward

PLUG = dict(type='PLuGMultiheadAttention')
GATES: dict[str, dict[str, Any]] = {
    'plug': PLUG,
    'sdpa': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu'),
    'sdpa_g5': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu', position='G5'),
    'sdpa_narrow': dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu', gate_channels=3),
}
NARROWED = ('SamAttention', 'SamHQAttention', 'Sam2Attention', 'Sam2VideoAttention', 'EdgeTamAttention')
NARROWED += ('Sam3TrackerAttention',)  # whose heads together are narrower than their output


def run(model: Any, fed: dict[str, Any]) -> Tensor:
    return first(model['attn'](**fed))


def known(name: str) -> Any:
    """Mark a class that this transformers does not have."""
    try:
        kind_of(name)
    except (ImportError, AttributeError):
        return pytest.param(name, marks=pytest.mark.skip(f'transformers {transformers.__version__} has no {name}'))
    return name


FITTING = [known(name) for name in NAMES if name not in REFUSED]


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('name', FITTING)
def test_a_gated_class_computes_what_its_host_does(name: str, gate: str) -> None:
    """So do its gradients, those of what it reads among them; then its gate learns, and comes off."""
    model, fed = build(name), feed(name)
    vanilla = copy.deepcopy(model)
    if gate == 'sdpa_g5' and name in NARROWED:
        with pytest.raises(ConfigError, match='goes from 16 to 32 channels'):
            mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
        return
    mmgate.swap_attention(model, dict(GATES[gate], path='attn'))
    assert isinstance(model['attn'], Adapter)
    model = copy.deepcopy(model)
    gradients = []
    for one in (model, vanilla):
        states = {key: value.clone().requires_grad_() for key, value in fed.items() if is_states(value)}
        output = run(one, {**fed, **states})
        output.square().sum().backward()
        found = {key: parameter.grad for key, parameter in one.named_parameters() if parameter.grad is not None}
        gradients.append((output.detach(), {**found, **{key: value.grad for key, value in states.items()}}))
    torch.testing.assert_close(gradients[0][0], gradients[1][0], rtol=1e-4, atol=1e-4)
    for key, value in gradients[1][1].items():
        torch.testing.assert_close(
            gradients[0][1][key], value, rtol=1e-3, atol=1e-3, msg=lambda m, k=key: f'{name} {k}: {m}'
        )
    gates = mmgate.gate_parameters(model)
    assert any(parameter.grad is not None and parameter.grad.abs().sum() > 0 for parameter in gates.values())
    for parameter in gates.values():
        nn.init.normal_(parameter)
    assert (run(model, fed) - gradients[1][0]).abs().max() > 1e-3
    assert not [part for part in model.modules() if {'noted_input', 'noted_finish'} & set(vars(part))]
    mmgate.restore_attention(model)
    assert torch.equal(run(model, fed), gradients[1][0]) and type(model['attn']) is type(vanilla['attn'])


def is_states(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


@pytest.mark.parametrize('name', [known(name) for name in REFUSED])
def test_what_does_not_pass_is_refused_with_what_was_found(name: str) -> None:
    model = build(name)
    assert not gates_for(model['attn']) and not [one for one in mmgate.list_attention(model) if one.gates]
    with pytest.raises(ConfigError, match=rf'which PLuG\w+ does not replace. A {name} {re.escape(REFUSED[name])}\.'):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))


@pytest.mark.parametrize('gate', ['DifferentialMultiheadAttention', 'DifferentialV2MultiheadAttention'])
@pytest.mark.parametrize('name', [known(name) for name in ROTATED])
def test_gates_that_attend_twice_refuse_rotated_heads(name: str, gate: str) -> None:
    with pytest.raises(ConfigError, match=f'{name} rotates their halves together .* apply_rotary_pos_emb'):
        mmgate.swap_attention(build(name), dict(type=gate, path='attn'))


def test_every_vision_model_of_the_interface_is_in_the_table() -> None:
    """Of the modules that the table names, no class is left out."""
    for module in dict.fromkeys(NAMES.values()):
        folder = module if module in dir(transformers.models) else module.split('_')[0]
        try:
            found = import_module(f'transformers.models.{folder}.modeling_{module}')
        except ImportError:
            continue
        for name, kind in inspect.getmembers(found, inspect.isclass):
            if kind.__module__ == found.__name__ and issubclass(kind, nn.Module) and goes_through_interface(kind):
                assert name in NAMES, f'{module}.{name}'


def test_pooled_queries_are_refused() -> None:
    """SAM 2 pools the queries of some of its layers, whose gate would have more tokens than queries."""
    with pytest.raises(ConfigError, match='attends between other tokens than it projects: .* without pooled queries'):
        mmgate.swap_attention(build('Sam2MultiScaleAttention', query_stride=(2, 2)), dict(PLUG, path='attn'))


class Theirs(nn.Module):
    """An attention of somebody's, by names of their own, causal where it is told no mask."""

    def __init__(self, kv_heads: int = HEADS, gain: float = 1.0) -> None:
        super().__init__()
        self.config = PretrainedConfig()
        self.config._attn_implementation = 'sdpa'
        self.is_causal = True
        self.rate = nn.Dropout(0.1)
        self.num_key_value_groups = HEADS // kv_heads
        self.qk_norm = nn.LayerNorm(C // HEADS)
        self.to_q, self.to_k = nn.Linear(C, C), nn.Linear(C, kv_heads * C // HEADS)
        self.to_v, self.to_out = nn.Linear(C, kv_heads * C // HEADS), nn.Linear(C, C)

    def forward(self, hidden_states: Tensor, attention_mask: Tensor | None = None, cache: Any = None) -> Any:
        shape = (*hidden_states.shape[:-1], -1, C // HEADS)
        q = self.qk_norm(self.to_q(hidden_states).view(shape)).transpose(1, 2)
        k = self.qk_norm(self.to_k(hidden_states).view(shape)).transpose(1, 2)
        v = self.to_v(hidden_states).view(shape).transpose(1, 2)
        if cache is not None:
            k, v = torch.cat([cache, k], 2), torch.cat([cache, v], 2)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, None)
        rate = 0.0 if not self.training else self.rate.p
        out, weights = attend(self, q, k, v, attention_mask, dropout=rate, scaling=0.5)
        return self.to_out(out.flatten(2)), weights


def test_a_class_of_ones_own_is_recognised() -> None:
    """With norms of heads, another scale, and causal where it has no mask."""
    model: Any = nn.ModuleDict(dict(attn=Theirs())).eval()
    x = torch.randn(2, TOKENS, C)
    expected = run(model, dict(hidden_states=x))
    assert read_forward(model['attn']).projections == ('to_q', 'to_k', 'to_v')
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    torch.testing.assert_close(run(model, dict(hidden_states=x)), expected, rtol=1e-4, atol=1e-5)
    changed = x.clone()
    changed[:, -1] += 1.0
    torch.testing.assert_close(run(model, dict(hidden_states=changed))[:, :-1], expected[:, :-1], rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match='call the model without a cache'):
        run(model, dict(hidden_states=x, cache=torch.randn(2, HEADS, 3, C // HEADS)))


def test_shared_heads_of_keys_are_refused() -> None:
    model: Any = nn.ModuleDict(dict(attn=Theirs(kv_heads=2)))
    with pytest.raises(ConfigError, match='A Theirs has 2 heads of keys and 2 of values for 4 of queries'):
        mmgate.swap_attention(model, dict(PLUG, path='attn'))


def test_gates_beside_adapters_of_low_rank() -> None:
    """A projection that something is put around after the swap, or before and taken off, is still read."""

    class Around(nn.Module):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__()
            self.base_layer, self.down = base, nn.Linear(C, 2, bias=False)
            self.in_features, self.out_features, self.weight = base.in_features, base.out_features, base.weight
            self.up = nn.Linear(2, C, bias=False)
            nn.init.zeros_(self.up.weight)

        def forward(self, x: Tensor) -> Tensor:
            return self.base_layer(x) + self.up(self.down(x))

    model, fed = build('ViTAttention'), feed('ViTAttention')
    expected = run(model, fed)
    mmgate.swap_attention(model, dict(PLUG, path='attn'))
    model['attn'].q_proj = Around(model['attn'].q_proj)
    torch.testing.assert_close(run(model, fed), expected, rtol=1e-4, atol=1e-4)
    for kind in ('plug', 'sdpa_g5'):
        gated = build('ViTAttention')
        for name in ('q_proj', 'o_proj'):
            setattr(gated['attn'], name, Around(getattr(gated['attn'], name)))
        mmgate.swap_attention(gated, dict(GATES[kind], path='attn'))
        for parameter in mmgate.gate_parameters(gated).values():
            nn.init.normal_(parameter)
        changed = run(gated, fed)
        assert not torch.allclose(changed, expected, atol=1e-3)
        for name in ('q_proj', 'o_proj'):
            setattr(gated['attn'], name, getattr(gated['attn'], name).base_layer)
        torch.testing.assert_close(run(gated, fed), changed, rtol=1e-4, atol=1e-4)
        gated['attn'].o_proj = Around(gated['attn'].o_proj)
        torch.testing.assert_close(run(gated, fed), changed, rtol=1e-4, atol=1e-4)

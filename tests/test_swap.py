"""The swap mechanism: what a rule gates and leaves, what it refuses with the model as it was, and what is listed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from mmcv.cnn.bricks.transformer import MultiheadAttention as mmcv_attention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models import SwinTransformer
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate import adapts, gate_parameters, list_attention, restore_attention, swap_attention
from mmgate.adapter import Adapter
from mmgate.errors import ConfigError
from mmgate.gate import Gate, Sizes
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.gates.plug import PLuGDeformableGate
from mmgate.hosts.table import _ADAPTERS

RULE = dict(type='PLuGMultiScaleDeformableAttention', path='encoder.layers.*.self_attn')
FIRST, SECOND = (dict(RULE, path=f'layers.{i}.attn') for i in range(2))  # one module
DENSE = dict(type='PLuGMultiheadAttention', path='other.mha')


class Host(nn.Module):
    """A model with two deformable attentions, one of them shared, and with dense attention, one of mmcv's wrapper."""

    def __init__(self) -> None:
        super().__init__()
        shared = MultiScaleDeformableAttention(16, 4, 2, 3)
        self.layers = nn.ModuleList([nn.ModuleDict(dict(attn=shared)), nn.ModuleDict(dict(attn=shared))])
        self.other = nn.ModuleDict(
            dict(
                attn=MultiScaleDeformableAttention(16, 4, 2, 3),
                mha=nn.MultiheadAttention(16, 4),
                odd=nn.MultiheadAttention(16, 4, add_bias_kv=True),
                wrapped=mmcv_attention(16, 4),
                linear=nn.Linear(2, 2),
            )
        )


def test_swap_keeps_tensors_mode_device_dtype_and_sharing() -> None:
    model = Host().double().eval()
    model.other.attn.value_proj.weight.requires_grad_(False)
    kept, modules = dict(model.named_parameters()), dict(model.named_modules(remove_duplicate=False))
    names = swap_attention(model, dict(RULE, path=['layers.**.attn', 'other.attn'], granularity='head'))
    assert names == ['layers.0.attn', 'layers.1.attn', 'other.attn']
    assert model.layers[0].attn is model.layers[1].attn
    assert all(model.get_submodule(name) is module for name, module in modules.items())
    assert isinstance(model.other.attn, MultiScaleDeformableAttention)
    gate = model.other.attn.gate
    assert type(gate) is PLuGDeformableGate and not any(module.training for module in gate.modules())
    assert gate.gate_proj.weight.dtype == torch.float64
    assert gate.granularity == 'head'
    assert not model.other.attn.value_proj.weight.requires_grad
    for name, parameter in kept.items():
        assert model.get_parameter(name) is parameter, name
    model = Host()
    assert swap_attention(model, [FIRST, SECOND]) == ['layers.0.attn', 'layers.1.attn']
    assert model.layers[0].attn is model.layers[1].attn


INVENTORY = 'other.attn: mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttention'
OTHERS = r'\nA gate of your own .*: name the module in custom_imports, '
TYPE = r'is not registered. Did you mean\n  PLuGMultiheadAttention\n  (\w+\n  ){,3}\w+' + OTHERS
GATES = r'is not registered. The gates are(\n  \w+){10,}' + OTHERS
EARLIER = r"claimed by attention\[0\] \(path='other.attn', type='PLuGMultiScaleDeformableAttention'\) already"
NO_HOST = (
    r'other.linear is a torch.nn.modules.linear.Linear, which PLuGMultiheadAttention does not replace\. '
    r'[^\n]+(\n  [^\n]+)*\n  mmcv.cnn.bricks.transformer.MultiheadAttention(\n  [^\n]+)*others, see docs/gates'
)


@pytest.mark.parametrize(
    'rules, error, message',
    [
        (dict(RULE, path='encoder.*'), ValueError, f"'encoder.*' matches no module.*{INVENTORY}"),
        (dict(RULE, path=['other.attn', 'nope']), ValueError, "'nope' matches no module"),
        (dict(RULE, path='other.mha'), ValueError, 'other.mha is a torch.nn.modules.activation.MultiheadAttention'),
        (dict(DENSE, path='other.linear'), ValueError, NO_HOST),
        (dict(RULE, path='other.attn', granularty='head'), TypeError, 'no option granularty; it has activation'),
        (dict(RULE, path='other.attn', embed_dims=8), TypeError, 'sizes are those of the module'),
        (dict(RULE, path='other.attn', granularity='x'), ValueError, 'choose one of'),
        (dict(DENSE, type='SDPAGatedMultiheadAttention', scale='2.0'), TypeError, r'^attention\[0\]: .* scale: float'),
        (dict(DENSE, type='SDPAGatedMultiheadAttention', scale=[2.0]), TypeError, r'scale: float, got scale=\[2.0\]'),
        (dict(DENSE, type='mmgate.PLuGMultiHeadAttention'), ValueError, TYPE),
        (dict(DENSE, type='X'), ValueError, GATES),
        (dict(RULE, path='other.mha.**'), ValueError, r"fits nothing that 'other.mha.\*\*' matches"),
        (dict(DENSE, path='other.odd'), ValueError, 'does not replace other.odd: .*add_bias_kv'),
        (dict(DENSE, path='other.odd.**'), ValueError, 'fits nothing .*odd: .*add_bias_kv'),
        (dict(DENSE, path=['other.wrapped', '*.wrapped.attn']), ValueError, 'wrapped.attn lies inside other.wrapped'),
        (dict(RULE, type='mmdet.ResNet'), TypeError, 'backbones.resnet.ResNet is not a gate.*mmgate.adapts'),
        (dict(RULE, type=nn.Linear), TypeError, 'torch.nn.modules.linear.Linear is not a gate'),
        (dict(RULE, type=5), TypeError, '5 is not a gate'),
        (dict(RULE, type=dict(type='SAGAAttention')), TypeError, 'is not a gate'),
        ([dict(RULE, path='other.attn'), dict(RULE, path='*.attn')], ValueError, EARLIER),
        (
            [FIRST, dict(SECOND, granularity='head')],
            ValueError,
            r'layers.1.attn is shared, and attention\[0\] .* gates it otherwise',
        ),
        ([FIRST, dict(SECOND, type='MultiScaleDeformableAttention')], ValueError, 'gates it otherwise'),
        (dict(path='other.attn'), TypeError, "needs the keys 'path' and 'type'"),
        ([], TypeError, 'must be a rule'),
        ('other.attn', TypeError, 'must be a rule'),
    ],
)
def test_bad_rules_change_nothing(rules: Any, error: type[Exception], message: str) -> None:
    model = Host().requires_grad_(False)
    before = [type(m) for m in model.modules()]
    attributes = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(error) as info:
        swap_attention(model, rules)
    assert re.search(message, str(info.value), re.DOTALL)
    assert isinstance(info.value, ConfigError)
    assert [type(m) for m in model.modules()] == before
    assert [dict(vars(m)) for m in model.modules()] == attributes
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_a_pattern_that_ends_with_two_stars_means_what_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of mmcv's wrapper and the module in it the outer; what the gate refuses is left as it was, and named."""
    said: list[str] = []
    monkeypatch.setattr('mmgate.plan.log', said.append)
    model = Host()
    assert swap_attention(model, dict(RULE, path='**')) == ['layers.0.attn', 'layers.1.attn', 'other.attn']
    model = Host().requires_grad_(False)
    assert swap_attention(model, dict(DENSE, path='**')) == ['other.mha', 'other.wrapped']
    assert len(said) == 1 and said[0].startswith('mmgate: attention[0] leaves other.odd: ') and 'add_bias_kv' in said[0]
    assert not any(parameter.requires_grad for parameter in model.other.odd.parameters())


TWICE = r'other.attn is gated already, by a PLuGDeformableGate\. .* mmgate.restore_attention\(model\)'


@pytest.mark.parametrize('gate', ['PLuGMultiScaleDeformableAttention', 'MultiScaleDeformableAttention'])
def test_what_is_gated_already_is_not_gated_again(gate: str) -> None:
    model = Host()
    swap_attention(model, dict(RULE, path='other.attn'))
    first = model.other.attn.gate
    with pytest.raises(ConfigError, match=TWICE):
        swap_attention(model, dict(type=gate, path='other.attn'))
    with pytest.raises(ConfigError, match='fits nothing .*\n  other.attn is gated[^\n]*\nThe attention modules'):
        swap_attention(model, dict(type=gate, path='other.**'))
    assert swap_attention(model, dict(type=gate, path='**')) == ['layers.0.attn', 'layers.1.attn']
    assert model.other.attn.gate is first
    restore_attention(model)
    assert swap_attention(model, dict(type=gate, path='other.attn')) == ['other.attn']


def test_a_host_with_a_gate_in_it_is_gated_already() -> None:
    model = nn.ModuleDict(dict(attn=SpatialReductionAttention(16, 4, sr_ratio=2)))
    rule = dict(type='PLuGMultiheadAttention', path='attn')
    swap_attention(model, rule)
    for path in ('attn', 'attn.attn'):
        with pytest.raises(ConfigError, match=f'{path} is gated already'):
            swap_attention(model, dict(rule, path=path))


@pytest.fixture
def _own_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the adapters of a test."""
    monkeypatch.setattr('mmgate.hosts.table._ADAPTERS', dict(_ADAPTERS))


@pytest.mark.usefixtures('_own_adapters')
def test_a_subclass_of_a_host_is_declared() -> None:
    class Mine(MultiScaleDeformableAttention):
        pass

    model = Host()
    model.other['attn'] = Mine(16, 4, 2, 3)
    with pytest.raises(ValueError, match=r'other.attn is a .*\.Mine, which .*adapts\(PLuG.*, Mine, like=MultiScale'):
        swap_attention(model, dict(RULE, path='other.attn'))
    adapts(PLuGMultiScaleDeformableAttention, Mine, like=MultiScaleDeformableAttention)
    assert swap_attention(model, dict(RULE, path='other.attn')) == ['other.attn']


class Scaled(Gate):
    """A gate of somebody else, of a kind of its own, not registered."""

    def __init__(self, sizes: Sizes, *, factor: float) -> None:
        super().__init__(sizes)
        self.factor = factor


class Wrapped(nn.Module):
    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return query


class GatedWrapped(Adapter):
    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        return Sizes(16, 4)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return self.gate.factor * super().forward(query)


@pytest.mark.usefixtures('_own_adapters')
def test_a_gate_and_a_host_of_somebody_else() -> None:
    """Options may lack a default or be those of the base behind ``**options``; an integer is a float."""

    class Loud(Scaled):
        def __init__(self, sizes: Sizes, *, volume: float = 1.0, **options: float) -> None:
            super().__init__(sizes, **options)
            self.factor *= volume

    assert adapts(Scaled, Wrapped)(GatedWrapped) is GatedWrapped
    model, rule = nn.ModuleDict(dict(layer=Wrapped())), dict(path='layer', type=Loud)
    with pytest.raises(TypeError, match='cannot be made without factor; write it'):
        swap_attention(model, rule)
    with pytest.raises(TypeError, match=r'Loud has no option sizes; it has factor, volume'):
        swap_attention(model, dict(rule, factor=2, sizes=8))
    swap_attention(model, dict(rule, factor=2, volume=3.0))
    assert model['layer'](torch.ones(1)) == 6 and isinstance(model['layer'], Wrapped)


@pytest.mark.usefixtures('_own_adapters')
def test_an_error_in_a_gates_constructor_or_adapter_is_not_taken_for_a_bad_rule() -> None:
    class Buggy(Scaled):
        def __init__(self, sizes: Sizes, *, factor: float = 0.5) -> None:
            super().__init__(sizes, factor=factor)
            len(self.factor)

    class Filled(GatedWrapped):
        @classmethod
        def sizes(cls, host: Any) -> Sizes:
            return Sizes(**dict(channels=8, heads=2, width=4))

    for adapter, kind, words in (
        (GatedWrapped, Buggy, "object of type 'float' has no len()"),
        (Filled, Scaled, "unexpected keyword argument 'width'"),
    ):
        adapts(Scaled, Wrapped)(adapter)
        with pytest.raises(TypeError, match=words) as info:
            swap_attention(nn.ModuleDict(dict(layer=Wrapped())), dict(path='layer', type=kind, factor=8.0))
        assert not isinstance(info.value, ConfigError)


class Named(nn.MultiheadAttention):
    """Attention with a method of the gate's name."""

    def gate(self) -> None:
        pass


@pytest.mark.usefixtures('_own_adapters')
@pytest.mark.parametrize(
    'host, name, taken',
    [
        (nn.MultiheadAttention, 'gate', 0),
        (nn.MultiheadAttention, 'gate', nn.Linear(2, 2)),
        (nn.MultiheadAttention, 'gate', nn.Parameter(torch.zeros(1))),
        (Named, 'gate', None),
        (nn.MultiheadAttention, 'project', nn.Linear(2, 2)),
        (nn.MultiheadAttention, 'gates', nn.Linear(2, 2)),
        (nn.MultiheadAttention, 'gating', nn.Linear(2, 2)),
    ],
    ids=['attribute', 'child', 'parameter', 'method', 'project', 'gates', 'gating'],
)
def test_a_host_whose_names_a_gate_or_adapter_would_hide_is_refused(host: Any, name: str, taken: Any) -> None:
    """A class's method comes before a child of the name, for the host's own code, too."""
    adapts(DenseGate, Named, like=nn.MultiheadAttention)
    model: Any = nn.ModuleDict(dict(attn=host(16, 4)))
    if taken is not None:
        setattr(model['attn'], name, taken)
    before = dict(vars(model['attn']))
    with pytest.raises(ConfigError, match=f"does not replace attn: .*'{name}'"):
        swap_attention(model, dict(path='attn', type='PLuGMultiheadAttention'))
    assert vars(model['attn']) == before


@pytest.mark.usefixtures('_own_adapters')
def test_adapters_that_cannot_be_are_refused() -> None:
    class Silent(DenseAdapter):
        @classmethod
        def sizes(cls, host: nn.Bilinear) -> Sizes:  # type: ignore[override]
            return Sizes(host.out_features, 1)

    adapts(DenseGate, nn.Bilinear)(Silent)
    with pytest.raises(TypeError, match='Silent has no forward, which calls the gate; write it'):
        swap_attention(nn.ModuleDict(dict(host=nn.Bilinear(2, 2, 4))), dict(path='host', type='PLuGMultiheadAttention'))
    with pytest.raises(TypeError, match="needs classes, got 'PLuG'"):
        adapts('PLuG', Wrapped)
    with pytest.raises(TypeError, match='needs a host class'):
        adapts(PLuGMultiScaleDeformableAttention)
    words = r'mmgate.gates.plug.PLuG.* has no adapter for torch.nn.modules.linear.Linear; it replaces mmcv.ops'
    with pytest.raises(LookupError, match=words):
        adapts(PLuGMultiScaleDeformableAttention, Wrapped, like=nn.Linear)


def test_attention_is_listed_from_python() -> None:
    """Of any model: paths, each of a shared module's, sizes by its package's names, and gates that fit or are there."""
    shared = MultiScaleDeformableAttention(16, 4, 2, 3)
    model = nn.ModuleDict(dict(a=shared, b=nn.ModuleDict(dict(c=shared)), layer=nn.TransformerEncoderLayer(16, 2, 32)))
    *first, found = list_attention(model)
    assert [one.path for one in first] == ['a', 'b.c']
    assert (found.path, found.class_name, found.gate) == ('layer.self_attn', 'MultiheadAttention', None)
    assert found.sizes == dict(embed_dim=16, num_heads=2, head_dim=8) and 'PLuGMultiheadAttention' in found.gates
    swap_attention(model, dict(path=found.path, type='PLuGMultiheadAttention'))
    *_, found = list_attention(model)
    assert (found.class_name, found.gate) == ('MultiheadAttention', 'PLuGGate')


def test_a_model_that_is_an_attention_itself_is_named_in_a_module() -> None:
    rule = dict(path='**', type='PLuGMultiheadAttention')
    with pytest.raises(ConfigError, match=r"no path names \(nn.ModuleDict\(dict\(attn=model\)\) makes it 'attn'"):
        swap_attention(nn.MultiheadAttention(16, 4), rule)
    assert swap_attention(nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 4))), rule) == ['attn']


UNKNOWN = 'Give the name with its scope'


@pytest.mark.parametrize(
    'host, words',
    [
        ({}, r"mmgate.Gated needs host, .* such as host='mmdet.DeformableDETR'"),
        *((dict(host=host), UNKNOWN) for host in ('mmdet.DeformablDETR', 'DeformablDETR', 'mmdet.OwnSwin')),
    ],
    ids=str,
)
def test_a_gated_model_without_a_host_is_told_the_remedy(host: dict[str, str], words: str) -> None:
    init_default_scope('mmdet')
    with pytest.raises(ConfigError, match=words):
        MODELS.build(dict(type='mmgate.Gated', attention=RULE, **host))


@MODELS.register_module()
class OwnSwin(SwinTransformer):
    """A host that mmengine's own registry knows."""


@pytest.mark.parametrize('host', ['mmdet.SwinTransformer', 'SwinTransformer', SwinTransformer, 'OwnSwin', OwnSwin])
@pytest.mark.parametrize('scope', [{}, dict(_scope_='mmdet')], ids=['default scope', 'scope of its own'])
def test_a_host_is_named_as_a_type(host: str | type[nn.Module], scope: dict[str, str]) -> None:
    init_default_scope('mmengine' if scope else 'mmdet')
    rule = dict(type='mmgate.PLuGMultiheadAttention', path='**')
    sizes = dict(embed_dims=8, depths=(1, 1, 1, 1), num_heads=(1, 1, 1, 1), **scope)
    model = MODELS.build(dict(type='mmgate.Gated', host=host, attention=rule, **sizes))
    assert type(model) is type(MODELS.build(dict(type=host, **sizes))) and gate_parameters(model)
    init_default_scope('mmdet')

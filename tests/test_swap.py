"""The swap mechanism, and PLuG against vanilla in every Deformable DETR variant."""

from __future__ import annotations

import logging
import re
from typing import Any

import pytest
import torch
from helpers import zoo
from mmcv.cnn.bricks.transformer import MultiheadAttention as mmcv_attention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmengine.config import Config
from mmengine.hub import get_config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate import adapts, list_attention, restore_attention, swap_attention
from mmgate.adapter import Adapter
from mmgate.errors import ConfigError
from mmgate.gate import Gate, Sizes
from mmgate.gates import PLuGMultiScaleDeformableAttention
from mmgate.gates.base.dense import DenseAdapter, DenseGate
from mmgate.gates.plug import PLuGDeformableGate
from mmgate.hosts.table import _ADAPTERS

VARIANTS = {  # name: parameters of the gates that PLuG adds to it
    'singlescale': 24_720,
    'singlescale-dc5': 24_720,
    '': 98_736,
    'refine': 98_736,
    'refine-twostage': 49_368,
    'encoder': 49_368,
    'decoder': 49_368,
}
RULE = dict(type='PLuGMultiScaleDeformableAttention', path='encoder.layers.*.self_attn')
FIRST, SECOND = (dict(RULE, path=f'layers.{i}.attn') for i in range(2))  # one module


@pytest.fixture(autouse=True)
def _scope() -> None:
    init_default_scope('mmdet')
    logging.getLogger('mmengine').setLevel(logging.WARNING)


def config(variant: str, gated: bool) -> str:
    """Return where the config of a variant stands, or that of its vanilla partner."""
    infix = f'-{variant}' if variant and (gated or variant not in ('encoder', 'decoder')) else ''
    name = f'deformable-detr{infix}_r50_8xb4-50e_coco.py'
    return f'mmgate::plug/deformable_detr/plug-{name}' if gated else f'mmgate::vanilla/deformable_detr/{name}'


@pytest.mark.parametrize('variant', VARIANTS)
def test_a_swap_adds_the_parameters_of_the_paper(variant: str) -> None:
    with torch.device('meta'):
        vanilla, gated = (MODELS.build(get_config(config(variant, g)).model) for g in (False, True))
    count = [sum(p.numel() for p in m.parameters() if p.requires_grad) for m in (vanilla, gated)]
    assert count[1] - count[0] == VARIANTS[variant]
    expected = {'singlescale': 33.841, 'singlescale-dc5': 33.841, 'refine': 40.609, 'refine-twostage': 40.938}
    assert round(count[0] / 1e6, 3) == expected.get(variant, 39.843)


@pytest.mark.parametrize(
    'variant',
    [pytest.param(x, marks=[pytest.mark.slow] * (x not in ('singlescale', '', 'refine-twostage'))) for x in VARIANTS],
)
def test_identity_start_through_the_runners_path(variant: str) -> None:
    """Build, init_weights, load a vanilla checkpoint: same losses, and only gate parameters missing."""
    vanilla, gated = (zoo.build(zoo.reduced(config(variant, g))) for g in (False, True))
    assert type(gated) is type(vanilla)
    keys = gated.load_state_dict(vanilla.state_dict(), strict=False)
    assert not keys.unexpected_keys and keys.missing_keys
    assert all('.gml.' in key or '.gate_proj.' in key for key in keys.missing_keys)
    data = zoo.batch(Config(dict(model={}, default_scope='mmdet')))
    vanilla.train()
    gated.train()
    expected, losses = (model(**data, mode='loss') for model in (vanilla, gated))
    for name, loss in expected.items():
        torch.testing.assert_close(losses[name], loss, rtol=0, atol=1e-6 * max(1.0, loss.abs().item()))

    before = {name: p.detach().clone() for name, p in gated.named_parameters() if '.gml.' in name}
    optimizer = torch.optim.AdamW([p for p in gated.parameters() if p.requires_grad], lr=1e-3, weight_decay=0)
    sum(loss for name, loss in losses.items()).backward()
    optimizer.step()
    for name, parameter in gated.named_parameters():
        if '.gml.' in name:  # gA moves at the first step; gB has no gradient while gA is 0
            assert parameter[0] != before[name][0], f'{name} did not move'


class Host(nn.Module):
    """A model with two deformable attentions, one of them shared, and an attention that no gate fits."""

    def __init__(self) -> None:
        super().__init__()
        shared = MultiScaleDeformableAttention(16, 4, 2, 3)
        self.layers = nn.ModuleList([nn.ModuleDict(dict(attn=shared)), nn.ModuleDict(dict(attn=shared))])
        self.other = nn.ModuleDict(
            dict(attn=MultiScaleDeformableAttention(16, 4, 2, 3), mha=nn.MultiheadAttention(16, 4))
        )


def test_swap_keeps_tensors_mode_device_dtype_and_sharing() -> None:
    model = Host().double().eval()
    model.other.attn.value_proj.weight.requires_grad_(False)
    kept, modules = dict(model.named_parameters()), dict(model.named_modules(remove_duplicate=False))
    names = swap_attention(model, dict(RULE, path='**.attn', granularity='head'))
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


def test_unset_options_are_the_papers() -> None:
    model = Host()
    swap_attention(model, dict(RULE, path='other.attn'))
    gate = model.other.attn.gate
    assert (gate.granularity, gate.gml.variant, gate.gml.activation) == ('head_level', 'product', 'none')
    assert gate.residual


INVENTORY = 'other.attn: mmcv.ops.multi_scale_deform_attn.MultiScaleDeformableAttention'
OTHERS = r'\nA gate of your own .*: name the module in custom_imports, '
TYPE = r'is not registered. Did you mean\n  PLuGMultiheadAttention\n  (\w+\n  ){,3}\w+' + OTHERS
GATES = r'is not registered. The gates are(\n  \w+){10,}' + OTHERS
EARLIER = r"claimed by attention\[0\] \(path='other.attn', type='PLuGMultiScaleDeformableAttention'\) already"


@pytest.mark.parametrize(
    'rules, error, message',
    [
        (dict(RULE, path='encoder.*'), ValueError, f"'encoder.*' matches no module.*{INVENTORY}"),
        (dict(RULE, path=['other.attn', 'nope']), ValueError, "'nope' matches no module"),
        (dict(RULE, path='other.mha'), ValueError, 'other.mha is a torch.nn.modules.activation.MultiheadAttention'),
        (dict(RULE, path='other.attn', granularty='head'), TypeError, 'no option granularty; it has activation'),
        (dict(RULE, path='other.attn', embed_dims=8), TypeError, 'sizes are those of the module'),
        (dict(RULE, path='other.attn', granularity='x'), ValueError, 'choose one of'),
        (dict(path='other.mha', type='mmgate.PLuGMultiHeadAttention'), ValueError, TYPE),
        (dict(path='other.mha', type='X'), ValueError, GATES),
        (dict(RULE, path='other.mha.**'), ValueError, r"fits nothing that 'other.mha.\*\*' matches"),
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
        (dict(RULE, path=[]), TypeError, r'attention\[0\].path must be a pattern'),
        (dict(RULE, path=None), TypeError, r'attention\[0\].path must be a pattern'),
        ([], TypeError, 'must be a rule'),
        ('other.attn', TypeError, 'must be a rule'),
    ],
)
def test_bad_rules_change_nothing(rules, error: type, message: str) -> None:
    model = Host()
    before = [type(m) for m in model.modules()]
    attributes = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(error) as info:
        swap_attention(model, rules)
    assert re.search(message, str(info.value), re.DOTALL)
    assert [type(m) for m in model.modules()] == before
    assert [dict(vars(m)) for m in model.modules()] == attributes


def test_pattern_star_stays_within_one_name() -> None:
    assert swap_attention(Host(), dict(RULE, path='layers.*.attn')) == ['layers.0.attn', 'layers.1.attn']
    assert swap_attention(Host(), dict(RULE, path='*.attn')) == ['other.attn']


def test_pattern_that_ends_with_two_stars_means_what_fits() -> None:
    model = Host()
    assert swap_attention(model, dict(RULE, path='**')) == ['layers.0.attn', 'layers.1.attn', 'other.attn']
    model = nn.ModuleDict(dict(wrapped=mmcv_attention(16, 4), plain=nn.MultiheadAttention(16, 4)))
    rule = dict(type='PLuGMultiheadAttention', path='**')  # the outer of mmcv's wrapper and the module in it
    assert swap_attention(model, rule) == ['wrapped', 'plain']


def test_a_host_and_what_lies_inside_it_are_not_both_replaced() -> None:
    model = nn.ModuleDict(dict(attn=mmcv_attention(16, 4)))
    with pytest.raises(ValueError, match='attn.attn lies inside attn'):
        swap_attention(model, dict(type='PLuGMultiheadAttention', path='**.attn'))
    assert type(model['attn']) is mmcv_attention


def test_whatever_fits_leaves_out_what_the_gate_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    """And says so."""
    said: list[str] = []
    monkeypatch.setattr('mmgate.plan.log', said.append)
    model = nn.ModuleDict(dict(odd=nn.MultiheadAttention(16, 4, add_bias_kv=True), plain=nn.MultiheadAttention(16, 4)))
    assert swap_attention(model, dict(type='PLuGMultiheadAttention', path='**')) == ['plain']
    assert len(said) == 1 and said[0].startswith('mmgate: attention[0] leaves odd: ') and 'add_bias_kv' in said[0]
    with pytest.raises(ValueError, match='odd: .*add_bias_kv'):
        swap_attention(model, dict(type='SDPAGatedMultiheadAttention', path='odd.**'))


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


def test_the_hosts_of_a_gate_are_lines_and_few() -> None:
    model = nn.ModuleDict(dict(mine=mmcv_attention(16, 4), other=nn.Linear(2, 2)))
    with pytest.raises(ConfigError) as info:
        swap_attention(model, dict(type='PLuGMultiheadAttention', path='other'))
    lines = str(info.value).splitlines()
    first = 'attention[0]: other is a torch.nn.modules.linear.Linear, which PLuGMultiheadAttention does not replace.'
    assert lines[0].startswith(first)
    assert '  mmcv.cnn.bricks.transformer.MultiheadAttention' in lines[1:3]  # the model has it
    assert lines[7].endswith('others, see docs/gates.md') and lines[8].startswith('The attention modules of')
    assert max(map(len, lines)) < 250


def test_a_downstream_adapter() -> None:
    class Mine(MultiScaleDeformableAttention):
        pass

    model = Host()
    model.other['attn'] = Mine(16, 4, 2, 3)
    with pytest.raises(ValueError, match=r'other.attn is a .*\.Mine, which .*adapts\(PLuG.*, Mine, like=MultiScale'):
        swap_attention(model, dict(RULE, path='other.attn'))
    adapts(PLuGMultiScaleDeformableAttention, Mine, like=MultiScaleDeformableAttention)
    assert swap_attention(model, dict(RULE, path='other.attn')) == ['other.attn']


class Halved(Gate):
    """A gate of somebody else, of a kind of its own, not registered."""

    def __init__(self, sizes: Sizes, *, factor: float = 0.5, offset: float = 0.0) -> None:
        super().__init__(sizes)
        self.factor, self.offset = factor, offset

    def change(self, out: torch.Tensor) -> torch.Tensor:
        return self.factor * out + self.offset


class Wrapped(nn.Module):
    """An attention of somebody else."""

    def __init__(self, embed_dim: int) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(embed_dim, 4)

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return self.attn(query, query, query)[0]


class GatedWrapped(Adapter):
    """Its adapter."""

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        return Sizes(host.attn.embed_dim, host.attn.num_heads)

    @classmethod
    def check(cls, host: Any) -> None:
        if hasattr(host, 'extra'):
            raise ConfigError('this Wrapped has something extra.')

    def forward(self, query: torch.Tensor) -> torch.Tensor:
        return self.gate.change(super().forward(query))


@pytest.fixture
def _own_pair(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('mmgate.hosts.table._ADAPTERS', dict(_ADAPTERS))
    assert adapts(Halved, Wrapped)(GatedWrapped) is GatedWrapped


@pytest.mark.usefixtures('_own_pair')
def test_a_pair_of_somebody_else() -> None:
    """The gate's class stands in the rule."""
    model = nn.ModuleDict(dict(layer=Wrapped(16)))
    x = torch.randn(5, 2, 16)
    expected = 2 * model['layer'](x) + 1
    swap_attention(model, dict(path='layer', type=Halved, factor=2.0, offset=1.0))
    torch.testing.assert_close(model['layer'](x), expected)
    assert isinstance(model['layer'], Wrapped) and isinstance(model['layer'], GatedWrapped)
    with pytest.raises(TypeError, match=r'Halved has no option sizes; it has factor, offset'):
        swap_attention(nn.ModuleDict(dict(layer=Wrapped(16))), dict(path='layer', type=Halved, sizes=8))


@pytest.mark.usefixtures('_own_pair')
def test_attention_with_several_gates_has_sizes_for_each() -> None:
    class Both(GatedWrapped):
        @classmethod
        def sizes(cls, host: Any) -> dict[str, Sizes]:  # type: ignore[override]
            return dict(first=Sizes(16, 4), second=Sizes(8, 2))

        def forward(self, query: torch.Tensor) -> torch.Tensor:
            return self.gate['second'].change(self.attn(query, query, query)[0])

    adapts(Halved, Wrapped)(Both)
    model = nn.ModuleDict(dict(layer=Wrapped(16)))
    swap_attention(model, dict(path='layer', type=Halved, offset=1.0))
    assert [(name, gate.embed_dims, gate.offset) for name, gate in model['layer'].gate.items()] == [
        ('first', 16, 1.0),
        ('second', 8, 1.0),
    ]
    adapts(DenseGate, Wrapped)(Both)
    listed = list_attention(nn.ModuleDict(dict(layer=Wrapped(16))))[0]
    assert listed.path == 'layer' and listed.sizes == dict(embed_dims=16, num_heads=4)


@pytest.mark.usefixtures('_own_pair')
def test_an_error_in_a_gates_constructor_or_adapter_is_not_taken_for_a_bad_rule() -> None:
    class Buggy(Halved):
        def __init__(self, sizes: Sizes, *, factor: float = 0.5) -> None:
            super().__init__(sizes, factor=factor)
            len(self.factor)

    class Filled(GatedWrapped):
        @classmethod
        def sizes(cls, host: Any) -> Sizes:
            return Sizes(**dict(channels=8, heads=2, width=4))

    for adapter, kind, words in (
        (GatedWrapped, Buggy, "object of type 'float' has no len()"),
        (Filled, Halved, "unexpected keyword argument 'width'"),
    ):
        adapts(Halved, Wrapped)(adapter)
        with pytest.raises(TypeError, match=words) as info:
            swap_attention(nn.ModuleDict(dict(layer=Wrapped(16))), dict(path='layer', type=kind, factor=8.0))
        assert not isinstance(info.value, ConfigError)


@pytest.mark.usefixtures('_own_pair')
@pytest.mark.parametrize('value', ['2.0', None, [2.0], dict(factor=2.0)], ids=str)
def test_an_option_of_another_type_is_told_as_such(value: object) -> None:
    model = nn.ModuleDict(dict(layer=Wrapped(16)))
    with pytest.raises(TypeError, match=r'^attention\[0\]: .*Halved takes factor: float, got factor=') as info:
        swap_attention(model, dict(path='layer', type=Halved, factor=value))
    assert isinstance(info.value, ConfigError)
    assert swap_attention(model, dict(path='layer', type=Halved, factor=2)) == ['layer']


@pytest.mark.usefixtures('_own_pair')
def test_a_refused_swap_leaves_frozen_parameters_frozen() -> None:
    model: Any = nn.ModuleDict(dict(odd=Wrapped(16), plain=Wrapped(16)))
    model['odd'].extra = nn.Parameter(torch.zeros(1))
    model.requires_grad_(False)
    with pytest.raises(ValueError, match='Halved does not replace odd: this Wrapped has something extra'):
        swap_attention(model, dict(path='odd', type=Halved))
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert swap_attention(model, dict(path='**', type=Halved)) == ['plain']
    assert not any(parameter.requires_grad for parameter in model['odd'].parameters())


@pytest.mark.usefixtures('_own_pair')
def test_a_gate_behind_kwargs_has_the_options_of_its_base() -> None:
    class Loud(Halved):
        def __init__(self, sizes: Sizes, *, volume: float = 1.0, **options: float) -> None:
            super().__init__(sizes, **options)
            self.factor *= volume

    model = nn.ModuleDict(dict(layer=Wrapped(16)))
    swap_attention(model, dict(path='layer', type=Loud, factor=2.0, volume=3.0))
    assert model['layer'].gate.factor == 6.0


@pytest.mark.usefixtures('_own_pair')
@pytest.mark.parametrize('kind', ['attribute', 'child', 'parameter', 'method'])
def test_a_host_with_an_attribute_of_the_gates_name_is_refused(kind: str) -> None:
    class Named(nn.MultiheadAttention):
        def gate(self) -> None:
            pass

    adapts(DenseGate, Named, like=nn.MultiheadAttention)
    model: Any = nn.ModuleDict(dict(attn=(Named if kind == 'method' else nn.MultiheadAttention)(16, 4)))
    if kind != 'method':
        taken = dict(attribute=0, child=nn.Linear(2, 2), parameter=nn.Parameter(torch.zeros(1)))[kind]
        model['attn'].gate = taken
    before = dict(vars(model['attn']))
    message = r"does not replace attn: this .*\.(Named|MultiheadAttention) has an attribute 'gate' already"
    with pytest.raises(ConfigError, match=message):
        swap_attention(model, dict(path='attn', type='PLuGMultiheadAttention'))
    assert vars(model['attn']) == before


@pytest.mark.parametrize('name', ['project', 'gates', 'gating'])
def test_a_host_whose_names_an_adapter_would_hide_is_refused(name: str) -> None:
    """A class's method comes before a child of the name, for the host's own code, too."""
    model: Any = nn.ModuleDict(dict(attn=nn.MultiheadAttention(16, 4)))
    setattr(model['attn'], name, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match=f"does not replace attn: .*'{name}'"):
        swap_attention(model, dict(path='attn', type='PLuGMultiheadAttention'))


@pytest.mark.parametrize('host, path', [(nn.MultiheadAttention, 'host'), (mmcv_attention, 'host.attn')])
def test_an_option_without_a_default(host: type[nn.Module], path: str) -> None:
    class ScaledGate(DenseGate):
        def __init__(self, sizes: Sizes, *, factor: float) -> None:
            super().__init__(sizes)
            self.factor = factor

    model = nn.ModuleDict(dict(host=host(16, 4)))
    swap_attention(model, dict(path='host', type=ScaledGate, factor=2.0))
    assert model.get_submodule(path).gate.factor == 2.0
    with pytest.raises(TypeError, match='cannot be made without factor; write it'):
        swap_attention(nn.ModuleDict(dict(host=host(16, 4))), dict(path='host', type=ScaledGate))


def test_an_adapter_that_could_not_call_its_gate_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr('mmgate.hosts.table._ADAPTERS', dict(_ADAPTERS))

    class Silent(DenseAdapter):
        @classmethod
        def sizes(cls, host: nn.Bilinear) -> Sizes:  # type: ignore[override]
            return Sizes(host.out_features, 1)

    adapts(DenseGate, nn.Bilinear)(Silent)
    with pytest.raises(TypeError, match='Silent has no forward, which calls the gate; write it'):
        swap_attention(nn.ModuleDict(dict(host=nn.Bilinear(2, 2, 4))), dict(path='host', type='PLuGMultiheadAttention'))


def test_adapts_says_what_is_wrong() -> None:
    with pytest.raises(TypeError, match="needs classes, got 'PLuG'"):
        adapts('PLuG', Wrapped)
    with pytest.raises(TypeError, match='needs a host class'):
        adapts(PLuGMultiScaleDeformableAttention)
    words = r'mmgate.gates.plug.PLuG.* has no adapter for torch.nn.modules.linear.Linear; it replaces mmcv.ops'
    with pytest.raises(LookupError, match=words):
        adapts(PLuGMultiScaleDeformableAttention, Wrapped, like=nn.Linear)

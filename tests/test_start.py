"""A gated model starts where its vanilla partner starts, and draws on as that one does."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest
import torch
from conftest import filled
from helpers import zoo
from helpers.zoo import ZOO
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmengine.model import BaseModule
from mmengine.registry import MODELS, WEIGHT_INITIALIZERS, init_default_scope
from mmengine.runner import save_checkpoint
from torch import Tensor, nn

from mmgate import gate_parameters, restore_attention, swap_attention
from mmgate.adapter import gated_modules, make_gate
from mmgate.gate import gate_of_type
from mmgate.hosts import adapter_for, gates_for
from mmgate.listing import attention_modules

SEED = 3
SOME = ('conditional_detr', 'deformable_detr', 'mask2former_ade', 'retinanet_pvt', 'segformer', 'swin', 'twins_pcpvt')
OPTIONS: dict[str, dict[str, Any]] = {  # of gates that need some
    'AgentAttention': dict(map_size=(4, 4), agent_num=4),
    'SAGAAttention': dict(map_size=(4, 4)),
}


def initialised(cfg: Any, rules: list[dict] | None = None) -> tuple[nn.Module, Tensor]:
    """Build as a runner does, swap, initialise; return the model and the state of the global random numbers."""
    torch.manual_seed(SEED)
    model = MODELS.build(copy.deepcopy(cfg))
    if rules:
        swap_attention(model, rules)
    zoo.fill_what_is_only_loaded(model)
    model.init_weights()
    return model, torch.get_rng_state()


def named(model: nn.Module) -> dict[str, Tensor]:
    """Parameters without gates."""
    gates = gate_parameters(model)
    return {name: parameter for name, parameter in model.named_parameters() if name not in gates}


def assert_starts_as(vanilla: tuple[nn.Module, Tensor], gated: tuple[nn.Module, Tensor]) -> None:
    expected, actual = dict(vanilla[0].named_parameters()), named(gated[0])
    assert list(actual) == list(expected)
    differing = [name for name, value in actual.items() if not torch.equal(value, expected[name])]
    assert not differing
    assert torch.equal(gated[1], vanilla[1]), 'the global random numbers go on otherwise'


def fitting(model: nn.Module) -> dict[str, list[str]]:
    """The gates that fit, by the name of the attention, without those inside another."""
    found: dict[str, list[str]] = {}
    for name, module in attention_modules(model):
        for gate in gates_for(module) if not name.startswith(tuple(f'{outer}.' for outer in found)) else ():
            with suppress(ValueError):
                adapter, child = adapter_for(gate_of_type(gate), module)
                options = OPTIONS.get(gate.__name__, {})
                make_gate(adapter, module.get_submodule(child), gate_of_type(gate), **options)
                found.setdefault(name, []).append(gate.__name__)
    return found


def rounds(gates: dict[str, list[str]]) -> Iterator[list[dict]]:
    """Rules that together put every gate into each kind of attention: gates take turns from module to module."""
    modules = Counter(map(tuple, gates.values()))
    turns = {kind: itertools.cycle(kind) for kind in modules}
    for _ in range(max(-(-len(kind) // number) for kind, number in modules.items())):
        chosen = {name: next(turns[tuple(listed)]) for name, listed in gates.items()}
        yield [dict(path=name, type=gate, **OPTIONS.get(gate, {})) for name, gate in chosen.items()]


@pytest.mark.parametrize('name', [name if name in SOME else pytest.param(name, marks=pytest.mark.slow) for name in ZOO])
def test_every_host_with_every_gate(name: str) -> None:
    cfg = zoo.reduced(ZOO[name][0])
    vanilla = initialised(cfg.model)
    torch.manual_seed(SEED)
    for rules in rounds(fitting(MODELS.build(copy.deepcopy(cfg.model)))):
        assert_starts_as(vanilla, initialised(cfg.model, rules))


PVT = dict(num_layers=(1, 2, 1, 1), drop_path_rate=0.1)
SWIN = dict(depths=(2, 2, 2, 2), drop_path_rate=0.1)
CSWIN = dict(type='mmgate.AgentCSwin', depths=(1, 1, 1, 1))
VANILLA_PVT = dict(type='mmdet.PyramidVisionTransformer', **PVT)
VANILLA_SWIN = dict(type='mmdet.SwinTransformer', **SWIN)
VIT = dict(arch='deit-tiny', drop_rate=0.1)
PLUG = 'PLuGMultiheadAttention'


def gated_vit(gate: str = PLUG, **options: Any) -> dict[str, Any]:
    attention = dict(path='layers.*.attn', type=gate)
    return dict(type='mmgate.Gated', host='mmpretrain.VisionTransformer', attention=attention, **VIT, **options)


PARTNERS: dict[str, tuple[dict, dict]] = {
    'AgentPVT': (VANILLA_PVT, dict(type='mmgate.AgentPVT', **PVT)),
    'PVT-softmax': (VANILLA_PVT, dict(type='mmgate.PVT', attention=dict(type='SoftmaxAttention'), **PVT)),
    'SAGAPVTv2': (
        dict(type='mmdet.PyramidVisionTransformerV2', embed_dims=32, **PVT),
        dict(type='mmgate.SAGAPVTv2', arch='b0', **PVT),
    ),
    'SAGASwin': (VANILLA_SWIN, dict(type='mmgate.SAGASwin', blocks=(2, 1, 2, 0), **SWIN)),
    'AgentCSwin': (dict(agent_nums=(None,) * 4, **CSWIN), CSWIN),
    **{
        f'DeiT-{gate}': (dict(type='mmpretrain.VisionTransformer', **VIT), gated_vit(gate))
        for gate in (PLUG, 'AgentAttention')
    },
}


@WEIGHT_INITIALIZERS.register_module()
class DrawnByAUser:
    """Draws every linear layer, with a function that is none of mmengine's."""

    def __init__(self, **_: Any) -> None:
        pass

    def __call__(self, module: nn.Module) -> None:
        module.apply(lambda part: nn.init.normal_(part.weight) if isinstance(part, nn.Linear) else None)


@pytest.mark.parametrize('wrapped', [False, True], ids=['alone', 'in-a-model'])
@pytest.mark.parametrize('name', PARTNERS)
def test_backbones_start_as_their_partners(name: str, wrapped: bool) -> None:
    """Alone, and inside a model that has an ``init_cfg`` and whose start mmengine reports parameter by parameter.

    A user's initialiser is in it, too.
    """
    init_default_scope('mmdet')
    partners = PARTNERS[name]
    if wrapped:
        init_cfg = [
            dict(type='TruncNormal', layer='Linear', std=0.02),
            dict(type='Constant', layer='LayerNorm', val=1.0),
            dict(type='DrawnByAUser'),
        ]
        whole = dict(_scope_='mmpretrain', type='ImageClassifier', init_cfg=init_cfg)
        partners = tuple(dict(backbone=backbone, **whole) for backbone in partners)
    vanilla, gated = (initialised(cfg) for cfg in partners)
    assert_starts_as(vanilla, gated)
    assert any(True for _ in gated_modules(gated[0]))
    restore_attention(gated[0])
    assert not any('_params_init_info' in vars(module) for module in gated[0].modules())
    assert list(dict(vanilla[0].named_modules())) == list(dict(gated[0].named_modules()))


def test_gates_follow_a_model_whose_start_failed() -> None:
    """mmengine leaves its report in all modules then."""
    model = BaseModule(init_cfg=dict(type='Pretrained', checkpoint='absent.pth'))
    model.attn = SpatialReductionAttention(16, 2, sr_ratio=2)
    swap_attention(model, dict(path='attn', type='AgentAttention', **OPTIONS['AgentAttention']))
    with pytest.raises(FileNotFoundError):
        model.init_weights()
    assert '_params_init_info' in vars(model.attn)
    model.eval().double()
    assert not model.attn.gate.training
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}


@pytest.mark.parametrize(
    'name, gate, options',
    [
        ('deformable_detr', 'PLuGMultiScaleDeformableAttention', {}),
        ('detr', 'SDPAGatedMultiheadAttention', dict(init='identity', scale=2.0)),
        ('mask2former_ade', PLUG, {}),
        ('swin', PLUG, {}),
    ],
)
def test_the_first_step_has_the_loss_of_the_vanilla_model(name: str, gate: str, options: dict[str, Any]) -> None:
    """With dropout and drop path: the same numbers are dropped."""
    cfg = zoo.reduced(ZOO[name][0])
    with_dropout(cfg.model)
    losses = []
    for rules in (None, [dict(type=gate, path='**', **options)]):
        model, _ = initialised(cfg.model, rules)
        state = torch.get_rng_state()
        torch.manual_seed(0)
        data = zoo.batch(cfg)
        torch.set_rng_state(state)
        model.train()
        losses.append(zoo.tensors(model(**data, mode='loss')))
    for one, other in zip(*losses, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def with_dropout(node: Any) -> None:
    """Let everything drop some that can."""
    for child in node.values() if isinstance(node, dict) else node if isinstance(node, list) else ():
        with_dropout(child)
    if isinstance(node, dict):
        rates = ('dropout', 'attn_drop', 'proj_drop', 'ffn_drop', 'drop_rate', 'attn_drop_rate', 'drop_path_rate')
        node.update({key: 0.1 for key in rates if isinstance(node.get(key), (int, float))})


def test_a_checkpoint_that_a_host_loads_as_it_initialises_fills_gates(tmp_path: Any) -> None:
    """A backbone of ours, and any model, by mmengine's own ``Pretrained``."""
    init_default_scope('mmdet')
    cfg = dict(type='mmgate.AgentSwin', blocks=(1, 1, 1, 0), **SWIN)
    first = filled(initialised(cfg)[0], 1.0)
    save_checkpoint(dict(state_dict=first.state_dict()), str(tmp_path / 'own.pth'))
    init_cfg = dict(type='Pretrained', checkpoint=str(tmp_path / 'own.pth'))
    alone, _ = initialised({**cfg, 'init_cfg': init_cfg})
    second, _ = initialised(gated_vit())
    nn.init.constant_(second.layers[0].attn.gate.gml.bias, 7.0)
    nn.init.constant_(second.layers[0].attn.qkv.bias, 5.0)
    save_checkpoint(dict(state_dict=second.state_dict()), str(tmp_path / 'vit.pth'))
    loaded, _ = initialised(gated_vit(init_cfg=dict(type='Pretrained', checkpoint=str(tmp_path / 'vit.pth'))))
    for one, other in ((first, alone), (second, loaded)):
        assert one.state_dict().keys() == other.state_dict().keys()
        for name, value in one.state_dict().items():
            assert torch.equal(value, other.state_dict()[name]), name


def test_the_start_follows_a_model_that_was_made_on_meta() -> None:
    """Its parameters are others by then; what only the vanilla module holds has to be made, too."""
    with torch.device('meta'):
        model = MODELS.build(CSWIN)
    model.to_empty(device='cpu')
    model.init_weights()
    drawn = {n: p for n, p in named(model).items() if n.endswith(('qkv.weight', 'mlp.0.weight'))}
    drawn.update({n: p for n, p in model.named_parameters() if n.endswith('an_bias')})
    assert len(drawn) == 10 and all(0.01 < p.std() < 0.03 for p in drawn.values())


def test_gates_made_on_meta_are_drawn_as_they_get_memory() -> None:
    """A vanilla checkpoint fills the rest; without it gates would hold whatever the memory held."""
    vanilla = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8) for _ in range(2)))
    expected, model = copy.deepcopy(vanilla), copy.deepcopy(vanilla).to('meta')
    for one in (expected, model):
        torch.manual_seed(1)
        swap_attention(one, dict(path='*.self_attn', type=PLUG))
    model.to_empty(device='cpu')
    model.load_state_dict(vanilla.state_dict(), strict=False)
    torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=0, atol=0)
    learnt = {name: p.data.normal_().clone() for name, p in gate_parameters(model).items()}
    for name, parameter in gate_parameters(model.double()).items():  # moved, gates are not drawn anew
        assert torch.equal(parameter, learnt[name].double()), name


def test_a_second_initialisation_leaves_gates_as_the_host() -> None:
    model = MODELS.build(gated_vit())
    model.init_weights()
    nn.init.constant_(model.layers[0].attn.gate.gml.bias, 9.0)
    model.init_weights()
    assert model.layers[0].attn.gate.gml.bias.eq(9).all()


@pytest.mark.parametrize('own', [False, True], ids=['of the class', 'of its own'])
def test_a_model_gets_the_start_back_that_it_had(own: bool) -> None:
    """Which runs once meanwhile, however many rules have gated the model."""
    model: Any = BaseModule()
    model.first, model.second = (nn.MultiheadAttention(16, 2) for _ in range(2))
    calls: list[int] = []

    def start() -> None:
        calls.append(1)

    if own:
        model.init_weights = start
    for path in ('first', 'second'):
        swap_attention(model, dict(path=path, type=PLUG))
    model.init_weights()
    assert len(calls) == own
    restore_attention(model)
    assert vars(model).get('init_weights') is (start if own else None) and ('init_weights' in vars(model)) == own

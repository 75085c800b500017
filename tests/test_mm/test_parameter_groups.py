"""The rule on weight decay, under every kind of optimizer constructor; merged groups: the same steps and schedules."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.small_demo import DEMO
from mmengine.config import Config, ConfigDict
from mmengine.logging import MMLogger
from mmengine.optim import DefaultOptimWrapperConstructor, MultiStepLR, build_optim_wrapper
from mmengine.registry import OPTIM_WRAPPER_CONSTRUCTORS, init_default_scope
from torch import distributed, nn

import mmgate
from mmgate.errors import ConfigError
from mmgate.gate import undecayed_parameters
from mmgate.gates import PLuGMultiheadAttention
from mmgate.mm.parameter_groups import TORCH, GateOptimWrapperConstructor, _can_fuse, _merge, _set
from mmgate.registry import MODELS

DECAY = 0.05
VECTORS = ['lambda_q1', 'lambda_k1', 'lambda_q2', 'lambda_k2', 'head_norm.weight']


class _ByDimension(DefaultOptimWrapperConstructor):
    """As mmdet's and mmseg's layer decay: two groups, by the number of dimensions alone."""

    def add_params(self, params: list[dict[str, Any]], module: nn.Module, **kwargs: Any) -> None:
        for name, decay in (('no_decay', 0.0), ('decay', self.base_wd)):
            own = [(n, p) for n, p in module.named_parameters() if (p.ndim == 1) == (name == 'no_decay')]
            names, parameters = zip(*own, strict=True)
            params.append(
                dict(params=list(parameters), param_names=list(names), group_name=name, weight_decay=decay, lr_scale=1)
            )


@pytest.fixture(autouse=True)
def _by_dimension(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPTIM_WRAPPER_CONSTRUCTORS._module_dict, 'ByDimension', _ByDimension)


def model() -> nn.Module:
    """Every kind of parameter that the rule is about, beside plain ones."""

    def gate(kind: str, **options: Any) -> nn.Module:
        return MODELS.build(dict(type=f'mmgate.{kind}', embed_dims=16, num_heads=2, **options))

    maps = [gate(kind, map_size=(4, 4)) for kind in ('AgentAttention', 'SAGAAttention')]
    dense = dict(
        plug=gate('PLuGMultiheadAttention'),
        dgsa=gate('DifferentialGatedMultiheadAttention', learnable=True),
        sdpa=gate('SDPAGatedMultiheadAttention'),
        diff=gate('DifferentialMultiheadAttention'),
        v2=gate('DifferentialV2MultiheadAttention'),
    )
    return nn.ModuleDict(dict(backbone=nn.ModuleList(maps), **dense))


@pytest.mark.parametrize(
    'paramwise',
    [
        None,
        dict(norm_decay_mult=1.0),
        dict(custom_keys=dict(backbone=dict(lr_mult=0.1, decay_mult=1.0))),
        dict(constructor='ByDimension', num_layers=2),
    ],
    ids=['one group', 'a group a parameter', 'custom keys', 'by dimension'],
)
def test_what_gates_add_is_not_decayed(paramwise: dict[str, Any] | None) -> None:
    net = model()
    wrapper = build_optim_wrapper(
        net,
        ConfigDict(  # as a config file gives it, and the optimizer's groups are then, too
            constructor='mmgate.GateOptimWrapperConstructor',
            optimizer=dict(type='AdamW', lr=1e-3, weight_decay=DECAY),
            paramwise_cfg=paramwise,
        ),
    )
    groups = wrapper.optimizer.param_groups
    decay = {id(parameter): group['weight_decay'] for group in groups for parameter in group['params']}
    assert sorted(decay) == sorted(map(id, net.parameters()))  # each once
    assert sum(len(group['params']) for group in groups) == len(decay)
    spared = dict(undecayed_parameters(net))
    assert {name.rpartition('.')[2] for name in spared} >= {'an_bias', 'wa_bias', 'position_encoding'}
    assert {name for name in spared if 'gml' in name} == {n for n, _ in net.named_parameters() if '.gml.' in n}
    for kind, names in dict(dgsa=['head_norm.weight', 'lambda_init'], diff=VECTORS, v2=['lambda_proj.bias']).items():
        assert {name for name in spared if kind in name} == {f'{kind}.attn.gate.{name}' for name in names}
    assert [name for name in spared if name.startswith('sdpa')] == ['sdpa.attn.gate.gate_bias']
    for name, parameter in net.named_parameters():
        flat = (paramwise or {}).get('constructor') and parameter.ndim == 1
        assert decay[id(parameter)] == (0.0 if name in spared or flat else DECAY), name
    for group in groups:
        assert len(group.get('param_names', group['params'])) == len(group['params'])
    rates = {id(p): group['lr'] for group in groups for p in group['params']}
    slow = (paramwise or {}).get('custom_keys')
    assert rates[id(net['backbone'][0].gate.an_bias)] == pytest.approx(1e-4 if slow else 1e-3)
    for parameter in net.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    wrapper.optimizer.step()
    for name in spared:
        torch.testing.assert_close(net.get_parameter(name).detach(), before[name], rtol=0, atol=0)


@pytest.mark.parametrize('host', [{}, dict(constructor='ByDimension', num_layers=2)], ids=['keys', 'no keys'])
def test_one_key_for_every_gate(host: dict[str, Any]) -> None:
    """Multipliers under ``mmgate.gates`` are those of all parameters of gates and of no other, whatever their names."""
    keys = {'mmgate.gates': dict(lr_mult=10.0, decay_mult=0.5), 'decoder': dict(lr_mult=0.5)}
    optimizer = dict(type='AdamW', lr=1.0, weight_decay=DECAY)
    wrapper = dict(type='OptimWrapper', optimizer=optimizer)
    construct = GateOptimWrapperConstructor(wrapper, dict(host, custom_keys=keys))
    for part in ('decoder', 'neck'):  # the second model has other names
        gated = nn.ModuleDict({'backbone': nn.Linear(4, 4), part: model()})
        found = {id(p): group for group in construct(gated).optimizer.param_groups for p in group['params']}
        gates, spared = set(mmgate.gate_parameters(gated)), dict(undecayed_parameters(gated))
        assert gates
        for name, parameter in gated.named_parameters():
            expected = 10.0 if name in gates else 0.5 if name.startswith('decoder') and not host else 1.0
            assert found[id(parameter)]['lr'] == expected, name
            if name in gates - spared.keys():
                assert found[id(parameter)]['weight_decay'] == DECAY / 2, name
    assert 'mmgate.gates' in keys


def test_a_key_for_the_gates_of_one_class() -> None:
    """It wins over the key of all gates, leaves those of other classes at that, and names a class that there is."""
    keys = {'mmgate.gates.SDPAGate': dict(lr_mult=2.0), 'mmgate.gates': dict(lr_mult=10.0)}
    optimizer = dict(type='AdamW', lr=1.0, weight_decay=DECAY)
    gated = model()
    built = GateOptimWrapperConstructor(dict(type='OptimWrapper', optimizer=optimizer), dict(custom_keys=keys))(gated)
    found = {id(p): group['lr'] for group in built.optimizer.param_groups for p in group['params']}
    gates = mmgate.gate_parameters(gated)
    rates = {name: found[id(parameter)] for name, parameter in gates.items()}
    assert {rate for name, rate in rates.items() if name.startswith('sdpa.')} == {2.0}
    assert {rate for name, rate in rates.items() if not name.startswith('sdpa.')} == {10.0}
    wrong = dict(custom_keys={'mmgate.gates.SDPA': dict(lr_mult=2.0)})
    with pytest.raises(ConfigError, match=r'mmgate.gates.SDPA names no gate; classes of gates are .*SDPAGate'):
        GateOptimWrapperConstructor(dict(type='OptimWrapper', optimizer=optimizer), wrong)(gated)


MERGED, PLAIN = 'mmgate.GroupedOptimWrapperConstructor', 'DefaultOptimWrapperConstructor'
PARAMWISE = dict(custom_keys={'slow': dict(lr_mult=0.1)}, norm_decay_mult=0.0)


def ungated() -> nn.Module:
    torch.manual_seed(0)
    layers = dict(first=nn.Linear(3, 4), slow=nn.Linear(4, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, 2))
    return nn.Sequential(nn.ModuleDict(layers))


def build(net: nn.Module, constructor: str, **optimizer: Any) -> Any:
    options = dict(type='AdamW', lr=0.01, weight_decay=0.1, **optimizer)
    return build_optim_wrapper(net, dict(optimizer=options, paramwise_cfg=PARAMWISE, constructor=constructor))


def vanilla(gated: Any) -> dict[str, Any]:
    return {**{key: part for key, part in gated.items() if key not in ('host', 'attention')}, 'type': gated.host}


def steps(net: nn.Module, wrapper: Any, schedule: Any, seeds: Iterable[int]) -> None:
    layers: Any = net[0]
    for seed in seeds:
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        y = layers['last'](layers['norm'](layers['slow'](layers['first'](x))))
        wrapper.update_params(y.square().mean())
        schedule.step()


def test_same_steps_from_fewer_groups() -> None:
    results = []
    for constructor in (PLAIN, MERGED):
        net = ungated()
        wrapper = build(net, constructor)
        steps(net, wrapper, MultiStepLR(wrapper, milestones=[2], gamma=0.1), range(3))
        results.append((len(wrapper.optimizer.param_groups), wrapper.get_lr(), list(net.parameters())))
    (plain, plain_lr, expected), (merged, lr, actual) = results
    assert (plain, merged) == (8, 3)
    assert set(map(float, lr['lr'])) == set(map(float, plain_lr['lr'])) and lr.get('base_lr') == plain_lr.get('base_lr')
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('name', ['detr', 'gated'])
def test_each_parameter_keeps_the_settings_of_the_config(name: str) -> None:
    """A Deformable DETR's rates and decays, and its first update bit for bit where both are not fused."""
    cfg = Config.fromfile(DEMO)
    cfg.optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mult = 0.1
    cfg.optim_wrapper.optimizer.fused = False
    gated = name == 'gated'
    init_default_scope('mmdet')
    torch.manual_seed(0)
    net = MODELS.build(cfg.model if gated else vanilla(cfg.model))
    net.init_weights()  # mmdet leaves the memory of its embeddings of levels as it was until then
    settings, updates = [], []
    for constructor in (PLAIN, 'mmgate.GateOptimWrapperConstructor' if gated else MERGED):
        copy = deepcopy(net)
        wrapper = build_optim_wrapper(copy, dict(cfg.optim_wrapper, constructor=constructor))
        names = {id(parameter): key for key, parameter in copy.named_parameters()}
        spared = {key for key, _ in undecayed_parameters(copy)}
        groups = wrapper.optimizer.param_groups
        settings.append({names[id(p)]: {**g, 'params': None} for g in groups for p in g['params']})
        for key, parameter in copy.named_parameters():
            numbers = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            parameter.grad = torch.randn(parameter.shape, generator=numbers)
        wrapper.optimizer.step()
        updates.append(dict(copy.named_parameters()))
    assert len(groups) <= 3 and bool(spared) == gated
    for key, expected in settings[0].items():
        decay = 0.0 if key in spared else expected['weight_decay']
        assert settings[1][key] == {**expected, 'weight_decay': decay}, key
        assert torch.equal(updates[1][key], updates[0][key]) or key in spared, key


def test_fused_is_the_configs_to_refuse() -> None:
    assert build(ungated(), MERGED).optimizer.param_groups[0]['fused'] is (True if TORCH >= (2, 4) else None)
    assert not build(ungated(), MERGED, fused=False).optimizer.param_groups[0]['fused']


@pytest.mark.parametrize(('devices', 'fuses'), [(['cuda'], True), (['cuda', 'cpu'], False), (['cuda', 'meta'], False)])
def test_fused_where_all_parameters_are_on_a_gpu(devices: list[str], fuses: bool) -> None:
    parameters = [SimpleNamespace(device=torch.device(name)) for name in devices]
    assert _can_fuse(dict(type='AdamW'), SimpleNamespace(parameters=lambda: parameters)) is fuses


def test_together_with_the_decay_of_gates() -> None:
    gate = PLuGMultiheadAttention(4, 2)
    net = nn.Sequential(nn.Linear(3, 4), gate)
    for constructor in (MERGED, 'mmgate.GateOptimWrapperConstructor'):
        paramwise = dict(bias_lr_mult=1.0)
        if constructor == MERGED:
            paramwise['grouped'] = 'mmgate.GateOptimWrapperConstructor'
        adamw = dict(type='AdamW', lr=0.01, weight_decay=0.1)
        cfg = dict(optimizer=adamw, paramwise_cfg=paramwise, constructor=constructor)
        optimizer = build_optim_wrapper(net, cfg).optimizer
        decay = {id(p): group['weight_decay'] for group in optimizer.param_groups for p in group['params']}
        assert [decay[id(p)] for p in gate.attn.gate.gml.parameters()] == [0.0, 0.0] and decay[id(net[0].weight)] == 0.1
        assert len(optimizer.param_groups) == 2


def test_frozen_parameters_are_counted_in_one_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    built = model()
    built.backbone.requires_grad_(False)
    frozen = sum(not parameter.requires_grad for parameter in built.parameters())
    optimizer = dict(type='AdamW', lr=1e-3, weight_decay=DECAY)
    wrapper: dict[str, Any] = dict(optimizer=optimizer, constructor='mmgate.GateOptimWrapperConstructor')
    wrapper['paramwise_cfg'] = dict(custom_keys={'mmgate.gates': dict(lr_mult=20.0)}, norm_decay_mult=0.0)
    logger = MMLogger.get_current_instance()
    monkeypatch.setattr(logger, 'handlers', [caplog.handler])
    monkeypatch.setattr(logger, 'isEnabledFor', lambda level: True)  # whatever level an earlier run of mm tools left
    build_optim_wrapper(built, wrapper)
    lines = [record.getMessage() for record in caplog.records if 'frozen' in record.msg or 'skipped' in record.msg]
    assert lines == [f'mmgate: the optimizer leaves out {frozen} frozen parameter tensors']


@pytest.mark.skipif(TORCH < (2, 6), reason='optimizers take names since torch 2.6')
def test_groups_with_names_are_merged_and_split_with_them() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    decays = {True: 0.0, False: 0.1}
    groups = [dict(params=[pair], weight_decay=decays['bias' in pair[0]]) for pair in model.named_parameters()]
    optimizer = torch.optim.AdamW(groups)
    _merge(optimizer)
    named = [group['param_names'] for group in optimizer.param_groups]
    assert named == [['0.weight', '1.weight'], ['0.bias', '1.bias']]
    _set(optimizer, [model[1].weight], lr=0.5)
    _merge(optimizer)
    names = dict(model.named_parameters())
    for group in optimizer.param_groups:
        assert [id(names[name]) for name in group['param_names']] == [id(one) for one in group['params']]
    assert [(group['lr'], len(group['params'])) for group in optimizer.param_groups] == [(1e-3, 1), (1e-3, 2), (0.5, 1)]
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())


@pytest.mark.parametrize('paramwise', [{}, dict(norm_decay_mult=0.0)], ids=['one group', 'a group a parameter'])
def test_an_optimizer_of_shares_stays_as_it_is(paramwise: dict[str, Any]) -> None:
    distributed.init_process_group('gloo', store=distributed.HashStore(), rank=0, world_size=1)
    try:
        net = PLuGMultiheadAttention(4, 2)
        sgd = dict(type='ZeroRedundancyOptimizer', optimizer_type='SGD', lr=0.1, weight_decay=DECAY)
        cfg = dict(optimizer=sgd, paramwise_cfg=paramwise, constructor='mmgate.GateOptimWrapperConstructor')
        optimizer = build_optim_wrapper(net, cfg).optimizer
        sum(parameter.sum() for parameter in net.parameters()).backward()
        before = deepcopy(net.state_dict())
        optimizer.step()
        assert all(not torch.equal(before[name], value) for name, value in net.named_parameters())
    finally:
        distributed.destroy_process_group()

"""The rule on weight decay, under every kind of optimizer constructor; merged groups: the same steps and schedules."""

from __future__ import annotations

import zlib
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
from torch import nn

import mmgate
from mmgate.errors import ConfigError
from mmgate.gate import undecayed_parameters
from mmgate.mm.parameter_groups import TORCH, _can_fuse
from mmgate.registry import MODELS

DECAY = 0.05
GATES, MERGED = 'mmgate.GateOptimWrapperConstructor', 'mmgate.GroupedOptimWrapperConstructor'
PLAIN = 'DefaultOptimWrapperConstructor'


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


def build(net: nn.Module, constructor: str = GATES, paramwise: Any = None, **optimizer: Any) -> Any:
    """Build an optimizer wrapper as a config file gives it, whose dicts are the optimizer's groups, too."""
    optimizer = dict(dict(type='AdamW', lr=1.0, weight_decay=DECAY), **optimizer)
    return build_optim_wrapper(net, ConfigDict(optimizer=optimizer, constructor=constructor, paramwise_cfg=paramwise))


def settings_of(wrapper: Any, net: nn.Module) -> dict[str, dict[str, Any]]:
    """Return the settings of each parameter by its name."""
    names = {id(parameter): name for name, parameter in net.named_parameters()}
    groups = wrapper.optimizer.param_groups
    return {names[id(parameter)]: {**group, 'params': None} for group in groups for parameter in group['params']}


SPARED = dict(
    dgsa=['head_norm.weight', 'lambda_init'],
    diff=['lambda_q1', 'lambda_k1', 'lambda_q2', 'lambda_k2', 'head_norm.weight'],
    v2=['lambda_proj.bias'],
    sdpa=['gate_bias'],
)


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
    wrapper = build(net, paramwise=paramwise)
    groups = wrapper.optimizer.param_groups
    found = settings_of(wrapper, net)
    assert set(found) == {name for name, _ in net.named_parameters()}
    assert sum(len(group['params']) for group in groups) == len(found)  # each once
    spared = dict(undecayed_parameters(net))
    assert {name.rpartition('.')[2] for name in spared} >= {'an_bias', 'wa_bias', 'position_encoding'}
    assert {name for name in spared if 'gml' in name} == {n for n, _ in net.named_parameters() if '.gml.' in n}
    for kind, names in SPARED.items():
        assert {name for name in spared if name.startswith(kind)} == {f'{kind}.attn.gate.{name}' for name in names}
    by_dimension = (paramwise or {}).get('constructor')
    for name, parameter in net.named_parameters():
        plain = name not in spared and not (by_dimension and parameter.ndim == 1)
        assert found[name]['weight_decay'] == (DECAY if plain else 0.0), name
    for group in groups:
        names = group.get('param_names', [])
        assert names or not by_dimension  # which writes them
        assert not names or [net.get_parameter(name) for name in names] == group['params']
    slow = (paramwise or {}).get('custom_keys')
    assert found['backbone.0.gate.an_bias']['lr'] == pytest.approx(0.1 if slow else 1.0)


@pytest.mark.parametrize('host', [{}, dict(constructor='ByDimension', num_layers=2)], ids=['keys', 'no keys'])
def test_keys_for_the_gates(host: dict[str, Any]) -> None:
    """``mmgate.gates`` is for all parameters of gates and no other, and the key of one class of gates wins over it."""
    keys = {'mmgate.gates.SDPAGate': dict(lr_mult=2.0), 'mmgate.gates': dict(lr_mult=10.0, decay_mult=0.5)}
    gated = nn.ModuleDict(dict(backbone=nn.Linear(4, 4), decoder=model()))
    found = settings_of(build(gated, paramwise=dict(host, custom_keys={**keys, 'decoder': dict(lr_mult=0.5)})), gated)
    gates, spared = set(mmgate.gate_parameters(gated)), dict(undecayed_parameters(gated))
    for name in found:
        rate = 0.5 if name.startswith('decoder') and not host else 1.0
        if name in gates:
            rate = 2.0 if 'sdpa' in name else 10.0
        assert found[name]['lr'] == rate, name
        if name in gates - spared.keys():
            assert found[name]['weight_decay'] == DECAY / 2, name
    with pytest.raises(ConfigError, match=r'mmgate.gates.SDPA names no gate; classes of gates are .*SDPAGate'):
        build(gated, paramwise=dict(custom_keys={'mmgate.gates.SDPA': dict(lr_mult=2.0)}))
    with pytest.raises(ConfigError, match=r'custom_keys: mmgate is none; mmgate.gates is for all gates'):
        build(gated, paramwise=dict(custom_keys=dict(mmgate=dict(gate=dict(lr_mult=2.0)))))


def test_keys_for_the_gates_on_a_command_line() -> None:
    """mmengine splits a key of ``--cfg-options`` at its points."""
    net, cfg = model(), Config(dict(optim_wrapper={}))
    keys = 'optim_wrapper.paramwise_cfg.custom_keys.mmgate.gates'
    cfg.optim_wrapper.paramwise_cfg = dict(custom_keys={'mmgate.gates': dict(lr_mult=20.0, decay_mult=0.5)})
    cfg.merge_from_dict({f'{keys}.lr_mult': 10.0, f'{keys}.SDPAGate.lr_mult': 2.0})
    found = settings_of(build(net, paramwise=cfg.optim_wrapper.paramwise_cfg), net)
    gates = mmgate.gate_parameters(net)
    assert {settings['lr'] for name, settings in found.items() if name not in gates} == {1.0}
    for name in gates:
        assert found[name]['lr'] == (2.0 if 'sdpa' in name else 10.0), name
        assert found[name]['weight_decay'] in (0.0, DECAY / 2), name  # as the file says


def test_a_gate_has_the_rate_of_its_host_whatever_its_parameters_are_called() -> None:
    """mmseg's ``head`` would be the norm of heads in M-DGSA; a key that names the gate applies."""
    net = nn.ModuleDict(dict(decode_head=nn.Linear(4, 4), backbone=model()))
    keys = dict(head=dict(lr_mult=10.0), backbone=dict(lr_mult=0.1), **{'gate.gate_proj': dict(lr_mult=3.0)})
    for given in (keys, {key: keys[key] for key in ('head', 'gate.gate_proj')}):
        found = settings_of(build(net, paramwise=dict(custom_keys=given)), net)
        of_host = 0.1 if 'backbone' in given else 1.0
        for name, settings in found.items():
            rate = 10.0 if name.startswith('decode_head') else 3.0 if 'gate.gate_proj' in name else of_host
            assert settings['lr'] == pytest.approx(rate), name


@pytest.mark.parametrize('gated', [False, True], ids=['vanilla', 'gated'])
def test_each_parameter_keeps_the_settings_of_the_config(gated: bool) -> None:
    """A Deformable DETR's rates, decays and, bit for bit, updates before and after a step of the schedule."""
    cfg = Config.fromfile(DEMO)
    cfg.optim_wrapper.paramwise_cfg.custom_keys.backbone.lr_mult = 0.1
    cfg.optim_wrapper.optimizer.fused = False
    init_default_scope('mmdet')
    if not gated:
        cfg.model.type = cfg.model.pop('host')
        del cfg.model.attention
    net = MODELS.build(cfg.model)
    net.init_weights()  # mmdet leaves the memory of its embeddings of levels as it was until then
    settings, updates = [], []
    for constructor in (PLAIN, GATES if gated else MERGED):
        copy = deepcopy(net)
        wrapper = build_optim_wrapper(copy, dict(cfg.optim_wrapper, constructor=constructor))
        schedule = MultiStepLR(wrapper, milestones=[1], gamma=0.1)
        for key, parameter in copy.named_parameters():
            numbers = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            parameter.grad = torch.randn(parameter.shape, generator=numbers)
        for _ in range(2):
            wrapper.optimizer.step()
            schedule.step()
        settings.append(settings_of(wrapper, copy))
        updates.append(dict(copy.named_parameters()))
    spared = dict(undecayed_parameters(net))
    assert len(wrapper.optimizer.param_groups) <= 3 and bool(spared) == gated
    for key, expected in settings[0].items():
        decay = 0.0 if key in spared else expected['weight_decay']
        assert settings[1][key] == {**expected, 'weight_decay': decay}, key
        assert torch.equal(updates[1][key], updates[0][key]) or key in spared, key


@pytest.mark.parametrize(
    ('devices', 'settings', 'fuses'),
    [
        (['cuda'], {}, True),
        (['cuda', 'cpu'], {}, False),
        (['cuda', 'meta'], {}, False),
        (['cpu'], {}, TORCH >= (2, 4)),
        (['cpu'], dict(fused=False), False),
        (['cpu'], dict(foreach=True), False),
    ],
)
def test_fused_where_torch_can_and_the_config_does_not_refuse(devices: list, settings: dict, fuses: bool) -> None:
    parameters = [SimpleNamespace(device=torch.device(name)) for name in devices]
    assert _can_fuse(dict(type='AdamW', **settings), SimpleNamespace(parameters=lambda: parameters)) is fuses
    if devices == ['cpu']:
        assert bool(build(nn.Linear(2, 2), MERGED, **settings).optimizer.param_groups[0]['fused']) is fuses


def test_frozen_parameters_fill_no_log(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    """mmengine warns of each."""
    logger = MMLogger.get_current_instance()
    monkeypatch.setattr(logger, 'handlers', [caplog.handler])
    monkeypatch.setattr(logger, 'isEnabledFor', lambda level: True)  # whatever level an earlier run of mm tools left
    net = model().requires_grad_(False)
    net.sdpa.requires_grad_(True)
    for constructor in (PLAIN, GATES):
        caplog.clear()
        build(net, constructor, dict(norm_decay_mult=0.0))
        assert any('is skipped' in record.getMessage() for record in caplog.records) == (constructor == PLAIN)


@pytest.mark.usefixtures('process_group')
def test_an_optimizer_of_shares_stays_as_it_is() -> None:
    net = model()
    optimizer = dict(type='ZeroRedundancyOptimizer', optimizer_type='SGD', lr=0.1, weight_decay=DECAY)
    cfg = dict(optimizer=optimizer, paramwise_cfg=dict(norm_decay_mult=0.0), constructor=GATES)
    optimizer = build_optim_wrapper(net, cfg).optimizer
    sum(parameter.sum() for parameter in net.parameters()).backward()
    before = deepcopy(net.state_dict())
    optimizer.step()
    assert all(not torch.equal(before[name], value) for name, value in net.named_parameters())

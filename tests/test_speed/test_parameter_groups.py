"""Merged parameter groups: the same steps, schedules and logs."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from mmengine.optim import MultiStepLR, build_optim_wrapper
from torch import nn

from mmgate.layers import PLuGMultiheadAttention
from mmgate.speed.parameter_groups import TORCH, _can_fuse

PARAMWISE = dict(custom_keys={'slow': dict(lr_mult=0.1)}, norm_decay_mult=0.0)


def model() -> nn.Module:
    torch.manual_seed(0)
    layers = dict(first=nn.Linear(3, 4), slow=nn.Linear(4, 4), norm=nn.LayerNorm(4), last=nn.Linear(4, 2))
    return nn.Sequential(nn.ModuleDict(layers))


def build(net: nn.Module, constructor: str, **optimizer: Any) -> Any:
    options = dict(type='AdamW', lr=0.01, weight_decay=0.1, **optimizer)
    return build_optim_wrapper(net, dict(optimizer=options, paramwise_cfg=PARAMWISE, constructor=constructor))


def step(net: nn.Module, wrapper: Any, count: int = 1) -> None:
    layers = net[0]
    for seed in range(count):
        x = torch.randn(5, 3, generator=torch.Generator().manual_seed(seed))
        y = layers['last'](layers['norm'](layers['slow'](layers['first'](x))))
        wrapper.update_params(y.square().mean())


MERGED, PLAIN = 'mmgate.GroupedOptimWrapperConstructor', 'DefaultOptimWrapperConstructor'


def test_same_steps_from_fewer_groups() -> None:
    results = []
    for constructor in (PLAIN, MERGED):
        net = model()
        wrapper = build(net, constructor)
        schedule = MultiStepLR(wrapper, milestones=[2], gamma=0.1)
        for _ in range(3):
            step(net, wrapper)
            schedule.step()
        results.append((len(wrapper.optimizer.param_groups), wrapper.get_lr(), list(net.parameters())))
    (plain, plain_lr, expected), (merged, lr, actual) = results
    assert (plain, merged) == (8, 3)
    assert set(map(float, lr['lr'])) == set(map(float, plain_lr['lr'])) and lr.get('base_lr') == plain_lr.get('base_lr')
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-6)


def test_checkpoints_are_resumed() -> None:
    net = model()
    wrapper = build(net, MERGED)
    step(net, wrapper, 2)
    state, weights = deepcopy(wrapper.state_dict()), deepcopy(net.state_dict())
    step(net, wrapper, 3)
    other = model()
    other.load_state_dict(weights)
    resumed = build(other, MERGED)
    resumed.load_state_dict(state)
    step(other, resumed, 3)
    torch.testing.assert_close(list(other.parameters()), list(net.parameters()), rtol=1e-5, atol=1e-6)


def test_fused_is_the_configs_to_refuse() -> None:
    assert build(model(), MERGED).optimizer.param_groups[0]['fused'] is (True if TORCH >= (2, 4) else None)
    assert not build(model(), MERGED, fused=False).optimizer.param_groups[0]['fused']


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
        assert [decay[id(p)] for p in gate.attn.gml.parameters()] == [0.0, 0.0] and decay[id(net[0].weight)] == 0.1
        assert (len(optimizer.param_groups) == 2) == (constructor == MERGED)

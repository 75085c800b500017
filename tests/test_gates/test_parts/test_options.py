"""Options of layers."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest

from mmgate import layers
from mmgate.errors import ConfigError
from mmgate.gate import Gate, Sizes
from mmgate.gates.base.linear import LinearGate
from mmgate.gates.parts.options import check_option, height_and_width, integer, number


def test_an_unknown_value_is_refused_with_the_known_ones() -> None:
    check_option('init', 'paper', ('identity', 'paper'))
    with pytest.raises(ConfigError, match=r"^init='papre' is unknown; choose one of identity, paper\.$"):
        check_option('init', 'papre', ('identity', 'paper'))


def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    taken = (integer('n', np.int64(3)), number('x', np.float32(0.5)), *height_and_width('m', [np.int32(7), 5]))
    assert taken == (3, 0.5, 7, 5) and [type(one) for one in taken] == [int, float, int, int]


@pytest.mark.parametrize('value', [0, -1, 9, 2.0, True, '3', None, np.bool_(True)], ids=repr)
def test_what_is_no_integer_in_bounds_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r'^n=.* must be an integer from 1 to 8, the channels\.$'):
        integer('n', value, most=8, meaning=', the channels')
    with pytest.raises(ConfigError, match=r'must be an integer, 10 or more\.$'):
        integer('n', value, least=10)


@pytest.mark.parametrize('value', [0, 1, -0.5, nan, inf, True, '0.5', None], ids=repr)
def test_what_is_no_number_in_bounds_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r'^x=.* must be a finite number above 0 and below 1\.$'):
        number('x', value, above=0, below=1)
    with pytest.raises(ConfigError, match=r'must be a finite number of at least 2\.$'):
        number('x', value, least=2)


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        ((56,), r'm=\(56,\) must be a height and a width, such as m=\(56, 56\)'),
        (56, 'm=56 must be a height'),
        ('56', "m='56' must be a height"),
        ((56.5, 56), r'm\[0\]=56.5 must be an integer, 1 or more'),
        ((0, 7), r'm\[0\]=0 must be'),
        ((7, True), r'm\[1\]=True must be'),
    ],
)
def test_what_is_no_size_of_a_map_is_refused(value: object, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        height_and_width('m', value)


MAP = dict(map_size=(4, 4))


@pytest.mark.parametrize(
    ('gate', 'options', 'said'),
    [
        (layers.AgentGate, dict(map_size=(4.5, 4)), 'map_size'),
        (layers.AgentGate, dict(MAP, agent_num=49.0), 'agent_num=49.0 must be an integer'),
        (layers.AgentGate, dict(MAP, agent_num=True), 'agent_num=True must be an integer'),
        (layers.AgentGate, dict(MAP, pretrain_agent_num=0), 'pretrain_agent_num=0 must be an integer'),
        (layers.AgentGate, dict(MAP, window=0), 'window=0 must be an integer'),
        (layers.AgentGate, dict(MAP, value_factor=nan), 'value_factor=nan must be a finite number'),
        (layers.AgentGate, dict(MAP, broadcast_scale=-1.0), 'broadcast_scale=-1.0 must be a finite number above 0'),
        (layers.SAGAGate, dict(map_size=(0, 7)), 'map_size'),
        (LinearGate, dict(dwc=True), 'dwc=True must be an integer, 0 or more: the odd side of a kernel'),
        (LinearGate, dict(dwc=4), 'dwc=4 must be odd: the odd side of a kernel'),
        (layers.PLuGGate, dict(ratio=-1.0), 'ratio=-1.0 must be'),
        (layers.SDPAGate, dict(scale=-1.0), 'scale=-1.0 must be'),
        (layers.DGSAGate, dict(gate_depth=1.5), 'gate_depth=1.5 must be'),
        (layers.DGSAGate, dict(lambda_init='0.8'), "lambda_init='0.8' must be"),
        (layers.DifferentialGate, dict(depth=True), 'depth=True must be'),
        (layers.DifferentialGate, dict(lambda_init=1.0), 'lambda_init=1.0 must be'),
    ],
)
def test_gates_check_their_options(gate: type[Gate], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gate(Sizes(16, 4), **options)

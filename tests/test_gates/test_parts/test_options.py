"""Options of layers."""

from __future__ import annotations

from math import inf, nan
from typing import Any

import numpy as np
import pytest
from helpers.gated import gated_attention

from mmgate import layers
from mmgate.errors import ConfigError
from mmgate.gate import Gate, Sizes
from mmgate.gates import SAGAAttention
from mmgate.gates.base.linear import LinearGate
from mmgate.gates.parts.options import height_and_width, integer, number
from mmgate.gates.plug import PLuGDeformableGate


def test_numbers_of_numpy_are_taken_as_pythons() -> None:
    taken = (integer('n', np.int64(3)), number('x', np.float32(0.5)), *height_and_width('m', [np.int32(7), 5]))
    assert taken == (3, 0.5, 7, 5) and [type(one) for one in taken] == [int, float, int, int]


@pytest.mark.parametrize('value', [0, -1, 17, 2.0, True, '3', np.bool_(True), nan, inf], ids=repr)
def test_what_is_no_number_in_bounds_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match=r'^gate_channels=.* must be an integer from 1 to 16, '):
        layers.SDPAGate(Sizes(16, 4), gate_channels=value)
    with pytest.raises(ConfigError, match=r'^lambda_init=.* must be a finite number above 0 and below 1'):
        layers.DifferentialV2Gate(Sizes(16, 4), lambda_init=value)


@pytest.mark.parametrize(
    ('value', 'said'),
    [
        ((56,), r'map_size=\(56,\) must be a height and a width, such as map_size=\(56, 56\)'),
        (56, 'map_size=56 must be a height'),
        ('56', "map_size='56' must be a height"),
        ((56.5, 56), r'map_size\[0\]=56.5 must be an integer, 1 or more'),
        ((0, 7), r'map_size\[0\]=0 must be'),
        ((7, True), r'map_size\[1\]=True must be'),
    ],
)
def test_what_is_no_size_of_a_map_is_refused(value: object, said: str) -> None:
    for gate in (layers.AgentGate, layers.SAGAGate):
        with pytest.raises(ConfigError, match=said):
            gate(Sizes(16, 4), map_size=value)


MAP = dict(map_size=(4, 4))


@pytest.mark.parametrize(
    ('gate', 'options', 'said'),
    [
        (layers.AgentGate, dict(MAP, agent_num=49.0), 'agent_num=49.0 must be an integer'),
        (layers.AgentGate, dict(MAP, pretrain_agent_num=0), 'pretrain_agent_num=0 must be an integer'),
        (layers.AgentGate, dict(MAP, window=0), 'window=0 must be an integer'),
        (layers.AgentGate, dict(MAP, value_factor=nan), 'value_factor=nan must be a finite number'),
        (layers.AgentGate, dict(MAP, broadcast_scale=-1.0), 'broadcast_scale=-1.0 must be a finite number above 0'),
        (LinearGate, dict(dwc=True), 'dwc=True must be an integer, 0 or more: the odd side of a kernel'),
        (LinearGate, dict(dwc=4), 'dwc=4 must be odd: the odd side of a kernel'),
        (layers.PLuGGate, dict(heads='all'), 'shared, per_head'),
        (layers.PLuGGate, dict(ratio=-1.0), 'ratio=-1.0 must be'),
        (layers.PLuGGate, dict(ratio=0.01), 'leaves no gate channel'),
        (layers.PLuGGate, dict(gml='none'), "use init='paper' or 'vit'"),
        (layers.PLuGGate, dict(residual=False), "use init='paper'"),
        (layers.PLuGGate, dict(backend='cuda'), 'chunked'),
        (PLuGDeformableGate, dict(granularity='points'), 'choose one of head_level, head_level_point'),
        (PLuGDeformableGate, dict(gml='prod'), 'choose one of product'),
        (PLuGDeformableGate, dict(activation='relu'), 'choose one of none, tanh'),
        (PLuGDeformableGate, dict(position='after'), 'pre_softmax, post_softmax'),
        (PLuGDeformableGate, dict(init='zero'), 'identity, paper'),
        (PLuGDeformableGate, dict(backend='cuda'), 'choose one of auto'),
        (PLuGDeformableGate, dict(residual=False, activation='tanh'), "use init='paper'"),
        (layers.SAGAGate, dict(MAP, scale_by_tokens='N'), "'N' is unknown; choose one of True, False"),
        (layers.SDPAGate, dict(position='G6'), 'G1, G2'),
        (layers.SDPAGate, dict(init='identity'), 'scale=2'),
        (layers.SDPAGate, dict(init='identity', form='additive'), "act='silu'"),
        (layers.SDPAGate, dict(init='identity', act='silu', scale=2.0), 'scale=1'),
        (layers.SDPAGate, dict(init='identity', act='ns_sigmoid'), 'scale=1.333333'),
        (layers.SDPAGate, dict(act='relu'), 'sigmoid, silu, ns_sigmoid'),
        (layers.SDPAGate, dict(scale=0.0), 'scale=0.0 must be a finite number above 0'),
        (layers.SDPAGate, dict(position='G5', granularity='headwise'), 'there are no heads'),
        (layers.SDPAGate, dict(position='G5', head_shared='average'), 'there are no heads'),
        (layers.SDPAGate, dict(head_shared='mean'), 'False, average, projection'),
        (layers.SDPAGate, dict(granularity='head'), 'elementwise, headwise'),
        (layers.DGSAGate, dict(residual='q'), 'query, input, none'),
        (layers.DGSAGate, dict(gate_depth=0), 'gate_depth=0'),
        (layers.DGSAGate, dict(lambda_init='0.8'), "lambda_init='0.8' must be"),
        (layers.DifferentialGate, dict(depth=0), 'depth=0 must be'),
        (layers.DifferentialGate, dict(lambda_init=1.0), 'lambda_init=1.0 must be'),
        (layers.DifferentialV2Gate, dict(init='zero'), 'paper, identity'),
    ],
)
def test_gates_check_their_options(gate: type[Gate], options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        gate(Sizes(16, 4), **options)


def test_gates_check_their_options_against_those_of_attention() -> None:
    for options in (dict(add_bias_kv=True), dict(add_zero_attn=True)):
        with pytest.raises(ConfigError, match='add_'):
            gated_attention(layers.PLuGGate, 16, 4, **options)
    with pytest.raises(ConfigError, match='from 1 to 6, the channels .* at G2'):
        gated_attention(layers.SDPAGate, 16, 4, position='G2', vdim=6, gate_channels=7)
    with pytest.raises(ConfigError, match='scales nothing, but qk_scale=0.9'):
        SAGAAttention(16, 2, map_size=(4, 4), scale_by_tokens=False, qk_scale=0.9)

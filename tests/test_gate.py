"""Starts that hosts do not overwrite."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.starts import HOSTS, C, H, Host, assert_uniform, deformable, dense, gated, initialised, of_two_dimensions
from mmengine.model import BaseModule
from torch import Tensor, nn

from mmgate import gate_parameters, gates_disabled, restore_attention, swap_attention
from mmgate.errors import ConfigError
from mmgate.gates import PLuGMultiheadAttention
from mmgate.registry import MODELS


@pytest.mark.parametrize('host', HOSTS)
@pytest.mark.parametrize('init', ['identity', 'paper'])
def test_plug_projections_start_xavier_uniform_in_both_forms(init: str, host: str) -> None:
    pairs = (
        (dense, dict(type='PLuGMultiheadAttention', init=init)),
        (deformable, dict(type='PLuGMultiScaleDeformableAttention', granularity='head_level_point', init=init)),
    )
    for model in (gated(host, *pairs), initialised(host, *pairs)):
        one, other = (layer.gate for layer in model.layers)
        for projection in (one.gate_q_proj, one.gate_k_proj, other.gate_proj):
            assert_uniform(projection.weight, (6 / sum(projection.weight.shape)) ** 0.5)
            assert_uniform(projection.bias, C**-0.5)
            assert projection.bias.abs().min() > 0
        for gml in (one.gml, other.gml):
            assert (gml.weight.tolist() == [0, 0] and gml.bias.tolist() == [0, 1]) == (init == 'identity')


SDPA = dict(type='SDPAGatedMultiheadAttention', init='identity', act='silu')


@pytest.mark.parametrize('host', HOSTS)
@pytest.mark.parametrize(
    'options',
    [dict(act='silu'), dict(scale=2.0), dict(act='ns_sigmoid', scale=4 / 3), dict(act='silu', form='additive')],
    ids=str,
)
def test_sdpa_starts_as_the_vanilla_attention_in_every_host(options: dict, host: str) -> None:
    """In two dimensions, so that layer-decay constructors see a matrix, and nonetheless zero at the start."""
    model = initialised(host, (dense, dict(type='SDPAGatedMultiheadAttention', init='identity', **options)))
    layer = model.layers[0]
    assert layer.gate.gate_weight.shape == (C, C)
    x = torch.randn(2, 5, C)
    out = layer(x, x, x)[0]
    assert restore_attention(model) == ['layers.0']
    expected = model.layers[0](x, x, x)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * max(1, expected.abs().max().item()))


@pytest.mark.parametrize('host', HOSTS)
def test_what_a_checkpoint_filled_is_not_drawn_anew(host: str) -> None:
    model = gated(host, (dense, SDPA), (dense, SDPA))
    one, other = model.layers
    state = {name: torch.full_like(value, 0.5) for name, value in one.state_dict().items()}
    one.load_state_dict(state)
    other.load_state_dict({'in_proj_weight': state['in_proj_weight']}, strict=False)  # of a vanilla attention
    model.init_weights()
    assert torch.equal(one.gate.gate_bias, state['gate.gate_bias'])
    assert torch.count_nonzero(other.gate.gate_weight) == 0


def test_a_model_without_a_start_of_its_own_gets_none() -> None:
    model = nn.Sequential(dense())
    swap_attention(model, dict(path='0', **SDPA))
    assert not hasattr(model, 'init_weights')


def test_a_gated_model_copies_and_pickles() -> None:
    model = gated('detr', (dense, SDPA))
    pickled = io.BytesIO()
    torch.save(model, pickled)
    pickled.seek(0)
    for other in (copy.deepcopy(model), torch.load(pickled, weights_only=False)):
        nn.init.ones_(other.layers[0].gate.gate_weight)
        model.init_weights()
        assert torch.count_nonzero(other.layers[0].gate.gate_weight) == C * C, 'a copy is bound to the original'
        before = other.layers[0].in_proj_weight.clone()
        other.init_weights()
        assert torch.count_nonzero(other.layers[0].gate.gate_weight) == 0
        assert not torch.equal(other.layers[0].in_proj_weight, before), "the host's start is not the copy's"


def test_a_gate_that_is_off_is_not_put_there_twice() -> None:
    model = gated('detr', (dense, SDPA))
    with gates_disabled(model), pytest.raises(ConfigError, match='layers.0 is gated already, by a SDPAGate'):
        swap_attention(model, dict(path='layers.0', **SDPA))


def test_gates_are_hidden_from_the_hosts_initialisation_alone() -> None:
    """Other threads see them meanwhile, and all do after an error in it."""
    model = gated('detr', (dense, SDPA))
    names = [name for name, _ in model.named_parameters()]
    seen: list[list[str]] = []

    def initialise() -> None:
        seen.append([name for name, _ in model.named_parameters()])
        with ThreadPoolExecutor(1) as other:
            seen.append(other.submit(lambda: [name for name, _ in model.named_parameters()]).result())
        raise KeyError

    restore_attention(model)
    model.init_weights = initialise
    swap_attention(model, dict(path='layers.0', **SDPA))
    with pytest.raises(KeyError):
        model.init_weights()
    assert seen == [[name for name in names if '.gate.' not in name], names]
    assert [name for name, _ in model.named_parameters()] == names != seen[0]


@pytest.mark.parametrize('gate', ['DifferentialGatedMultiheadAttention', 'PLuGMultiheadAttention'])
def test_a_stream_is_of_the_seed_and_the_name(gate: str) -> None:
    def start(seed: int, path: str) -> Tensor:
        torch.manual_seed(seed)
        model = Host('detr', dense(), dense())
        swap_attention(model, dict(path=path, type=gate))
        torch.rand(seed)  # whatever was drawn meanwhile
        model.init_weights()
        return next(p for n, p in model.named_parameters() if 'gate' in n and n.endswith('weight')).detach()

    assert torch.equal(start(1, 'layers.0'), start(1, 'layers.0'))
    assert not torch.equal(start(1, 'layers.0'), start(2, 'layers.0'))
    assert not torch.equal(start(1, 'layers.0'), start(1, 'layers.1'))


@pytest.mark.parametrize('seed', [-1, 2**63])
def test_every_seed_of_torch_has_its_streams(seed: int) -> None:
    """They lie between -2^63 and 2^64, and a sum of two may leave that range."""
    torch.manual_seed(seed)
    one, other = (gated('detr', (dense, dict(type='PLuGMultiheadAttention'))) for _ in range(2))
    assert torch.equal(one.layers[0].gate.gate_q_proj.weight, other.layers[0].gate.gate_q_proj.weight)


def test_mmcv_wrapper_initialises_by_itself_after_xavier() -> None:
    layer = PLuGMultiheadAttention(C, H, init='paper')
    of_two_dimensions(nn.init.xavier_normal_)(layer)
    layer.init_weights()
    assert_uniform(layer.attn.gate.gate_q_proj.weight, (6 / (C + C // H)) ** 0.5)


TINY = dict(num_layers=(1, 1, 1, 1), drop_path_rate=0.0)


class Plain(nn.Module):
    """A module that mmengine does not ask for its start, nor what is in it."""

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.attn = MODELS.build(dict(type=f'mmgate.{name}', embed_dims=C, num_heads=H, **options))


class Drawn(BaseModule):
    """A model whose init_cfg draws every layer."""

    def __init__(self, part: nn.Module) -> None:
        layers = ['Linear', 'Conv2d', 'LayerNorm', 'RMSNorm']
        super().__init__(init_cfg=dict(type='Constant', layer=layers, val=3.0, bias=3.0))
        self.part = part
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    ('name', 'options'),
    [
        ('PLuGMultiheadAttention', {}),
        ('PLuGMultiScaleDeformableAttention', dict(gml='none')),
        ('DifferentialGatedMultiheadAttention', {}),
        ('DifferentialV2MultiheadAttention', {}),
        ('AgentAttention', dict(map_size=(4, 4), agent_num=4)),
        ('SAGAAttention', dict(map_size=(4, 4))),
    ],
)
def test_an_init_cfg_around_a_plain_module_draws_no_gate(name: str, options: dict[str, Any]) -> None:
    """PLuG's gate projections without a gml, for instance, start at 0, which is the identity."""
    model = Drawn(Plain(name, **options))
    before = {key: parameter.clone() for key, parameter in gate_parameters(model).items()}
    model.init_weights()
    assert torch.equal(model.head.weight, torch.full((2, 2), 3.0))
    assert before and all(torch.equal(before[key], parameter) for key, parameter in gate_parameters(model).items())
    model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    drawn = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(drawn) > 1 and not any(module.weight.any() for module in drawn)  # other functions reach gates

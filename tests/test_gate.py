"""Starts that hosts do not overwrite."""

from __future__ import annotations

import copy
import io
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from helpers.starts import HOSTS, C, H, Host, assert_uniform, deformable, dense, gated, initialised
from mmengine.model import BaseModule
from torch import Tensor, nn

from mmgate import gate_parameters, restore_attention, swap_attention
from mmgate.registry import MODELS


@pytest.mark.parametrize('init, host', zip(['identity', 'paper'] * 2, HOSTS, strict=False))
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


@pytest.mark.parametrize(
    'options',
    [{}, dict(act='sigmoid', scale=2.0), dict(act='ns_sigmoid', scale=4 / 3), dict(form='additive')],
    ids=str,
)
def test_sdpa_starts_as_the_vanilla_attention_in_a_host_that_draws_all(options: dict[str, Any]) -> None:
    layer = initialised('pvt', (dense, SDPA | options)).layers[0]
    x = torch.randn(2, 5, C)
    out = layer(x, x, x)[0]
    restore_attention(layer)
    expected = layer(x, x, x)[0]
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-6 * max(1, expected.abs().max().item()))


def test_what_a_checkpoint_filled_is_not_drawn_anew() -> None:
    model = gated('mask2former', (dense, SDPA), (dense, SDPA))
    one, other = model.layers
    state = {name: torch.full_like(value, 0.5) for name, value in one.state_dict().items()}
    one.load_state_dict(state)
    other.load_state_dict({'in_proj_weight': state['in_proj_weight']}, strict=False)  # of a vanilla attention
    model.init_weights()
    assert torch.equal(one.gate.gate_bias, state['gate.gate_bias'])
    assert torch.count_nonzero(other.gate.gate_weight) == 0


def test_a_gated_model_copies_and_pickles() -> None:
    model = gated('mask2former', (dense, SDPA))
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


def test_gates_are_hidden_from_the_hosts_initialisation_alone() -> None:
    """Other threads see them meanwhile, and all do after an error in it."""
    model = gated('mask2former', (dense, SDPA))
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
@pytest.mark.parametrize('seed', [1, -1, 2**63])
def test_a_stream_is_of_the_seed_and_the_name(gate: str, seed: int) -> None:
    """Seeds of torch lie between -2^63 and 2^64, and a sum of two may leave that range."""

    def start(seed: int, path: str, drawn: int = 0) -> Tensor:
        torch.manual_seed(seed)
        model = Host('mask2former', dense(), dense())
        swap_attention(model, dict(path=path, type=gate))
        torch.rand(drawn)  # meanwhile
        model.init_weights()
        return next(p for n, p in model.named_parameters() if 'gate' in n and n.endswith('weight')).detach()

    assert torch.equal(start(seed, 'layers.0'), start(seed, 'layers.0', drawn=3))
    assert not torch.equal(start(seed, 'layers.0'), start(2, 'layers.0'))
    assert not torch.equal(start(seed, 'layers.0'), start(seed, 'layers.1'))


class Drawn(BaseModule):
    """A model whose init_cfg draws every layer, around a module that mmengine does not ask for its start."""

    def __init__(self, attention: dict[str, Any]) -> None:
        super().__init__(init_cfg=dict(type='Constant', layer=['Linear', 'Conv2d', 'RMSNorm'], val=3.0, bias=3.0))
        self.part = nn.Sequential(MODELS.build(dict(attention, embed_dims=C, num_heads=H)))
        self.head = nn.Linear(2, 2)


@pytest.mark.parametrize(
    'attention',
    [
        dict(type='mmgate.PLuGMultiScaleDeformableAttention', gml='none'),
        dict(type='mmgate.DifferentialGatedMultiheadAttention'),
        dict(type='mmgate.AgentAttention', map_size=(4, 4), agent_num=4),
    ],
    ids=lambda attention: attention['type'],
)
def test_an_init_cfg_around_a_plain_module_draws_no_gate(attention: dict[str, Any]) -> None:
    """PLuG's gate projections without a gml, for instance, start at 0, which is the identity."""
    model = Drawn(attention)
    before = {key: parameter.clone() for key, parameter in gate_parameters(model).items()}
    model.init_weights()
    assert torch.equal(model.head.weight, torch.full((2, 2), 3.0))
    assert before and all(torch.equal(before[key], parameter) for key, parameter in gate_parameters(model).items())
    model.apply(lambda module: nn.init.zeros_(module.weight) if isinstance(module, nn.Linear) else None)
    drawn = [module for module in model.modules() if isinstance(module, nn.Linear)]
    assert len(drawn) > 1 and not any(module.weight.any() for module in drawn)  # other functions reach gates

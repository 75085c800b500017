"""Names of gates as the type of a config: the attention that they build is gated as by a rule."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gated import anatomy
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmengine.model import BaseModule, ModuleList
from mmengine.registry import MODELS as ROOT
from torch import nn

import mmgate
from mmgate.errors import ConfigError
from mmgate.gate import registered_gates
from mmgate.gates.base.map import MapAttention

MAP = dict(map_size=(4, 4))
# By case, the type, further arguments, its host's class and the arguments of a call.
TYPES: dict[str, tuple[str, dict[str, Any], type[nn.Module], dict[str, Any]]] = {
    'dense': ('PLuGMultiheadAttention', dict(init='paper', attn_drop=0.1, batch_first=True), MultiheadAttention, {}),
    'map': ('SAGAAttention', MAP, MapAttention, dict(hw_shape=(4, 4))),
    'deformable': (
        'PLuGMultiScaleDeformableAttention',
        dict(num_levels=1, num_points=2, init='paper', batch_first=True),
        MultiScaleDeformableAttention,
        dict(
            reference_points=torch.linspace(0.1, 0.9, 16).view(1, 16, 1, 1).expand(1, 16, 1, 2),
            spatial_shapes=torch.tensor([[4, 4]]),
            level_start_index=torch.tensor([0]),
        ),
    ),
}


class Two(BaseModule):
    """A model of two layers, named by the type."""

    def __init__(self, **cfg: Any) -> None:
        super().__init__()
        self.layers = ModuleList(ROOT.build(copy.deepcopy(cfg)) for _ in range(2))


def build(name: str) -> Any:
    kind, options, _, _ = TYPES[name]
    torch.manual_seed(0)
    model = Two(type=f'mmgate.{kind}', embed_dims=16, num_heads=4, **options)
    model.init_weights()
    return model.eval()


def vanilla(name: str) -> Any:
    _, options, host, _ = TYPES[name]
    own = {key: value for key, value in options.items() if key in ('num_levels', 'num_points', 'batch_first')}
    torch.manual_seed(0)
    model = Two(type=host, embed_dims=16, num_heads=4, **own)
    model.init_weights()
    return model.eval()


@pytest.mark.parametrize('name', TYPES)
def test_attention_that_a_type_builds_is_gated_as_by_a_rule(name: str, tmp_path: Path) -> None:
    """It starts as the vanilla one, as random numbers go on, and each layer's gates have their own.

    It is listed, saved and removed; a file of the gates fits the vanilla model.
    """
    kind, _, host, given = TYPES[name]
    model, state = build(name), torch.get_rng_state()
    other = vanilla(name)
    assert torch.equal(state, torch.get_rng_state())
    gates = mmgate.gate_parameters(model)
    own = {key: tensor for key, tensor in model.state_dict().items() if key not in gates}
    torch.testing.assert_close(own, dict(other.state_dict()), rtol=0, atol=0)
    drawn = {key: tensor for key, tensor in gates.items() if tensor.std() > 0 and key.startswith('layers.0')}
    assert drawn and not any(torch.equal(one, gates[key.replace('.0.', '.1.', 1)]) for key, one in drawn.items())

    x = torch.randn(1, 16, 16)
    for parameter in gates.values():
        nn.init.normal_(parameter)
    expected, gated = ([layer(x, **given) for layer in one.layers] for one in (other, model))
    assert not torch.allclose(gated[0], expected[0])
    mmgate.save_gates(model, tmp_path / 'gates.safetensors')
    mmgate.load_gates(other, tmp_path / 'gates.safetensors')
    torch.testing.assert_close([layer(x, **given) for layer in other.layers], gated)
    listed = mmgate.list_attention(model)
    assert [(one.path, one.class_name) for one in listed] == [(f'layers.{i}', host.__name__) for i in range(2)]
    with pytest.raises(ConfigError, match='layers.0 is gated already'):
        mmgate.swap_attention(model, dict(type=kind, path='layers.0'))
    assert mmgate.restore_attention(model) == ['layers.0', 'layers.1']
    assert list(anatomy(model)) == list(anatomy(vanilla(name))) and type(model.layers[0]) is host
    torch.testing.assert_close([layer(x, **given) for layer in model.layers], expected)


def test_every_registered_name_builds_attention_with_its_gate() -> None:
    ours = [kind for kind in registered_gates() if kind.__module__.startswith('mmgate.')]
    assert len(ours) > 8
    for kind in ours:
        assert hasattr(kind, 'gate_type'), f'{kind}: register the function that builds attention with it, not the gate'
        assert issubclass(kind.gate_type, mmgate.Gate) and kind.__doc__, kind
        assert getattr(mmgate.gates, kind.__name__) is kind
        gate = kind.gate_type.__name__
        assert gate in mmgate.gates.__all__ or kind is mmgate.gates.MultiScaleDeformableAttention

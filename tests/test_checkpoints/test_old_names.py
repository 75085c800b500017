"""Checkpoints and files of gates with the names of mmgate 0.1, whose gates lay where their family of hosts had them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import filled, needs_mmpretrain
from mmcv.cnn.bricks.transformer import MultiheadAttention
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.pvt import SpatialReductionAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from mmengine.registry import MODELS
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

import mmgate
from mmgate.layers.base.gate import Gate, is_gate_key

C, H = 16, 4
PLUG = dict(type='mmgate.PLuGMultiheadAttention')
DEFORMABLE = dict(type='mmgate.PLuGMultiScaleDeformableAttention')
SDPA = dict(type='mmgate.SDPAGatedMultiheadAttention')
DGSA = dict(type='mmgate.DifferentialGatedMultiheadAttention', learnable=True, gate_depth=2)
DIFFERENTIAL = dict(type='mmgate.DifferentialMultiheadAttention')
AGENT = dict(type='mmgate.AgentAttention', agent_num=4, map_size=(8, 8))
SAGA = dict(type='mmgate.SAGAAttention', map_size=(8, 8))
FOCUSED = dict(type='mmgate.FocusedLinearAttention', map_size=(8, 8))
REDUCED = {
    'attn.in_proj_weight': 'qkv.weight',
    'attn.in_proj_bias': 'qkv.bias',
    'attn.out_proj.': 'proj.',
    'gate.': '',
}
TOKENS = {
    'qkv.weight': 'attn.in_proj_weight',
    'qkv.bias': 'attn.in_proj_bias',
    'proj.': 'attn.out_proj.',
    'gate.': 'attn.',
}
Make = Callable[[], nn.Module]


def vit_attention() -> nn.Module:
    arch = dict(embed_dims=C, num_layers=1, num_heads=H, feedforward_channels=C)
    return MODELS.build(dict(type='mmpretrain.VisionTransformer', arch=arch)).layers[0].attn


# by family: the host, where it is gated, the gate, and by beginnings of names what mmgate 0.1 had there
FAMILIES: dict[str, tuple[Make, str, dict[str, Any], dict[str, str]]] = {
    'torch': (lambda: nn.MultiheadAttention(C, H), 'attn', PLUG, {'gate.': ''}),
    'torch, M-DGSA': (lambda: nn.MultiheadAttention(C, H), 'attn', DGSA, {'gate.': ''}),
    'torch, differential': (lambda: nn.MultiheadAttention(C, H), 'attn', DIFFERENTIAL, {'gate.': ''}),
    'mmcv': (lambda: MultiheadAttention(C, H), 'attn', SDPA, {'attn.gate.': 'attn.'}),
    'deformable': (lambda: MultiScaleDeformableAttention(C, H, 2, 3), 'attn', DEFORMABLE, {'gate.': ''}),
    'PVT': (lambda: SpatialReductionAttention(C, H, sr_ratio=2), 'attn', PLUG, {'attn.gate.': 'attn.'}),
    'Swin': (lambda: ShiftWindowMSA(C, H, 4, 2).w_msa, 'attn', PLUG, TOKENS),
    'ViT': (vit_attention, 'attn', PLUG, TOKENS),
    'ViT, Agent': (vit_attention, 'attn', dict(AGENT, class_token=True), {'gate.': ''}),
    'GLIP': (
        lambda: BiMultiHeadAttention(C, 24, 32, H),
        'attn',
        PLUG,
        {'gate.vision.': 'gate_v.', 'gate.language.': 'gate_l.'},
    ),
    'Swin, Agent': (
        lambda: ShiftWindowMSA(C, H, 4, 2),
        'attn',
        AGENT,
        {'w_msa.qkv.': 'qkv.', 'w_msa.proj.': 'proj.', 'gate.': ''},
    ),
    'PVT, Agent': (lambda: SpatialReductionAttention(C, H, sr_ratio=2), 'attn', AGENT, REDUCED),
    'PVT, SAGA': (lambda: SpatialReductionAttention(C, H, sr_ratio=2), 'attn', SAGA, REDUCED),
    'PVT, linear': (lambda: SpatialReductionAttention(C, H, sr_ratio=2), 'attn', FOCUSED, REDUCED),
}
every_family = pytest.mark.parametrize(
    'family', [pytest.param(name, marks=[needs_mmpretrain] * name.startswith('ViT')) for name in FAMILIES]
)


def vanilla(family: str, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    make, path, *_ = FAMILIES[family]
    return filled(nn.ModuleDict({'norm': nn.LayerNorm(C), path: make()}), 0.5)


def gated(family: str, seed: int = 0) -> nn.Module:
    model = vanilla(family, seed)
    _, path, rule, _ = FAMILIES[family]
    mmgate.swap_attention(model, dict(rule, path=path))
    torch.manual_seed(seed + 100)
    for parameter in mmgate.gate_parameters(model).values():
        nn.init.normal_(parameter)
    return model


def of_0_1(family: str, name: str) -> str:
    """Return the name that a tensor of a gated model had in mmgate 0.1."""
    _, path, _, names = FAMILIES[family]
    return next(
        (
            f'{path}.{old}{name[len(path) + 1 + len(new) :]}'
            for new, old in names.items()
            if name.startswith(f'{path}.{new}')
        ),
        name,
    )


def assert_equal(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(actual) == list(expected)
    assert not [name for name, tensor in expected.items() if not torch.equal(actual[name], tensor)]


@every_family
def test_a_checkpoint_of_mmgate_0_1_loads(family: str) -> None:
    """Strictly, below any prefix; a model that is initialised afterwards keeps its gates."""
    model = gated(family)
    state = model.state_dict()
    old = {of_0_1(family, name): tensor for name, tensor in state.items()}
    assert len(old) == len(state) and set(old) != set(state) and not any('.gate.' in name for name in old)
    added = {of_0_1(family, name) for name in mmgate.gate_parameters(model)}
    assert added and all(is_gate_key(name) for name in added)
    for prefix in ('', '0.'):
        other = gated(family, seed=1)
        whole = nn.Sequential(other) if prefix else other
        whole.load_state_dict({f'{prefix}{name}': tensor for name, tensor in old.items()}, strict=True)
        assert_equal(other.state_dict(), state)
        gates = [module for module in other.modules() if isinstance(module, Gate)]
        assert gates and all(gate.loaded for gate in gates)


@every_family
@pytest.mark.parametrize('train', ['gates', 'attention'])
def test_a_gates_file_of_mmgate_0_1_loads(family: str, train: str, tmp_path: Path) -> None:
    model, file = gated(family), tmp_path / 'gates.safetensors'
    mmgate.train_only_gates(model, train)
    mmgate.save_gates(model, file)
    left_out = {name: tensor for name, tensor in vanilla(family).state_dict().items() if '.sr.' in name}
    with safe_open(file, framework='pt') as opened:
        described = json.loads(opened.metadata()['mmgate.gates'])
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    gates = described['gates']
    described['gates'] = [of_0_1(family, name) for name in gates]
    old = {of_0_1(family, name) if name in gates else name: tensor for name, tensor in tensors.items()}
    if train == 'attention':
        old.update(left_out)  # which a file of mmgate 0.1 held, too
    save_file(old, file, metadata={'mmgate.gates': json.dumps(described)})
    for other in (vanilla(family), gated(family)):
        for parameter in mmgate.gate_parameters(other).values():
            nn.init.zeros_(parameter)
        loaded = mmgate.load_gates(other, file)
        assert set(gates) <= set(loaded)
        assert_equal(other.state_dict(), model.state_dict())
        other.load_state_dict(vanilla(family, seed=2).state_dict(), strict=False)  # a vanilla checkpoint, afterwards
        state = other.state_dict()
        assert all(torch.equal(state[name], tensor) for name, tensor in tensors.items())

"""mmgate in a process that knows of no mm package."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, TORCH

HIDDEN = """
import importlib.machinery, sys

class Hidden(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition('.')[0] in ('mmengine', 'mmcv', 'mmdet', 'mmseg', 'mmpretrain', 'timm'):
            return None
        return super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(importlib.machinery.PathFinder)] = Hidden
"""
SWAP = """
import logging, sys, torch
from torch import nn
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import mmgate
from mmgate.gates import PLuGMultiheadAttention
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
x = torch.randn(2, 5, 16)
before = model(x)
for kind in (PLuGMultiheadAttention, 'PLuGMultiheadAttention', 'mmgate.PLuGMultiheadAttention'):
    mmgate.restore_attention(model)
    assert torch.equal(model(x), before)
    assert len(mmgate.swap_attention(model, dict(path='layers.*.self_attn', type=kind))) == 2
torch.testing.assert_close(model(x), before)
for parameter in mmgate.gate_parameters(model).values():
    nn.init.normal_(parameter)
assert set(mmgate.train_only_gates(model)) == set(mmgate.gate_parameters(model))
after = model(x)
assert (after - before).abs().max() > 1e-3
with mmgate.gates_disabled(model):
    torch.testing.assert_close(model(x), before)  # torch has a fused path where nothing trains
mmgate.save_gates(model, 'gates.safetensors')
mmgate.restore_attention(model)
mmgate.load_gates(model, 'gates.safetensors')
assert torch.equal(model(x), after)
try:
    mmgate.swap_attention(model, dict(path='**', type='PLuGMultiheadAttentio'))
except ValueError as error:
    print(error)
"""
LAYERS = """
import torch
from mmgate import gates
from mmgate.gates.base.deformable import DeformableGate
from mmgate.gates.base.dense import DenseGate, make_gated
from mmgate.gate import Sizes
from mmgate.gates.base.map import MapGate
x = torch.randn(2, 16, 32)
shapes, start = torch.tensor([[4, 4], [2, 2]]), torch.tensor([0, 16])
made = 0
for name in gates.__all__:
    kind = getattr(gates, name)
    builds = getattr(kind, 'gate_type', None) if not isinstance(kind, type) else None
    if builds is not None and issubclass(builds, DeformableGate):
        points = dict(reference_points=torch.rand(2, 16, 2, 2), spatial_shapes=shapes, level_start_index=start)
        for count, steps in ((2, [1, 2, 1, 2]), ([1, 3], [1, 1, 2, 3])):
            module = kind(32, 4, 2, count, batch_first=True, dropout=0.0)
            module.init_weights()
            of_a_head = module.sampling_offsets.bias.view(4, -1, 2)[0]
            assert of_a_head.abs().amax(-1).tolist() == steps, (name, of_a_head)
            y = module(x, value=torch.randn(2, 20, 32), query_pos=x, **points)
    elif builds is not None and issubclass(builds, DenseGate):
        drop = dict(type='DropPath', drop_prob=0.5)
        y = kind(32, 4, batch_first=True, dropout_layer=drop)(x, query_pos=x)
    elif builds is None and issubclass(kind, DenseGate):
        y, _ = make_gated(torch.nn.MultiheadAttention(32, 4, batch_first=True), kind)(x, x, x)
    elif builds is None and issubclass(kind, DeformableGate):
        gate = kind(Sizes(32, 4, levels=2, points=2))
        gate.reset()
        y = x * gate.modulate(x)['gate'].mean()
    elif builds is None and issubclass(kind, MapGate):
        try:
            gate = kind(Sizes(32, 4))
        except TypeError:
            gate = kind(Sizes(32, 4), map_size=(4, 4))
        gate.reset()
        y = gate.mix(x, x, x, x, (4, 4))
    elif name == 'GatingModulation':
        y = kind()(x)
    else:
        try:
            module = kind(32, 4)
        except TypeError:
            module = kind(32, 4, map_size=(4, 4))
        y = module(x, (4, 4))
    assert y.shape == x.shape and y.isfinite().all(), name
    made += 1
print(made, 'layers')
"""
MAPS = """
import torch, mmgate
from timm.models.vision_transformer import VisionTransformer
model = VisionTransformer(img_size=(48, 32), patch_size=16, embed_dim=32, depth=1, num_heads=4, num_classes=5)
assert mmgate.swap_attention(model, dict(path='**', type='AgentAttention')) == ['blocks.0.attn']
assert model(torch.randn(1, 3, 48, 32)).isfinite().all()
"""


def run(code: str, folder: Path, prelude: str = HIDDEN, unseen: str = 'transformers') -> str:
    paths = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    closing = f"\nassert not {{'mmengine', 'mmcv', 'mmdet', 'mmseg', '{unseen}'}} & set(__import__('sys').modules)\n"
    done = subprocess.run(
        [sys.executable, '-W', 'ignore', '-c', prelude + code + closing],
        **dict(cwd=folder, env={**os.environ, 'PYTHONPATH': paths}, capture_output=True, text=True, timeout=240),
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


ASKED = "import os; os.environ['MMGATE_TORCH_ALONE'] = '1'\n"


REFUSED = {
    "gates.PLuGMultiheadAttention(32, 4, dropout_layer=dict(type='Gaussian'))": "type='Gaussian' needs mmcv",
    'gates.PLuGMultiheadAttention(32, 4, init_cfg={})': 'read by mmengine',
    'gates.MultiScaleDeformableAttention(32, 5)': 'not a multiple',
    'mmgate.Gated': 'pip install',
}


def test_every_layer_runs_and_what_needs_a_package_is_refused(tmp_path: Path) -> None:
    from mmgate import gates

    tried = [f'try:\n    {code}\nexcept (ValueError, ImportError) as error:\n    print(error)\n' for code in REFUSED]
    said = run(f'{LAYERS}import mmgate\nfrom mmgate import *\n{"".join(tried)}', tmp_path)
    assert said.startswith(f'{len(gates.__all__)} layers\n')
    assert all(words in said for words in REFUSED.values()), said


def test_every_layer_runs_where_packages_are_left_out(tmp_path: Path) -> None:
    """And the first rule may name an attention over a map: its hosts are timm's, whose adapters are imported late."""
    from mmgate import gates

    maps = MAPS if find_spec('timm') else ''
    assert run(LAYERS + maps, tmp_path, ASKED) == f'{len(gates.__all__)} layers\n'


def test_every_gate_is_exported_beside_its_attention() -> None:
    from mmgate import gates
    from mmgate.gate import registered_gates

    ours = [kind for kind in registered_gates() if kind.__module__.startswith('mmgate.gates.')]
    found = {kind.gate_type.__name__ for kind in ours if kind is not gates.MultiScaleDeformableAttention}
    assert len(found) >= 9 and found <= set(gates.__all__)
    assert all(getattr(gates, name).__name__ == name for name in gates.__all__)


def test_swaps_and_gates_as_adapters(tmp_path: Path) -> None:
    said = run(SWAP, tmp_path)
    assert 'Did you mean\n  PLuGMultiheadAttention\n' in said
    assert 'INFO:mmgate:mmgate: trains' in said


OLD = """
import logging, sys
from torch import nn
sys.path.insert(0, '')
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import mmgate
from transformers.bert import BertAttention
model = nn.ModuleDict(dict(language=BertAttention(8, 2), vision=nn.MultiheadAttention(8, 2)))
print(mmgate.swap_attention(model, dict(path='**', type='PLuGMultiheadAttention')))
"""


@pytest.mark.skipif(TORCH < (2, 2), reason='torch 2.1 asks transformers itself as it starts Dynamo')
def test_an_older_transformers_is_no_host_and_no_hindrance(tmp_path: Path) -> None:
    (tmp_path / 'transformers').mkdir()
    (tmp_path / 'transformers/__init__.py').touch()
    (tmp_path / 'transformers/bert.py').write_text(
        'from torch import nn\n\n\nclass BertAttention(nn.MultiheadAttention):\n    pass\n'
    )
    said = run(OLD, tmp_path, unseen='nothing')
    assert said.count('mmgate has no adapters for transformers here') == 1 and "['vision']" in said

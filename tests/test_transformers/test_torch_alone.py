"""mmgate in a process that knows of no mm package."""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

import pytest
from conftest import ROOT, TORCH, run_python
from helpers.environments import HIDDEN
from helpers.families import FAMILIES

SWAP = """
import logging, sys, torch
from torch import nn
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
import mmgate
layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
x = torch.randn(2, 5, 16)
before = model(x)
for kind in (mmgate.gates.PLuGMultiheadAttention, 'mmgate.PLuGMultiheadAttention', 'PLuGMultiheadAttention'):
    mmgate.restore_attention(model)
    assert len(mmgate.swap_attention(model, dict(path='layers.*.self_attn', type=kind))) == 2
torch.testing.assert_close(model(x), before)
for name in mmgate.train_only_gates(model):
    nn.init.normal_(model.get_parameter(name))
after = model(x)
assert (after - before).abs().max() > 1e-3
mmgate.save_gates(model, 'gates.safetensors')
mmgate.restore_attention(model)
mmgate.load_gates(model, 'gates.safetensors')
assert torch.equal(model(x), after)
"""
LAYERS = """
import torch
from helpers.families import C, FAMILIES, build, call
from mmgate import gates
x = torch.randn(2, 16, C)
for name in FAMILIES:
    y = call(build(name).train(), (4, 4))(x)
    assert y.shape == x.shape and y.isfinite().all(), name
    print(name)
"""
MAPS = """
import torch, mmgate
from timm.models.vision_transformer import VisionTransformer
model = VisionTransformer(img_size=(48, 32), patch_size=16, embed_dim=32, depth=1, num_heads=4, num_classes=5)
assert mmgate.swap_attention(model, dict(path='**', type='AgentAttention')) == ['blocks.0.attn']
assert model(torch.randn(1, 3, 48, 32)).isfinite().all()
"""


def run(code: str, folder: Path, prelude: str = HIDDEN, unseen: str = 'transformers') -> str:
    paths = os.pathsep.join([str(ROOT), str(ROOT / 'tests'), os.environ.get('PYTHONPATH', '')])
    closing = f"\nassert not {{'mmengine', 'mmcv', 'mmdet', 'mmseg', '{unseen}'}} & set(__import__('sys').modules)\n"
    return run_python('-c', prelude + code + closing, cwd=folder, PYTHONPATH=paths).stdout


REFUSED = {
    "gates.PLuGMultiheadAttention(32, 4, dropout_layer=dict(type='Gaussian'))": "type='Gaussian' needs mmcv",
    'gates.PLuGMultiheadAttention(32, 4, init_cfg={})': 'read by mmengine',
    'gates.MultiScaleDeformableAttention(32, 5)': 'not a multiple',
    'mmgate.Gated': 'pip install',
    "mmgate.swap_attention(model, dict(path='**', type='PLuGMultiheadAttentio'))": (
        'Did you mean\n  PLuGMultiheadAttention\n'
    ),
}


def test_every_attention_and_swaps_run_and_what_needs_a_package_is_refused(tmp_path: Path) -> None:
    tried = [f'try:\n    {code}\nexcept (ValueError, ImportError) as error:\n    print(error)\n' for code in REFUSED]
    said = run(f'{LAYERS}{SWAP}from mmgate import *\n{"".join(tried)}', tmp_path)
    assert said.split()[: len(FAMILIES)] == FAMILIES and 'INFO:mmgate:mmgate: trains' in said
    assert all(words in said for words in REFUSED.values()), said


def test_every_attention_runs_where_packages_are_left_out(tmp_path: Path) -> None:
    """And the first rule may name an attention over a map: its hosts are timm's, whose adapters are imported late."""
    maps = MAPS if find_spec('timm') else ''
    asked = "import os; os.environ['MMGATE_TORCH_ALONE'] = '1'\n"
    assert run(LAYERS + maps, tmp_path, asked).split() == FAMILIES


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

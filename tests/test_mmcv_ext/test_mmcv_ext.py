"""An mmcv without compiled operators: found, said, and as good as one with them."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch
from conftest import ROOT, run_python
from helpers.compiled_mmcv import HIDDEN, compiled

from mmgate import mmcv_ext

BROKEN = """
import sys
class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == 'mmcv._ext':
            raise ImportError('_ext.so: undefined symbol: _ZN3c10')
sys.meta_path.insert(0, Finder())
"""
DEMOS = [
    'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py',
    'configs/agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
    'configs/saga/mask_rcnn/saga-mask-rcnn_swin-demo_1xb8-8e_shapes.py',
]
# Prints losses, the gradients' sums and the detections of a model, and whether the operators are ours.
LOSSES = """
import json, sys, torch, mmgate
from mmdet.testing import demo_mm_inputs
from mmdet.utils import register_all_modules
from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmgate import mmcv_ext
from mmgate.registry import MODELS
result = []
for path in sys.argv[1:]:
    torch.manual_seed(0)
    cfg = Config.fromfile(path)
    init_default_scope('mmdet')
    model = MODELS.build(cfg.model)
    model.init_weights()
    batch = demo_mm_inputs(2, [[3, 128, 128]] * 2, num_items=[3, 2], num_classes=6, with_mask=True)
    losses = model(**model.data_preprocessor(batch, True), mode='loss')
    loss, logs = model.parse_losses(losses)
    loss.backward()
    gradients = sum(p.grad.double().abs().sum() for p in model.parameters() if p.grad is not None)
    model.eval()
    with torch.no_grad():
        found = model.test_step(demo_mm_inputs(1, [[3, 128, 128]], num_classes=6))[0].pred_instances
    result.append([*logs.values(), gradients, found.scores.sum(), float(len(found.scores))])
print(json.dumps([mmcv_ext.provided(), [[float(x) for x in row] for row in result]]))
"""

# mmdet may come first, as long as its models do not
FOUND = """
import sys, mmdet, mmgate
import mmcv.ops, torch
from mmgate import mmcv_ext
mmcv_ext.provide()
print('ours', mmcv_ext.provided(), len([x for x in sys.meta_path if type(x).__module__ == 'mmgate.mmcv_ext']))
try:
    mmcv.ops.CARAFE(3, 1, 1)(torch.zeros(1, 4, 4, 4), torch.zeros(1, 9, 4, 4))
except NotImplementedError as error:
    print(error)
"""


@pytest.fixture(scope='module')
def hidden() -> subprocess.CompletedProcess[str]:
    """Return what a process prints in which mmcv's operators are hidden."""
    pytest.importorskip('mmdet')
    if not (ROOT / DEMOS[0]).is_file():
        pytest.skip('needs the checkout')
    return run_python('-c', HIDDEN + FOUND + LOSSES, *(ROOT / demo for demo in DEMOS), PYTHONPATH=str(ROOT))


def test_a_compiled_module_is_never_touched() -> None:
    compiled()
    assert not mmcv_ext.provided()
    done = run_python('-c', BROKEN + 'import mmgate, mmcv.ops', fails=True)
    assert 'undefined symbol' in done.stderr and 'has no compiled operators' not in done.stdout + done.stderr


def test_the_import_finds_ours_and_says_so_once(hidden: subprocess.CompletedProcess[str]) -> None:
    said = hidden.stdout + hidden.stderr
    assert 'ours True 1' in said and said.count('mmcv has no compiled operators') == 1
    assert 'was imported before mmgate' not in said
    assert 'carafe_forward: mmcv was installed without its compiled operators' in said and 'docs/install.md' in said


def test_nothing_of_mmcv_is_imported_for_it() -> None:
    code = "import sys; from mmgate import mmcv_ext; mmcv_ext.provide(); print('mmcv' in sys.modules)"
    assert run_python('-c', code, MMGATE_TORCH_ALONE='1').stdout.split()[-1] == 'False'


def test_a_host_that_was_imported_first_is_named() -> None:
    """The forks then have functions instead that raise an error, where they take one from ``mmcv.ops``."""
    pytest.importorskip('mmdet')
    done = run_python('-c', f'{HIDDEN}try:\n    import mmdet.models\nexcept ImportError: pass\nimport mmgate.gates')
    said = done.stdout + done.stderr
    assert said.count('mmcv has no compiled operators') == 1 and 'was imported before mmgate' in said


def test_losses_gradients_and_detections_of_the_demos_are_the_same(
    hidden: subprocess.CompletedProcess[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled()
    monkeypatch.setattr(sys, 'argv', ['', *(str(ROOT / demo) for demo in DEMOS)])
    exec(LOSSES, {})
    printed = (capsys.readouterr().out, hidden.stdout)
    (theirs, expected), (ours, found) = (json.loads(out.splitlines()[-1]) for out in printed)
    assert ours and not theirs
    for demo, was, now in zip(DEMOS, expected, found, strict=True):
        torch.testing.assert_close(now, was, rtol=2e-4, atol=1e-6, msg=lambda text, demo=demo: f'{demo}: {text}')

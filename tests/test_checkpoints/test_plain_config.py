"""A checkpoint's config may hold values, name classes of the mm packages, and import those; nothing else runs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
from mmengine.config import Config
from mmengine.registry import MODELS, Registry

from mmgate.checkpoints.plain_config import plain_values, what_runs

TEXTS = [
    ("model = dict(type='X', a=[1, -2.5, None], b=float('inf'), c=inf)\nlr = 1e-3", False),
    ("__import__('os').system('true')", True),
    ("x = __import__('os').system('true')", True),
    ('import os', True),
    ('x = ().__class__.__base__', True),
    ("dict = eval\nx = dict('1')", True),
    ('not python (', False),
    ('x = {{\'$NO_SUCH:1|__import__("os").system("true")#\'}}', True),
    ("_base_ = '/tmp/x.py'", True),
    ('x = 9**9**9', True),
    ("model = dict(type='subprocess.check_call', args=['true'])", True),
    ("model = dict(backbone={'type': 'mmengine.utils.package_utils.call_command', 'cmd': ['true']})", True),
    ("model = dict(type='mmengine.hub.os.system')", True),
    ("optim_wrapper = dict(paramwise_cfg=dict(grouped='os.system'))", True),
    ("keys = dict({'backbone.a': dict(lr_mult=0.1)})", False),  # as mmengine writes keys with dots
    ("model = dict({'type': 'subprocess.check_call'})", True),
    ("model = dict([('type', 'subprocess.check_call')])", True),
    ("model = {**{'type': 'subprocess.check_call'}}", True),
    ("model = dict(**{'a': 1})", True),
    ("name = 'subprocess.check_call'\nmodel = dict(type=name)", True),
    ("model = dict(type='mmgate.Gated', host='mmdet.models.detectors.DETR', o=dict(type='torch.optim.AdamW'))", False),
    ("loader = dict(collate_fn=dict(type='mmengine.dataset.pseudo_collate'))", False),
    ("custom_imports = dict(imports=['mmgate', 'mmdet.models'], allow_failed_imports=False)", False),
    ("custom_imports = dict(imports=['mmgate', 'antigravity'])", True),
    ("custom_imports = dict(imports='evil_module')", True),
    ("x = custom_imports = dict(imports='evil_module')", True),
    ("custom_imports = dict(imports='module_of_the_running_config')", False),
]


@pytest.mark.parametrize('text, runs', TEXTS)
def test_what_a_config_may_hold(text: str, runs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, 'module_of_the_running_config', ModuleType('mine'))
    assert bool(what_runs(text)) == runs


def test_a_project_with_registries_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "model = dict(type='project_of_mine.Net')"
    assert what_runs(text) == "type='project_of_mine.Net'"
    monkeypatch.setitem(MODELS.children, 'project_of_mine', Registry('model', scope='project_of_mine'))
    assert what_runs(text) is None


def test_values_are_those_that_mmengine_wrote() -> None:
    given = dict(model=dict(type='A', keys={'a.b': (1, -2.0)}, s={1}, deep=[dict(x=None)]), lr=1e-3, name='it\'s "a"')
    assert plain_values(Config(given).pretty_text) == given

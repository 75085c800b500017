"""README as a new user follows it: its configs build, its Python runs, its links lead somewhere."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from mmgate.train.config_file import read_config

BLOCKS = re.findall(r'```python\n(.*?)```', (ROOT / 'README.md').read_text(), re.S)
CONFIGS = [block for block in BLOCKS if block.startswith('_base_')]
PAGES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *(p for p in ROOT.rglob('README.md') if '.venv' not in str(p))]


@pytest.mark.parametrize('number', range(len(CONFIGS)), ids=lambda n: re.search(r'[\w-]+\.py', CONFIGS[n][9:])[0])
def test_its_configs_build(number: int, tmp_path: Path) -> None:
    (tmp_path / 'import_mmgate.py').write_text("__import__('mmgate')")
    (tmp_path / 'mine.py').write_text(CONFIGS[number])
    cfg = read_config(str(tmp_path / 'mine.py'))
    init_default_scope(cfg.default_scope)
    with torch.device('cpu'):
        model = MODELS.build(cfg.model)
    assert any('mmgate' in type(module).__module__ for module in model.modules())


def test_its_python_swaps_and_undoes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (block for block in BLOCKS if 'swap_attention' in block)
    swap, undo = example.split('mmgate.restore_attention(model)')
    before, load = swap.split('load_checkpoint(model,')
    monkeypatch.chdir(tmp_path)
    space: dict = {}
    exec(before, space)
    model: nn.Module = space['model']
    torch.save(dict(state_dict=dict(model.state_dict())), 'deformable_detr.pth')
    exec('load_checkpoint(model,' + load, space)
    assert space['names'] == [f'encoder.layers.{i}.self_attn' for i in range(6)]
    gates = [model.get_submodule(name) for name in space['names']]
    assert all('mmgate' in type(gate).__module__ for gate in gates)
    with torch.no_grad():
        gates[0].value_proj.weight += 1
    exec('mmgate.restore_attention(model)' + undo, space)
    assert not any('mmgate' in type(module).__module__ for module in model.modules())
    assert torch.equal(model.encoder.layers[0].self_attn.value_proj.weight, gates[0].value_proj.weight)


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r'\]\(([^)#:\s]+)(?:#[^)]*)?\)', page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_it_is_short() -> None:
    assert len((ROOT / 'README.md').read_text().splitlines()) < 150


def test_every_test_file_has_its_promise() -> None:
    """On the page that says which promise is held by which file; its links are checked with the others."""
    page = ROOT / 'tests/README.md'
    linked = {(page.parent / link).resolve() for link in re.findall(r'\]\(([^)#:\s]+)\)', page.read_text())}
    tests = {path.resolve() for path in (ROOT / 'tests').rglob('test_*.py') if 'downstream_project' not in path.parts}
    assert sorted(str(path.relative_to(ROOT)) for path in tests - linked) == [], 'add a row to tests/README.md'

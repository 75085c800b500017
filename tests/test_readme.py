"""README and the guides as a new user follows them: configs build, Python runs, links and commands lead somewhere."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import ROOT, TORCH, run_python
from mmengine.registry import MODELS, init_default_scope
from torch import nn

import mmgate
from mmgate._environment import MM
from mmgate.errors import ConfigError
from mmgate.hosts import table
from mmgate.mm.config_file import read_config

GUIDES = [ROOT / 'README.md', ROOT / 'CONTRIBUTING.md', *sorted((ROOT / 'docs').rglob('*.md'))]
FOLDERS = [ROOT / name for name in ('configs', 'mmgate', 'tools', 'tests')]
BESIDE_THE_CODE = [page for folder in FOLDERS for page in folder.rglob('*.md') if '.mim' not in page.parts]
PAGES = sorted({*GUIDES, *BESIDE_THE_CODE, ROOT / 'CHANGELOG.md'})


def blocks(pages: list[Path], language: str) -> dict[str, str]:
    """Return the fenced blocks of ``language``, by page and number."""
    return {
        f'{page.relative_to(ROOT)}-{number}': block
        for page in pages
        for number, block in enumerate(re.findall(rf'```{language}\n(.*?)```', page.read_text(), re.S), 1)
    }


PYTHON = blocks(PAGES, 'python')
WITHOUT_MMCV = 'assert output.shape == (1, 1280, 256)\n'
EXPORTED = """
exported = program.module()(tokens, value=tokens, reference_points=points, **maps)
torch.testing.assert_close(exported, attention(tokens, value=tokens, reference_points=points, **maps))
"""
CONFIGS = {name: block for name, block in blocks(GUIDES, 'python').items() if block.startswith('_base_')}


@pytest.mark.parametrize('name', CONFIGS)
def test_its_configs_build(name: str, tmp_path: Path) -> None:
    (tmp_path / 'import_mmgate.py').write_text("__import__('mmgate')")
    (tmp_path / 'mine.py').write_text(CONFIGS[name])
    cfg = read_config(str(tmp_path / 'mine.py'))
    init_default_scope(cfg.default_scope)
    with torch.device('cpu'):
        model = MODELS.build(cfg.model)
    assert any('mmgate' in type(module).__module__ for module in model.modules())


@pytest.mark.parametrize('name', ['without_mmcv', 'extend'])
def test_a_page_runs_with_torch_alone(name: str, tmp_path: Path) -> None:
    """All of its blocks one after the other, in a process that has no mm package."""
    page = [block for key, block in PYTHON.items() if key.startswith(f'docs/{name}.md')]
    if TORCH < (2, 5):  # as the page says
        page = [block for block in page if 'torch.export' not in block]
    page.append(f'import sys\nassert not {set(MM)} & set(sys.modules)')
    if name == 'without_mmcv':
        page.append(WITHOUT_MMCV + EXPORTED * (TORCH >= (2, 5)))
    (tmp_path / 'page.py').write_text('\n'.join(page))
    run_python('page.py', cwd=tmp_path, MMGATE_TORCH_ALONE='1', PYTHONPATH=str(ROOT))


def test_the_page_on_the_public_interface_names_all_of_it() -> None:
    text = (ROOT / 'docs/extend.md').read_text()
    public = {*mmgate.__all__} - {'Gated', '__version__'}
    assert [name for name in sorted(public) if not re.search(rf'\b{name}\b', text)] == []
    modules = {'registry', 'gates', 'ops', 'backbones'}
    assert set(re.findall(r'(?<![/\w])mmgate\.([A-Za-z]\w*)', text)) <= public | modules


def test_its_python_swaps_and_undoes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (example,) = (block for block in PYTHON.values() if 'load_checkpoint(model,' in block)
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


def test_the_first_example_prints_what_the_page_shows(tmp_path: Path) -> None:
    """But for the largest difference, which is rounding."""
    readme = ROOT / 'README.md'
    program = tmp_path / 'page.py'
    program.write_text(blocks([readme], 'python')['README.md-1'])
    printed = run_python(program, PYTHONPATH=str(ROOT)).stdout.splitlines()[-2:]
    shown = blocks([readme], 'text')['README.md-1'].splitlines()
    assert printed[0] == shown[0]
    name, difference = printed[1].split(': ')
    assert shown[1].startswith(f'{name}: ') and float(difference) < 1e-5


# What differs between machines and runs: numbers, times, and the verdict on a gate.
VARIES = re.compile(r'-?[\d.]+(?:e-\d+)?')
VERDICT = re.compile(r'^- .* against vanilla: ')


def shape_of(line: str) -> str:
    """Return a line of output without what may differ, so that it can be compared."""
    verdict = VERDICT.match(line)
    return verdict[0] if verdict else ' '.join(VARIES.sub('#', line).split())


@pytest.mark.slow
def test_the_tutorial_runs_as_written(tmp_path: Path) -> None:
    """Its commands in one shell, in a folder with the checkout's tools and configs; its output has the lines shown."""
    tutorial = ROOT / 'docs/tutorial.md'
    for name in ('configs', 'mmgate', 'tools'):
        (tmp_path / name).symlink_to(ROOT / name)
    commands = ''.join(blocks([tutorial], 'bash').values())
    environment = os.environ | dict(
        PATH=f'{Path(sys.executable).parent}{os.pathsep}{os.environ["PATH"]}', PYTHONPATH=str(ROOT)
    )
    done = subprocess.run(
        ['bash', '-euo', 'pipefail', '-c', commands],
        cwd=tmp_path,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    printed = [shape_of(line) for line in done.stdout.splitlines()]
    for shown in ''.join(blocks([tutorial], 'text').values()).splitlines():
        start = shape_of(shown.removesuffix('...'))
        assert any(start in line for line in printed), shown


def test_its_adapters_let_gates_into_a_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of docs/extend.md, for a dense gate and for a gate over a map; both start as the host's own attention."""
    monkeypatch.setattr(table, '_ADAPTERS', dict(table._ADAPTERS))
    page = [block for name, block in PYTHON.items() if name.startswith('docs/extend.md')]
    space: dict = dict(__name__='guide')
    exec('import mmgate, torch\nfrom torch import nn\n' + '\n'.join(b for b in page if ', Attention)' in b), space)
    vit = nn.ModuleDict(dict(attention=space['Attention'](16, 4)))
    model = nn.ModuleDict(dict(backbone=vit))
    host, x, visible = vit['attention'], torch.randn(2, 7, 16), torch.ones(7, 7, dtype=torch.bool).tril()
    expected, masked = host(x), host(x, visible)
    dense, over_map = (dict(path='**.attention', type=f'{name}Attention') for name in ('PLuGMultihead', 'Softmax'))
    with pytest.raises(ConfigError, match='no model around it keeps its map'):
        mmgate.swap_attention(model, over_map)
    mmgate.swap_attention(model, dense)
    torch.testing.assert_close(host(x), expected)
    torch.testing.assert_close(host(x, visible), masked)
    host(x).square().sum().backward()
    assert all(parameter.grad is not None for parameter in host.parameters())
    mmgate.restore_attention(model)
    vit.grid = (2, 3)
    mmgate.swap_attention(model, over_map)
    torch.testing.assert_close(host(x), expected)
    with pytest.raises(ValueError, match='takes no mask'):
        host(x, visible)
    mmgate.restore_attention(model)
    host.causal = True
    with pytest.raises(ConfigError, match='it is causal'):
        mmgate.swap_attention(model, dense)


@pytest.mark.parametrize('name', PYTHON)
def test_python_can_be_read_and_imports_what_is_there(name: str) -> None:
    compile(PYTHON[name], name, 'exec')
    for imported in re.findall(r'^(?:from mmgate.*|import mmgate.*)$', PYTHON[name], re.M):
        try:
            exec(imported, {})
        except ModuleNotFoundError as error:
            # test_transformers/test_pages.py runs that page where the package is.
            assert error.name == 'transformers', error


@pytest.mark.parametrize('page', [*GUIDES, *BESIDE_THE_CODE], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_name_files_that_are_there(page: Path) -> None:
    commands = '\n'.join(blocks([page], 'bash').values())
    paths = re.findall(r'(?<![\w/.])(?:tools|configs)/[\w./-]+\.(?:py|sh)', commands)
    modules = re.findall(r'-m (mmgate[\w.]*)', commands)
    targets = re.findall(r'^make ([\w-]+)', commands, re.M)
    paths += [module.replace('.', '/') + '.py' for module in modules]
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    makefile = (ROOT / 'Makefile').read_text()
    assert [target for target in targets if f'\n{target}:' not in makefile] == []


@pytest.mark.parametrize('page', PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    links = re.findall(r'\]\(([^)#:\s]+)(?:#[^)]*)?\)', page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_headings_that_links_name_are_there() -> None:
    missing = []
    for page in PAGES:
        for link, anchor in re.findall(r'\]\(([^)#:\s]*)#([^)]*)\)', page.read_text()):
            target = page.parent / link if link else page
            headings = re.findall(r'^#+ (.*)$', target.read_text(), re.M)
            slugs = {re.sub(r'[^\w -]', '', heading.lower()).replace(' ', '-') for heading in headings}
            if anchor not in slugs:
                missing.append(f'{page.relative_to(ROOT)}: {link}#{anchor}')
    assert missing == []


def test_tables_of_options_are_those_of_the_signatures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / 'tools/dev')
    options = importlib.import_module('gate_options')
    page = options.PAGE.read_text()
    assert page.count('| option | default | meaning |') == 9
    assert page == options.written(page), 'python tools/dev/gate_options.py writes the tables'


def test_tests_that_pages_name_exist() -> None:
    files = [*(ROOT / 'tests').rglob('test_*'), *(ROOT / 'projects').glob('*/tests/test_*')]
    there = {file.name for file in files}
    there |= {
        name for file in files if file.suffix == '.py' for name in re.findall(r'def (test_\w+)', file.read_text())
    }
    named = {(page, name) for page in PAGES for name in re.findall(r'\b(test_\w+(?:\.py)?)\b', page.read_text())}
    others = {f'test_{name}' for name in ['cfg', 'dataloader', 'step', 'evaluator', '32x32', 'a', 'b', 'b.py']}
    assert not {(page.name, name) for page, name in named if name not in there | others}

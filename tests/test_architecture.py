"""docs/architecture.md names what is there, and tests mirror it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from conftest import ROOT

PAGE = (ROOT / 'docs/architecture.md').read_text()
TESTS = ROOT / 'tests'
# Test files about more than one module: about configs, pages, several processes, and what holds for every gate.
CROSSING = {
    'test_architecture.py',
    'test_configs.py',
    'test_downstream_project.py',
    'test_fake_tensors.py',
    'test_hosts/test_one_graph.py',
    'test_hosts/test_zoo.py',
    'test_gates/test_dropout.py',
    'test_gates/test_equations.py',
    'test_gates/test_families.py',
    'test_metafiles.py',
    'test_ops/test_any_arguments.py',
    'test_paper_commands.py',
    'test_papers.py',
    'test_process.py',
    'test_readme.py',
    'test_real.py',
    'test_recipes.py',
    'test_steps.py',
    'test_tools/test_end_to_end.py',
    'test_tools/test_looks.py',
    'test_tools/test_malicious.py',
    # what runs where there is no mm package
    'test_transformers/test_detectors.py',
    'test_transformers/test_hosts_of_transformers.py',
    'test_transformers/test_interface.py',
    'test_transformers/test_pages.py',
    'test_transformers/test_peft.py',
    'test_transformers/test_recording.py',
    'test_transformers/test_torch_alone.py',
}
# Modules without a test file of their name, by the file that tests them.
TESTED_BY = {
    'test_analysis/test_figures/test_figures.py': (
        'analysis/figures/gates.py',
        'analysis/figures/maps.py',
        'analysis/figures/sampling.py',
        'analysis/figures/style.py',
    ),
    'test_analysis/test_probes/test_recording.py': ('analysis/probes/gates.py', 'analysis/probes/sampling.py'),
    'test_analysis/test_probes/test_relevance.py': ('analysis/probes/cka.py', 'analysis/probes/layers.py'),
    'test_analysis/test_trials/test_study.py': ('analysis/trials/compare.py',),
    'test_backbones/test_backbones.py': ('backbones/cswin.py', 'backbones/pvt.py'),
    'test_benchmarks/test_ops.py': ('benchmarks/measure.py',),
    'test_checkpoints/test_loading.py': (
        'checkpoints/allowed.py',
        'checkpoints/safetensors_file.py',
        'checkpoints/unpickler.py',
    ),
    'test_deploy/test_build.py': ('deploy/boxes.py', 'deploy/detectors.py', 'deploy/network.py'),
    'test_deploy/test_export.py': ('deploy/operators.py', 'deploy/runtime.py', 'deploy/tracing.py'),
    'test_hosts/test_table.py': ('hosts/points.py',),
    'test_hosts/test_window.py': ('hosts/relative_positions.py',),
    'test_doctor.py': ('benchmarks/backends.py',),
    'test_environment.py': ('__init__.py',),
    'test_former.py': ('gates/__init__.py', 'layers.py', 'moved.py'),
    'test_files.py': ('checkpoints/gates_file.py',),
    'test_gates/test_equations.py': (
        'gates/dgsa.py',
        'gates/differential.py',
        'gates/parts/rms_norm.py',
        'gates/sdpa_gate.py',
    ),
    'test_gates/test_base/test_map.py': ('gates/parts/resizing.py', 'gates/parts/stripes.py'),
    'test_gates/test_saga.py': ('gates/base/linear.py',),
    'test_mmcv_ext/test_extension.py': (
        'mmcv_ext/boxes.py',
        'mmcv_ext/deform_conv.py',
        'mmcv_ext/focal_loss.py',
        'mmcv_ext/peer.py',
        'mmcv_ext/roi_align.py',
    ),
    'test_mm/test_load_report.py': ('mm/other_options.py',),
    'test_ops/test_any_arguments.py': ('ops/agent.py', 'ops/differential.py', 'ops/layout.py'),
    'test_ops/test_linear_attention.py': ('ops/gated_linear.py',),
    'test_ops/test_deformable/test_deformable.py': (
        'ops/deformable/grid_sample.py',
        'ops/deformable/mmcv.py',
        'ops/deformable/reference.py',
        'ops/deformable/samples.py',
        'ops/deformable/uneven.py',
    ),
    'test_ops/test_deformable/test_triton_deformable.py': (
        'ops/deformable/deformable_backward.py',
        'ops/deformable/deformable_kernels.py',
        'ops/triton_backend.py',
    ),
    'test_ops/test_dense/test_chunked.py': ('ops/autocast.py', 'ops/dense/reference.py'),
    'test_ops/test_dense/test_triton_dense.py': ('ops/dense/dense_kernels.py',),
    'test_metafiles.py': ('utils.py',),
    'test_process.py': ('registry.py',),
    'test_gating.py': ('adapter.py',),
    'test_swap.py': ('errors.py', 'gated.py', 'listing.py', 'plan.py'),
    'test_speed/test_hooks.py': ('speed/derived.py',),
    'test_speed/test_matching/test_matching.py': (
        'speed/matching/head.py',
        'speed/matching/masks.py',
        'speed/matching/pairs.py',
    ),
    'test_tools/test_analysis_tools/test_try_gates.py': ('analysis/trials/page.py', 'benchmarks/gate_trial.py'),
    'test_tools/test_end_to_end.py': ('tools/test.py',),
    'test_tools/test_looks.py': (
        'analysis/arguments.py',
        'analysis/figures/layers.py',
        'benchmarks/backbones.py',
    ),
    'test_transformers/test_hosts_of_transformers.py': ('transformers.py',),
}


def test_every_folder_and_file_of_the_package_has_its_row() -> None:
    package = ROOT / 'mmgate'
    there = {path.name for path in package.iterdir() if (path / '__init__.py').is_file() or path.suffix == '.py'}
    rows = ' '.join(re.findall(r'^\| (`.*?) \|', PAGE, flags=re.M))
    named = {name.rpartition('/')[2] for name in re.findall(r'`([\w./]+)`', rows)}
    assert there - {'__init__.py'} == named


def test_every_path_that_it_names_exists() -> None:
    for name in re.findall(r'`((?:ops|gates|hosts)/[\w/]+\.py)`', PAGE):
        assert (ROOT / 'mmgate' / name).is_file(), name


def files_of_tests() -> list[Path]:
    found = (path.relative_to(TESTS) for path in TESTS.rglob('test_*.py'))
    return sorted(path for path in found if path.parts[0] != 'downstream_project')


def mirrored_by(test: Path) -> list[Path]:
    """Return what a test file mirrors: a module of mmgate, or a script or module of ``tools``.

    ``test_a/test_b.py`` mirrors ``mmgate/a/b.py`` or ``_b.py``; ``test_a/test_a.py`` mirrors ``mmgate/a/__init__.py``.
    """
    *folders, name = (part.removeprefix('test_') for part in test.with_suffix('').parts)
    places = [ROOT.joinpath('mmgate', *folders)]
    if folders[:1] == ['tools']:
        places.append(ROOT.joinpath(*folders))
    names = [f'{name}.py', f'_{name}.py', f'{name}.sh']
    if folders and folders[-1] == name:
        names.append('__init__.py')
    return [place / file for place in places for file in names if (place / file).is_file()]


def test_each_test_file_mirrors_a_module_or_a_script() -> None:
    alone = {path.as_posix() for path in files_of_tests() if not mirrored_by(path)}
    assert sorted(alone - CROSSING) == [], 'move it to tests/test_a/test_b.py for mmgate/a/b.py'
    assert sorted(CROSSING - alone) == [], 'it has a module now, or is gone: take it out of CROSSING'


def test_each_module_has_a_test_file_of_its_name() -> None:
    """But for those in the list, for adapters, and for modules that define neither a function nor a class.

    ``test_hosts/test_table.py`` fails for an adapter whose hosts it does not call.
    """
    mirrored = {module for path in files_of_tests() for module in mirrored_by(path)}
    package = ROOT / 'mmgate'
    without = set()
    for module in package.rglob('*.py'):
        text = module.read_text()
        kinds = {type(node) for node in ast.parse(text).body}
        if 'from mmgate.hosts.table import adapts' in text:
            continue
        if module not in mirrored and kinds & {ast.FunctionDef, ast.ClassDef}:
            without.add(module.relative_to(package).as_posix())
    listed = [module for modules in TESTED_BY.values() for module in modules]
    assert len(listed) == len(set(listed)) and all((TESTS / test).is_file() for test in TESTED_BY)
    assert sorted(without - set(listed)) == [], 'give it tests/test_a/test_b.py for mmgate/a/b.py'
    assert sorted(set(listed) - without) == [], 'it has a test file of its name, or is gone: take it out of TESTED_BY'


def test_no_test_file_imports_another() -> None:
    """What several need lies in ``tests/helpers``, which imports no test file either."""
    helpers = [path.relative_to(TESTS) for path in (TESTS / 'helpers').glob('*.py')]
    for path in (*files_of_tests(), *helpers):
        for node in ast.walk(ast.parse((TESTS / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                assert not node.level, f'{path}: import helpers by their full name'
                names = [node.module or '']
            assert not any(part.startswith('test_') for name in names for part in name.split('.')), path

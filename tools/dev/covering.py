"""Which tests concern which module: what ``make mutants`` runs for a change in it, the likeliest to see it first.

The first pattern that matches a path below ``mmgate`` counts; names are those of files below ``tests``, with a pytest
``-k`` expression behind a colon where a part of a file is enough.
"""

from __future__ import annotations

from fnmatch import fnmatch

LAYERS, OPS, HOSTS, BACKBONES = (f'test_{name}/test_' for name in ('layers', 'ops', 'hosts', 'backbones'))
TRAIN, SPEED, CHECKPOINTS = (f'test_{name}/test_' for name in ('train', 'speed', 'checkpoints'))
DENSE = (f'{LAYERS}open_gates', f'{LAYERS}dense', f'{LAYERS}dropout', f'{LAYERS}init')
MAPS = (f'{LAYERS}map_attention', f'{LAYERS}dropout', f'{HOSTS}swapped_rates')
PUBLISHED = f'{BACKBONES}backbones:published or vanilla or own_checkpoint or refused or downloads or message'
SWAPS = ('test_swap:not identity and not parameters', f'{HOSTS}adapters', f'{HOSTS}swapped_rates')

COVERING: dict[str, tuple[str, ...]] = {
    'layers/agent*.py': (*MAPS, f'{BACKBONES}backbones:cache or published', f'{LAYERS}init', f'{BACKBONES}resolutions'),
    'layers/saga.py': (*MAPS, f'{LAYERS}init', f'{BACKBONES}resolutions'),
    'layers/base/map.py': (*MAPS, f'{BACKBONES}backbones:vanilla', f'{BACKBONES}resolutions'),
    'layers/linear/*': (f'{LAYERS}linear', f'{LAYERS}map_attention', f'{BACKBONES}linear_backbones'),
    'layers/cross_window.py': (f'{BACKBONES}cswin', *MAPS),
    'layers/stripes.py': (f'{BACKBONES}cswin', f'{BACKBONES}linear_backbones'),
    'layers/positions.py': (f'{BACKBONES}resolutions',),
    'backbones/token_ffn.py': (f'{LAYERS}dropout', f'{LAYERS}init', f'{BACKBONES}backbones:scratch'),
    'hosts/token_attention.py': (f'{HOSTS}swapped_rates', f'{BACKBONES}classification', f'{HOSTS}vit_hosts'),
    'hosts/window.py': (f'{HOSTS}swapped_rates', f'{HOSTS}hosts:dense', f'{LAYERS}map_attention:windows'),
    'hosts/cosine_window.py': (f'{HOSTS}pretrain_hosts',),
    'hosts/relative_positions.py': (f'{HOSTS}pretrain_hosts:sam', f'{HOSTS}project_hosts'),
    'layers/swiglu.py': (f'{BACKBONES}dgvit',),
    'layers/base/init.py': (f'{LAYERS}init',),
    'hosts/core.py': (f'{HOSTS}swapped_rates', f'{HOSTS}adapters'),
    'layers/gml.py': (f'{LAYERS}plug', f'{LAYERS}open_gates', f'{LAYERS}init'),
    'layers/plug.py': (f'{LAYERS}plug', f'{LAYERS}open_gates', f'{LAYERS}dropout', f'{LAYERS}init'),
    'layers/base/deformable.py': (f'{LAYERS}plug', f'{LAYERS}ungated_deformable', f'{LAYERS}open_gates', DENSE[2]),
    'layers/*': (*DENSE, f'{HOSTS}adapters'),
    'ops/agent_attention.py': (*MAPS, f'{BACKBONES}resolutions'),
    'ops/gated_linear_attention.py': MAPS,
    'ops/linear_attention.py': (f'{OPS}linear_attention', f'{LAYERS}linear'),
    'ops/differential_attention.py': DENSE,
    'ops/masks.py': (*DENSE, f'{HOSTS}swapped_rates'),
    'ops/library.py': (f'{OPS}library', f'{OPS}ms_deform_attn', f'{OPS}backend'),
    'ops/ms_deform_attn/*': (f'{OPS}ms_deform_attn', f'{OPS}backend', f'{LAYERS}plug'),
    'ops/plug_attention/*': (f'{OPS}plug_attention', *DENSE, f'{OPS}backend'),
    'ops/*': (f'{OPS}backend',),
    'hosts/mmpretrain.py': (f'{HOSTS}swapped_rates', f'{HOSTS}pretrain_hosts', f'{HOSTS}vit_hosts'),
    'hosts/projects.py': (f'{HOSTS}project_hosts',),
    'hosts/relative.py': (f'{HOSTS}pretrain_hosts:sam', f'{HOSTS}project_hosts'),
    'hosts/vits.py': (f'{HOSTS}vit_hosts',),
    'hosts/timm.py': (f'{HOSTS}vit_hosts',),
    'hosts/subclassed.py': (f'{HOSTS}vit_hosts', f'{HOSTS}project_hosts'),
    'hosts/swin.py': (f'{HOSTS}swapped_rates', f'{HOSTS}hosts:dense'),
    'hosts/*': SWAPS,
    'backbones/cswin*': (f'{BACKBONES}cswin', f'{BACKBONES}presets:cswin', f'{BACKBONES}resolutions'),
    'backbones/dgvit.py': (f'{BACKBONES}dgvit',),
    'backbones/linear.py': (f'{BACKBONES}linear_backbones', f'{BACKBONES}presets:swin'),
    'backbones/fitting.py': (f'{BACKBONES}resolutions', PUBLISHED),
    'backbones/pretrained.py': (PUBLISHED, f'{BACKBONES}resolutions'),
    'backbones/*': (f'{BACKBONES}presets', f'{HOSTS}swapped_rates:backbones', f'{BACKBONES}backbones'),
    'backbones/convert.py': (PUBLISHED, f'{BACKBONES}backbones:converter'),
    'backbones/convert_classifier.py': (f'{BACKBONES}classification', f'{BACKBONES}resolutions:classifiers'),
    'backbones/deit.py': (f'{BACKBONES}classification',),
    'starts.py': ('test_starts:not every_host', f'{LAYERS}init'),
    'paths.py': ('test_swap:not identity and not parameters', f'{SPEED}hooks'),
    'backbones/classifier.py': (f'{BACKBONES}backbones:parameters', f'{BACKBONES}resolutions'),
    'swap.py': (*SWAPS, 'test_swap:identity'),
    'analysis/gate_hooks.py': ('test_analysis/test_sampling', 'test_analysis/test_gates'),
    'checkpoints/allowed.py': (f'{CHECKPOINTS}loading', f'{CHECKPOINTS}guarded_pickle'),
    'checkpoints/download.py': (PUBLISHED, f'{CHECKPOINTS}loading'),
    'checkpoints/guarded_pickle.py': (f'{CHECKPOINTS}guarded_pickle', f'{CHECKPOINTS}loading'),
    'checkpoints/plain_config.py': (f'{CHECKPOINTS}loading',),
    'checkpoints/tensors.py': (PUBLISHED, f'{BACKBONES}backbones:code', f'{CHECKPOINTS}guarded_pickle'),
    'checkpoints/*': (),  # the file of its name
    'speed/matching/*': (f'{SPEED}matching',),
    'speed/*': (),
    'train/cli.py': (
        'test_tools/test_flags',
        'test_tools/test_mistakes',
        'test_tools/test_command_line',
        f'{TRAIN}interrupt_hook',
    ),
    'train/config_file.py': (f'{TRAIN}config_file', 'test_tools/test_command_line', f'{TRAIN}inputs'),
    'train/switches.py': ('test_tools/test_flags', f'{TRAIN}inputs', f'{TRAIN}switches'),
    'train/inputs.py': (f'{TRAIN}inputs', 'test_tools/test_flags', 'test_tools/test_image_demo'),
    'train/load_report.py': (f'{TRAIN}load_report', 'test_tools/test_command_line'),
    'train/data_check_hook.py': (f'{TRAIN}data_check_hook', 'test_tools/test_mistakes'),
    'train/*': (),
}
# kernels, how they are launched, and what has no code
LEFT_OUT = ('ops/*/*kernel*.py', 'ops/*/triton.py', 'ops/*/blocks.py', 'ops/triton_backend.py')
LEFT_OUT += tuple(f'{folder}/__init__.py' for folder in ('checkpoints', 'speed', 'train'))


def tests_of(module: str) -> tuple[str, ...] | None:
    """Return the tests for ``module``, a path below ``mmgate``; None for kernels and what has no code."""
    if any(fnmatch(module, pattern) for pattern in LEFT_OUT):
        return None
    for pattern, tests in COVERING.items():
        if fnmatch(module, pattern):
            folder, _, name = module.rpartition('/')
            return tests or (f'test_{folder}/test_{name.removesuffix(".py")}',)
    return None


def files(tests: tuple[str, ...]) -> list[str]:
    """Return the files of entries of the table, from the root of the tree."""
    return [f'tests/{test.partition(":")[0]}.py' for test in tests]


def commands(tests: tuple[str, ...]) -> list[list[str]]:
    """Return pytest's arguments for entries of the table: whole files together, parts of files each by itself."""
    listed: list[list[str]] = []
    for test, file in zip(tests, files(tests), strict=True):
        expression = test.partition(':')[2]
        if expression or not listed or '-k' in listed[-1]:
            listed.append([file, *(['-k', expression] if expression else [])])
        else:
            listed[-1].append(file)
    return listed

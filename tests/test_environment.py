"""mmgate where only one host package is installed, in a fresh process each."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from conftest import ROOT, needs_mmpretrain, run_python
from helpers.small_demo import CONFIG, SEGMENTOR
from shapes import write_shapes


def test_without_a_host_the_import_says_what_to_do() -> None:
    code = 'import sys; sys.modules.update(mmdet=None, mmseg=None); import mmgate'
    done = run_python('-c', code, fails=True)
    assert 'mmgate cannot be used here' in done.stderr
    assert "no module named 'mmdet'" in done.stderr and "no module named 'mmseg'" in done.stderr


@needs_mmpretrain
def test_beside_a_transformers_that_mmpretrain_does_not_know(tmp_path: Path) -> None:
    # torch 2.1's compiler looks at the configuration of an imported transformers.
    files = {
        'transformers/__init__.py': 'from . import configuration_utils',
        'transformers/configuration_utils.py': 'class PretrainedConfig: ...',
        'transformers/pytorch_utils.py': '',
        'transformers-5.24.0.dist-info/METADATA': 'Metadata-Version: 2.1\nName: transformers\nVersion: 5.24.0\n',
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    paths = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    code = """if True:
        import mmgate
        import mmdet.models
        from mmgate._environment import EITHER, why_not
        from mmpretrain.registry import MODELS
        print('usable', why_not('mmpretrain'), *map(why_not, EITHER), MODELS.get('VisionTransformer').__name__)
    """
    done = run_python('-c', code, PYTHONPATH=paths)
    said = "goes on without mmpretrain's multimodal models.*need transformers below 5, and transformers 5.24.0 is"
    assert re.search(said, done.stdout + done.stderr)
    assert 'usable None None None VisionTransformer' in done.stdout


# Trains and tests in one process, of which most goes into imports, and asks for a backbone of mmdet's classes.
TRAIN_AND_TEST = """
from pathlib import Path
from mmgate.mm import cli
from mmgate.registry import MODELS
assert cli.main(cli.train, ['config.py']) == 0
checkpoint = Path('work_dirs/config/last_checkpoint').read_text()
assert cli.main(cli.test, ['config.py', checkpoint, '--cfg-options', 'experiment_name=b', 'visualizer.name=b']) == 0
try:
    MODELS.build(dict(type='mmgate.AgentPVT', arch='tiny'))
except ImportError as error:
    print(error)
"""


@pytest.mark.parametrize(
    'absent, config, said',
    [
        (['mmseg', 'mmpretrain'], CONFIG.replace('EPOCHS', '1'), ('bbox_mAP',)),
        (['pycocotools', 'pycocotools.coco'], SEGMENTOR, ('mIoU', "AgentPVT is built on a class of mmdet's")),
    ],
    ids=['of mmdet alone', 'what mmdet needs'],
)
def test_training_and_testing_beside_one_host(
    tmp_path: Path, absent: list[str], config: str, said: tuple[str, ...]
) -> None:
    """Of a host that is absent or broken nothing is said but where it is asked for."""
    write_shapes(tmp_path / 'data/shapes', num_train=4, num_val=2, size=64)
    (tmp_path / 'config.py').write_text(config)
    hidden = f'import sys; sys.modules.update(dict.fromkeys({absent}))\n'
    done = run_python('-c', hidden + TRAIN_AND_TEST, cwd=tmp_path, PYTHONPATH=f'{ROOT}')
    printed = done.stdout + done.stderr
    assert all(words in printed for words in said), printed[-3000:]
    assert 'goes on without' not in printed


def test_help_does_not_wait_for_torch() -> None:
    code = """if True:
        import runpy, sys
        import mmgate
        for script in ('tools/train.py', 'tools/test.py', 'mmgate/doctor.py'):
            sys.argv = [script, '--help']
            try:
                runpy.run_path(script, run_name='__main__')
            except SystemExit as end:
                assert end.code == 0
        print('imported', *{'torch', 'mmcv', 'mmdet', 'mmseg'} & set(sys.modules))
    """
    done = run_python('-c', code, cwd=ROOT)
    assert '--gate' in done.stdout and '--build' in done.stdout and done.stdout.endswith('imported\n')


FIRST_ITERATION = """
import sys
from mmengine.hooks import Hook
from mmengine.registry import HOOKS


def of_others():
    return {name for name in sys.modules if name.partition('.')[0] in ('mmseg', 'mmpretrain')}


@HOOKS.register_module()
class FirstIteration(Hook):
    def before_train_iter(self, runner, batch_idx, data_batch=None):
        print('imported', *of_others() - of_mmdet)
        sys.exit()


import mmgate
import mmdet.datasets, mmdet.engine, mmdet.evaluation, mmdet.models, mmdet.visualization
of_mmdet = of_others()  # mmdet imports mmpretrain, where it is installed, for re-identification
from mmgate.mm import cli
cli.main(cli.train, ['config.py', '--speedups'])
"""


def test_a_detector_trains_without_the_other_packages(tmp_path: Path) -> None:
    write_shapes(tmp_path / 'data/shapes', num_train=4, num_val=2, size=64)
    hook = "custom_hooks = [dict(type='FirstIteration')]\n"
    (tmp_path / 'config.py').write_text(CONFIG.replace('EPOCHS', '1') + hook)
    done = run_python('-c', FIRST_ITERATION, cwd=tmp_path, PYTHONPATH=f'{ROOT}')
    assert '\nimported\n' in done.stdout


USERS_OWN = """
import mmgate, torch
from mmgate.hosts.table import adapter_for
from mmdet.models.backbones.pvt import SpatialReductionAttention
from torch import nn

class Mine(mmgate.DenseAdapter):
    def forward(self, x):
        return x

mmgate.adapts(mmgate.DenseGate, SpatialReductionAttention)(Mine)
assert adapter_for(mmgate.DenseGate, SpatialReductionAttention(16, 4))[0] is Mine

@mmgate.MODELS.register_module()
class PVT(nn.Module):
    pass

from mmgate import registry
mine = {'MODELS': 'Gated', 'HOOKS': 'TF32Hook', 'OPTIM_WRAPPER_CONSTRUCTORS': 'GateOptimWrapperConstructor',
        'PARAM_SCHEDULERS': 'CosineLR'}
for attribute, name in mine.items():
    ours = getattr(registry, attribute)
    ours.register_module(name=name, module=Mine)
    ours.import_from_location()
    assert ours.get(f'mmgate.{name}') is Mine

assert type(mmgate.MODELS.build(dict(type='mmgate.PVT'))) is PVT
swin = mmgate.MODELS.get('AgentSwin')
assert issubclass(swin, nn.Module) and mmgate.MODELS.get('mmgate.AgentSwin') is swin
assert type(mmgate.MODELS.build(dict(type='mmgate.AgentSwin', arch='tiny'))) is swin
assert mmgate.MODELS.get('PVT') is PVT
assert mmgate.MODELS.get('mmgate.SAGAAttention').__module__ == 'mmgate.gates.saga'
"""


def test_what_a_user_registers_first_is_not_replaced_by_what_is_imported_later() -> None:
    pytest.importorskip('mmdet')
    run_python('-c', USERS_OWN)

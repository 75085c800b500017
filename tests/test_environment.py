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


def write_package(folder: Path, name: str, version: str, **modules: str) -> str:
    """Write a package and its metadata, and return the PYTHONPATH on which it is found."""
    (folder / name).mkdir()
    for module, text in modules.items():
        (folder / name / f'{module}.py').write_text(text)
    metadata = folder / f'{name}-{version}.dist-info'
    metadata.mkdir()
    (metadata / 'METADATA').write_text(f'Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n')
    return os.pathsep.join([str(folder), os.environ.get('PYTHONPATH', '')])


@needs_mmpretrain
def test_beside_a_transformers_that_mmpretrain_does_not_know(tmp_path: Path) -> None:
    # torch 2.1's compiler looks at the configuration of an imported transformers.
    configuration = 'class PretrainedConfig: ...'
    paths = write_package(
        tmp_path,
        'transformers',
        '5.24.0',
        __init__='from . import configuration_utils',
        configuration_utils=configuration,
        pytorch_utils='',
    )
    code = """if True:
        import mmgate
        from mmgate._environment import EITHER, why_not
        from mmpretrain.registry import MODELS
        print('usable', why_not('mmpretrain'), *map(why_not, EITHER), MODELS.get('VisionTransformer').__name__)
    """
    done = run_python('-c', code, PYTHONPATH=paths)
    said = "goes on without mmpretrain's multimodal models.*need transformers below 5, and transformers 5.24.0 is"
    assert re.search(said, done.stdout + done.stderr)
    assert 'usable None None None VisionTransformer' in done.stdout


def test_a_broken_mmpretrain_is_left_out_and_the_hosts_are_not(tmp_path: Path) -> None:
    paths = write_package(tmp_path, 'mmpretrain', '1.3.6', __init__='', models='class Broken(None): ...')
    code = "import mmgate; from mmgate._environment import EITHER, why_not; print('usable', *map(why_not, EITHER))"
    done = run_python('-c', code, PYTHONPATH=paths)
    assert 'goes on without mmpretrain.models: TypeError: NoneType takes no arguments' in done.stdout + done.stderr
    assert 'usable None None' in done.stdout


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
        ('mmseg', CONFIG.replace('EPOCHS', '1'), ('bbox_mAP',)),
        ('pycocotools', SEGMENTOR, ('mIoU', 'goes on without mmdet', "AgentPVT is built on a class of mmdet's")),
    ],
    ids=['mmseg', 'what mmdet needs'],
)
def test_training_and_testing_beside_one_host(tmp_path: Path, absent: str, config: str, said: tuple[str, ...]) -> None:
    """A host that is absent is not spoken of; one that is broken is left out with a warning, and named where asked."""
    write_shapes(tmp_path / 'data/shapes', num_train=4, num_val=2, size=64)
    (tmp_path / 'config.py').write_text(config)
    hidden = f"import sys; sys.modules.update(dict.fromkeys(['{absent}', '{absent}.coco']))\n"
    done = run_python('-c', hidden + TRAIN_AND_TEST, cwd=tmp_path, PYTHONPATH=f'{ROOT}')
    printed = done.stdout + done.stderr
    assert all(words in printed for words in said), printed[-3000:]
    assert ('goes on without' in printed) == (absent == 'pycocotools')

"""mmgate where only one host package is installed, in a fresh process each."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest
from conftest import ROOT, needs_mmpretrain, run_python
from helpers.small_demo import CONFIG, SEGMENTOR
from shapes import write_shapes


def imported_without(*packages: str, fails: bool = False) -> subprocess.CompletedProcess[str]:
    code = f'import sys; sys.modules.update(dict.fromkeys({packages})); import mmgate; print("on")'
    return run_python('-c', code, fails=fails)


def test_without_a_host_the_import_says_what_to_do() -> None:
    done = imported_without('mmdet', 'mmseg', fails=True)
    assert 'mmgate cannot be used here' in done.stderr
    assert "no module named 'mmdet'" in done.stderr and "no module named 'mmseg'" in done.stderr


def test_a_broken_host_is_left_out_with_a_warning() -> None:
    done = imported_without('pycocotools', 'pycocotools.coco')
    assert 'goes on without mmdet' in done.stdout + done.stderr and 'on' in done.stdout


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
        from mmgate._environment import HOSTS, why_not
        from mmpretrain.registry import MODELS
        print('usable', why_not('mmpretrain'), *map(why_not, HOSTS), MODELS.get('VisionTransformer').__name__)
    """
    done = run_python('-c', code, PYTHONPATH=paths)
    said = "goes on without mmpretrain's multimodal models.*need transformers below 5, and transformers 5.24.0 is"
    assert re.search(said, done.stdout + done.stderr)
    assert 'usable None None None VisionTransformer' in done.stdout


def test_a_broken_mmpretrain_is_left_out_and_the_hosts_are_not(tmp_path: Path) -> None:
    paths = write_package(tmp_path, 'mmpretrain', '1.3.6', __init__='', models='class Broken(None): ...')
    code = "import mmgate; from mmgate._environment import HOSTS, why_not; print('usable', *map(why_not, HOSTS))"
    done = run_python('-c', code, PYTHONPATH=paths)
    assert 'goes on without mmpretrain.models: TypeError: NoneType takes no arguments' in done.stdout + done.stderr
    assert 'usable None None' in done.stdout


@pytest.mark.parametrize('blocked, config', [('mmdet', SEGMENTOR), ('mmseg', CONFIG.replace('EPOCHS', '1'))])
def test_training_and_testing_beside_one_host(tmp_path: Path, blocked: str, config: str) -> None:
    write_shapes(tmp_path / 'data/shapes', num_train=4, num_val=2, size=64)
    (tmp_path / 'config.py').write_text(config)
    (tmp_path / 'sitecustomize.py').write_text(f"import sys; sys.modules['{blocked}'] = None")
    paths = os.pathsep.join([str(tmp_path), os.environ.get('PYTHONPATH', '')])
    for tool, *arguments in (['train.py'], ['test.py', 'LAST']):
        if arguments:
            arguments = [(tmp_path / 'work_dirs/config/last_checkpoint').read_text()]
        done = run_python(ROOT / 'tools' / tool, 'config.py', *arguments, cwd=tmp_path, PYTHONPATH=paths)
        assert 'goes on without' not in done.stdout + done.stderr
    assert ('mIoU' if blocked == 'mmdet' else 'bbox_mAP') in done.stdout + done.stderr

"""mmgate where only one host package is installed, in a fresh process each."""

from __future__ import annotations

import subprocess
import sys

import pytest

BLOCK = 'import sys; sys.modules.update({name: None for name in %r}); '
USE = {
    'mmseg': 'from mmseg.models.backbones.swin import SwinTransformer',
    'mmdet': 'from mmdet.models.backbones.swin import SwinTransformer',
}
SWAP = (
    'import mmgate; %s; model = SwinTransformer(embed_dims=32, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8)); '
    "rule = dict(path='stages.0.**', type='PLuGMultiheadAttention'); print(mmgate.swap_attention(model, rule))"
)


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, '-W', 'ignore', '-c', code], capture_output=True, text=True, check=False)


@pytest.mark.parametrize('host, blocked', [('mmseg', 'mmdet'), ('mmdet', 'mmseg')])
def test_one_host_is_enough(host: str, blocked: str) -> None:
    done = python(BLOCK % [blocked] + SWAP % USE[host])
    assert done.returncode == 0, done.stderr
    assert "['stages.0.blocks.0.attn.w_msa']" in done.stdout
    assert 'goes on without' not in done.stderr + done.stdout


def test_without_a_host_the_import_says_what_to_do() -> None:
    done = python(BLOCK % ['mmdet', 'mmseg'] + 'import mmgate')
    assert done.returncode and 'mmgate cannot be used here' in done.stderr
    assert "no module named 'mmdet'" in done.stderr and "no module named 'mmseg'" in done.stderr


def test_a_broken_host_is_left_out_with_a_warning() -> None:
    done = python(BLOCK % ['pycocotools', 'pycocotools.coco'] + 'import mmgate; print("on")')
    assert done.returncode == 0, done.stderr
    assert 'goes on without mmdet' in done.stdout + done.stderr and 'on' in done.stdout

"""tools/test.py on a classification config with a converted checkpoint, of its own resolution and of another."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from conftest import ROOT, needs_mmpretrain, run_python
from helpers.published_cswin import SMALL, random_cswin
from image_folders import write_shapes_folder

CONFIG = f"""
_base_ = {str(ROOT / 'configs/agent/classification/agent-cswin-t_8xb128-300e_in1k.py')!r}
model = dict(
    data_preprocessor=dict(num_classes=10),
    backbone=dict(pretrain_img_size=SIDE, **{SMALL}),
    head=dict(num_classes=10, in_channels=128))
val_dataloader = dict(
    batch_size=6,
    num_workers=0,
    persistent_workers=False,
    dataset=dict(
        _delete_=True,
        type='CustomDataset',
        data_root='data',
        data_prefix='val',
        metainfo=dict(classes=('circle', 'cross', 'ring', 'square', 'star', 'triangle')),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='Resize', scale=SIDE), dict(type='PackInputs')]))
test_dataloader = val_dataloader
"""


@needs_mmpretrain
@pytest.mark.slow
def test_a_converted_classifier_is_tested(tmp_path: Path) -> None:
    """The published file of 64 pixels is converted once, and tested at 64 and at 96, where its biases are resized."""

    write_shapes_folder(tmp_path / 'data', num_train=6, num_val=12, size=64)
    torch.save({'state_dict_ema': random_cswin(True, image=64)}, tmp_path / 'published.pth')
    converter = ROOT / 'tools/model_converters/agent_attention.py'
    run_python(converter, 'published.pth', 'classifier.pth', '--to', 'classifier', cwd=tmp_path)
    for side in (64, 96):
        (tmp_path / 'config.py').write_text(CONFIG.replace('SIDE', str(side)))
        result = run_python(ROOT / 'tools/test.py', 'config.py', 'classifier.pth', cwd=tmp_path)
        printed = result.stdout + result.stderr
        assert re.search(r'accuracy/top1: \d', printed), printed[-3000:]
        assert ('resized to a map of (24, 24)' in printed) == (side == 96)

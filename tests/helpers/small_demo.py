"""The demo's detector and a config of it that is small enough for a test, and such a config of a segmentor."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

from conftest import ROOT
from shapes import write_shapes

RUNS = count()
VANILLA = ROOT / 'configs/_base_/deformable-detr-refine_r18_1xb8-12e_shapes.py'
DEMO = ROOT / 'configs/plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
CONFIG = f"""
_base_ = {str(DEMO)!r}
model = dict(
    backbone=dict(base_channels=8),
    neck=dict(in_channels=[16, 32, 64]),
    encoder=dict(num_layers=1),
    decoder=dict(num_layers=1))
train_dataloader = dict(batch_size=2, num_workers=0, persistent_workers=False)
val_dataloader = dict(num_workers=0, persistent_workers=False)
test_dataloader = dict(num_workers=0, persistent_workers=False)
train_cfg = dict(max_epochs=EPOCHS, val_interval=100)
default_hooks = dict(logger=dict(interval=1))
"""
SEGMENTOR = """
custom_imports = dict(imports=['mmgate'], allow_failed_imports=False)
_base_ = 'mmseg::_base_/default_runtime.py'
model = dict(
    type='mmgate.Gated', host='mmseg.EncoderDecoder',
    attention=dict(path='backbone.**', type='PLuGMultiheadAttention'),
    data_preprocessor=dict(type='SegDataPreProcessor', size=(64, 64), seg_pad_val=255),
    backbone=dict(type='SwinTransformer', embed_dims=16, depths=(1, 1, 1, 1), num_heads=(1, 2, 4, 8), window_size=4),
    decode_head=dict(type='FCNHead', in_channels=128, channels=16, num_classes=6, norm_cfg=dict(type='BN'),
                     loss_decode=dict(type='CrossEntropyLoss')),
    train_cfg=dict(), test_cfg=dict(mode='whole'))
loader = dict(
    batch_size=2, num_workers=0, sampler=dict(type='DefaultSampler', shuffle=False),
    dataset=dict(
        type='BaseSegDataset', data_root='data/shapes/ade', reduce_zero_label=True, seg_map_suffix='.png',
        metainfo=dict(classes=('circle', 'square', 'triangle', 'star', 'ring', 'cross')),
        data_prefix=dict(img_path='images/training', seg_map_path='annotations/training'),
        pipeline=[dict(type='LoadImageFromFile'), dict(type='LoadAnnotations', reduce_zero_label=True),
                  dict(type='PackSegInputs')]))
train_dataloader = val_dataloader = test_dataloader = loader
val_evaluator = test_evaluator = dict(type='IoUMetric')
optim_wrapper = dict(type='OptimWrapper', optimizer=dict(type='AdamW', lr=1e-4),
                     constructor='mmgate.GateOptimWrapperConstructor')
train_cfg = dict(type='IterBasedTrainLoop', max_iters=2, val_interval=2)
val_cfg = dict(type='ValLoop')
test_cfg = dict(type='TestLoop')
default_hooks = dict(checkpoint=dict(type='CheckpointHook', by_epoch=False, interval=2))
"""


def write_demo(folder: Path, *, images: int = 4, epochs: int = 1) -> Path:
    """Write data and configs of the detector, ``gated.py`` and ``vanilla.py``, into a folder, and return it."""
    write_shapes(folder / 'data/shapes', num_train=images, num_val=2, size=64)
    for name, base in (('gated', DEMO), ('vanilla', VANILLA)):
        (folder / f'{name}.py').write_text(CONFIG.replace(str(DEMO), str(base)).replace('EPOCHS', str(epochs)))
    return folder


def run(command: Callable[[list[str]], None], *arguments: str, status: int = 0) -> None:
    """Train or test in this process, in which mmengine keeps loggers and visualizers by their names.

    Args:
        command: ``cli.train`` or ``cli.test``.
        *arguments: Its arguments, ``--cfg-options`` last.
        status: The exit status that it has to have.
    """
    from mmgate.mm import cli

    options = () if '--cfg-options' in arguments else ('--cfg-options',)
    name = f'run{next(RUNS)}'
    assert cli.main(command, [*arguments, *options, f'experiment_name={name}', f'visualizer.name={name}']) == status


def logged(work_dir: str | Path) -> str:
    """Return the logs of all runs in a work dir."""
    return ''.join(log.read_text() for log in Path(work_dir).glob('*/*.log'))

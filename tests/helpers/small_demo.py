"""The demo's detector, and a config of it that is small enough for a test."""

from __future__ import annotations

from conftest import ROOT

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

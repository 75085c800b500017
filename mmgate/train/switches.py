"""What a flag of a command line turns on in a config."""

from __future__ import annotations

import warnings
from copy import deepcopy

from mmengine.config import Config, ConfigDict

from mmgate.checkpoints.gates_file import read_gates
from mmgate.errors import ConfigError

from .config_file import type_name


def is_segmentation(cfg: Config) -> bool:
    """Return whether the config is one of mmseg's."""
    return cfg.get('default_scope') == 'mmseg'


def is_classification(cfg: Config) -> bool:
    """Return whether the config is one of mmpretrain's."""
    return cfg.get('default_scope') == 'mmpretrain'


def enable_amp(cfg: Config) -> None:
    """Turn the optimizer wrapper into its mixed-precision form.

    Raises:
        ConfigError: The wrapper is of a type that has no such form.
    """
    kind = type_name({'type': 'OptimWrapper', **cfg.optim_wrapper})
    if kind == 'AmpOptimWrapper':
        warnings.warn('--amp: the config trains in mixed precision already.', stacklevel=2)
        return
    if kind != 'OptimWrapper':
        raise ConfigError(f'--amp: optim_wrapper.type={kind!r} cannot be converted; only OptimWrapper can.')
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')


def enable_visualization(cfg: Config, *, show: bool, show_dir: str | None, wait_time: float) -> None:
    """Draw predictions during testing.

    Raises:
        ConfigError: The config has no visualization hook.
    """
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise ConfigError('--show and --show-dir need default_hooks.visualization in the config.')
    classifies = is_classification(cfg)
    hook['enable' if classifies else 'draw'] = True
    if show:
        hook.show, hook.wait_time = True, wait_time
    if show_dir:
        if is_segmentation(cfg):
            cfg.visualizer.save_dir = show_dir
        else:
            hook['out_dir' if classifies else 'test_out_dir'] = show_dir


def enable_gates(cfg: Config, path: str) -> None:
    """Put the gates of a file on the config's model, vanilla or gated.

    Raises:
        ConfigError: The file is none of gates.
    """
    read_gates(path)
    cfg.setdefault('custom_imports', dict(imports=['mmgate'], allow_failed_imports=False))
    if type_name(cfg.model) != 'Gated':
        host = cfg.model.type
        scope = cfg.get('default_scope') or 'mmengine'
        cfg.model = dict(cfg.model, type='mmgate.Gated', host=host if '.' in host else f'{scope}.{host}')
    cfg.model.gates = path


def enable_tta(cfg: Config) -> None:
    """Wrap the model and the pipeline in test-time augmentation: the config's own, else a horizontal flip."""
    segments, classifies = is_segmentation(cfg), is_classification(cfg)
    if 'tta_model' not in cfg:
        detector = dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
        scored = dict(type='SegTTAModel') if segments else dict(type='AverageClsScoreTTA')
        cfg.tta_model = scored if segments or classifies else detector
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_pipeline' not in cfg:
        pipeline = deepcopy(dataset.pipeline)
        meta = ['img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction']
        pack: dict = dict(type='PackSegInputs') if segments else dict(type='PackDetInputs', meta_keys=['img_id', *meta])
        if classifies:
            pack = pipeline[-1]
        # annotations stay outside: they must not be flipped
        flips = [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)]
        cfg.tta_pipeline = [*pipeline[:-1], dict(type='TestTimeAug', transforms=[flips, [pack]])]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline

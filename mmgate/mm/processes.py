"""Train in several processes on CPUs, which mmengine cannot start."""

from __future__ import annotations

from datetime import timedelta

from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_distributed
from torch import distributed

from mmgate.errors import ConfigError

from .config_file import type_name

# Wrappers that take device numbers.
WITH_DEVICES = ('MMDistributedDataParallel', 'MMSeparateDistributedDataParallel')


def prepare_processes(cfg: Config) -> None:
    """On a machine without GPU, connect the processes over gloo and set up DDP in a config without device numbers.

    mmengine selects a CUDA device before it starts a process group, and passes device numbers to the model's wrapper.

    Raises:
        ConfigError: The config's launcher needs GPUs.
    """
    if cfg.launcher == 'none' or get_device() != 'cpu':
        return
    if not is_distributed():
        if cfg.launcher != 'pytorch':
            raise ConfigError(f'--launcher {cfg.launcher} needs GPUs; on a CPU start the processes with torchrun.')
        timeout = ((cfg.get('env_cfg') or {}).get('dist_cfg') or {}).get('timeout', 1800)  # torch's own for gloo
        distributed.init_process_group('gloo', timeout=timedelta(seconds=timeout))
    plain = dict(type='MMDistributedDataParallel', broadcast_buffers=False, device_ids=None)
    if cfg.get('runner_type') == 'FlexibleRunner':
        strategy = cfg.get('strategy') or dict(type='DDPStrategy')
        if type_name(strategy) == 'DDPStrategy':
            wrapper = strategy.get('model_wrapper') or plain
            cfg.strategy = dict(strategy, model_wrapper=dict(wrapper, device_ids=None))
    elif cfg.get('model_wrapper_cfg') is None:
        cfg.model_wrapper_cfg = dict(plain, find_unused_parameters=cfg.get('find_unused_parameters', False))
    elif type_name({'type': 'MMDistributedDataParallel', **cfg.model_wrapper_cfg}) in WITH_DEVICES:
        cfg.model_wrapper_cfg.device_ids = None

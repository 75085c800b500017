"""Several processes, where mmengine's own start does not do: without a GPU, and FSDP."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

from mmengine._strategy import FSDPStrategy as MMEngineFSDPStrategy
from mmengine.config import Config
from mmengine.device import get_device
from mmengine.dist import is_distributed
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import BaseOptimWrapper
from mmengine.registry import MODEL_WRAPPERS as MMENGINE_MODEL_WRAPPERS
from mmengine.registry import STRATEGIES as MMENGINE_STRATEGIES
from mmengine.registry import Registry
from torch import distributed, nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    FullyShardedDataParallel,
    StateDictType,
)

from mmgate.errors import ConfigError

from .config_file import type_name

STRATEGIES = Registry('strategy', parent=MMENGINE_STRATEGIES, scope='mmgate', locations=['mmgate.train.processes'])
MODEL_WRAPPERS = Registry(
    'model wrapper', parent=MMENGINE_MODEL_WRAPPERS, scope='mmgate', locations=['mmgate.train.processes']
)
# deprecated: a name that runs on CPUs wrote into their configs
MODEL_WRAPPERS.register_module('DistributedDataParallelOnCPU', module=MMDistributedDataParallel)
WITH_DEVICES = ('MMDistributedDataParallel', 'MMSeparateDistributedDataParallel', 'DistributedDataParallelOnCPU')


@STRATEGIES.register_module()
class FSDPStrategy(MMEngineFSDPStrategy):
    """mmengine's FSDP strategy, which resumes with torch >= 2.1, clips by the whole norm and runs on a CPU.

    Arguments and checkpoints are mmengine's.
    """

    def build_optim_wrapper(self, optim_wrapper: Any, model: nn.Module | None = None) -> BaseOptimWrapper:
        """Build the wrapper; its gradients are clipped by their norm over all shards, not by each shard's own."""
        built = super().build_optim_wrapper(optim_wrapper, model)
        if isinstance(model, FullyShardedDataParallel) and getattr(built, 'grad_name', None) == 'grad_norm':
            built._clip_grad = partial(_clip_shards, model, built)
        return built

    def load_optim_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state; mmengine passes torch's arguments in the order that torch 2.0 had."""
        own = {key: state_dict[key] for key in ('state', 'param_groups')}
        sharded = FullyShardedDataParallel.optim_state_dict_to_load(
            model=self.model, optim=self.optim_wrapper.optimizer, optim_state_dict=own
        )
        self.optim_wrapper.load_state_dict({**state_dict, **sharded})

    def optim_state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state, and beside it what the wrapper keeps (loss scale, base settings)."""
        sharded = FullyShardedDataParallel.optim_state_dict(self.model, self.optim_wrapper.optimizer)
        return {**self.optim_wrapper.state_dict(), **sharded}

    def _wrap_model(self, model: nn.Module) -> nn.Module:
        if get_device() == 'cpu':  # mmengine hands LOCAL_RANK, which means a GPU
            wrapper = dict(self.model_wrapper or dict(type='MMFullyShardedDataParallel'))
            self.model_wrapper: dict | None = dict(device_id='cpu') | wrapper
        return super()._wrap_model(model)

    def _init_state_dict_cfg(self, state_dict_cfg: str | dict[str, Any]) -> None:
        super()._init_state_dict_cfg(state_dict_cfg)
        if get_device() == 'cpu' and self.state_dict_type == StateDictType.FULL_STATE_DICT:
            # torch 2.13 offloads without a copy: on a CPU it frees a shard in use, and both moments of Adam become one
            self.state_dict_config = FullStateDictConfig(offload_to_cpu=False)
            self.optim_state_dict_config = FullOptimStateDictConfig(offload_to_cpu=False)


def _clip_shards(model: FullyShardedDataParallel, optim_wrapper: Any) -> None:
    """Clip, as mmengine does not, also in a process whose shard has no gradients: the others wait for its part."""
    norm = model.clip_grad_norm_(**optim_wrapper.clip_grad_kwargs)
    optim_wrapper.message_hub.update_scalar(f'train/{optim_wrapper.grad_name}', float(norm))


def prepare_processes(cfg: Config) -> None:
    """Make ``cfg`` run in several processes, and connect them over gloo where there is no GPU.

    mmengine selects a CUDA device before it starts a process group, and hands device numbers to the model's wrapper.

    Raises:
        ConfigError: The launcher did not start this process, or what the config wants does not run on a CPU.
    """
    strategy = cfg.get('strategy')
    if strategy and strategy.get('type') == 'FSDPStrategy':
        strategy.type = 'mmgate.FSDPStrategy'
    if cfg.launcher == 'none':
        if strategy and strategy.get('type') == 'mmgate.FSDPStrategy':
            raise ConfigError(
                'FSDP shards over processes: start them with torchrun --nproc_per_node=N tools/train.py CONFIG '
                '--launcher pytorch (tools/dist_train.sh does).'
            )
        return
    if get_device() != 'cpu':
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

"""Synchronised batch normalisation where torch has none: over processes on CPUs."""

from __future__ import annotations

from typing import Any

import torch
from mmengine.dist import get_world_size
from mmengine.model import MMDistributedDataParallel
from mmengine.registry import MODEL_WRAPPERS as MMENGINE_MODEL_WRAPPERS
from mmengine.registry import Registry
from torch import Tensor, distributed, nn
from torch.distributed.nn.functional import all_reduce
from torch.nn.modules.batchnorm import _BatchNorm

MODEL_WRAPPERS = Registry(
    'model wrapper', parent=MMENGINE_MODEL_WRAPPERS, scope='mmgate', locations=['mmgate.engine.sync_batch_norm']
)


class SyncBatchNormOnCPU(_BatchNorm):
    """torch's SyncBatchNorm, whose forward pass refuses CPU tensors, by sums over the processes.

    Parameters, buffers and options are torch's; the gradient is that of a batch norm over all processes' images.
    """

    process_group: distributed.ProcessGroup | None

    def _check_input_dim(self, input: Tensor) -> None:
        """Take maps of any number of dimensions, as torch's does."""

    def forward(self, input: Tensor) -> Tensor:
        """Normalise ``(N, C, ...)`` by the mean and variance of every process's images; the shape stays."""
        if not self.training or get_world_size(self.process_group) == 1:
            return super().forward(input)
        group = self.process_group or distributed.group.WORLD
        dims = [dim for dim in range(input.dim()) if dim != 1]
        shape = [1, -1] + [1] * (input.dim() - 2)  # (1, C, 1, ...)
        x = input.float()
        count = x.new_tensor([x.numel() / max(x.size(1), 1)])
        count = all_reduce(count, group=group)  # processes may hold images of different sizes
        mean = all_reduce(x.sum(dims), group=group) / count  # (C,)
        centred = x - mean.view(shape)
        variance = all_reduce(centred.square().sum(dims), group=group) / count  # (C,), about the common mean
        if self.track_running_stats and self.running_mean is not None and self.running_var is not None:
            self._track(mean.detach(), (variance * count / (count - 1).clamp(min=1)).detach())
        normalised = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None and self.bias is not None:
            normalised = normalised * self.weight.view(shape) + self.bias.view(shape)
        return normalised.to(input.dtype)

    def _track(self, mean: Tensor, unbiased_variance: Tensor) -> None:
        assert self.num_batches_tracked is not None and self.running_mean is not None and self.running_var is not None
        self.num_batches_tracked.add_(1)
        share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), share)
        self.running_var.lerp_(unbiased_variance.to(self.running_var.dtype), share)


@MODEL_WRAPPERS.register_module()
class DistributedDataParallelOnCPU(MMDistributedDataParallel):
    """mmengine's wrapper, which takes models with torch's SyncBatchNorm on CPUs, too; arguments are mmengine's."""

    def __init__(self, module: nn.Module, *args: Any, **kwargs: Any) -> None:
        synchronised: list[Any] = [layer for layer in module.modules() if type(layer) is nn.SyncBatchNorm]
        for layer in synchronised:
            layer.__class__ = SyncBatchNormOnCPU  # alone: the layer may be known to others already
        super().__init__(module, *args, **kwargs)

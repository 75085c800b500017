"""Which network stands for which host."""

from __future__ import annotations

import importlib
import logging
from copy import deepcopy
from typing import Any

from mmcv.ops import MultiScaleDeformableAttention as MMCVMultiScaleDeformableAttention
from mmengine.logging import print_log
from torch import nn

from mmgate._environment import available
from mmgate.errors import ConfigError
from mmgate.layers.base.deformable import MultiScaleDeformableAttention
from mmgate.swap import swap_attention

from .network import Network, refuse

# a host package, the module here that knows it, and the module's function that tells a model's network
FAMILIES = (
    ('mmdet', 'detectors', 'detector'),
    ('mmseg', 'segmentors', 'segmentor'),
)


def network(model: nn.Module) -> Network:
    """Return the network of tensors around a copy of a model, in eval mode.

    mmcv's deformable attention is swapped for ours, which computes the same and can be written down.

    Raises:
        ConfigError: The model cannot be exported.
    """
    host = deepcopy(model)
    host.eval()  # some hosts return None from it
    vanilla = [name for name, module in host.named_modules() if type(module) is MMCVMultiScaleDeformableAttention]
    if vanilla:
        swap_attention(host, dict(path=vanilla, type=MultiScaleDeformableAttention))
    return _around(host)


def serve(model: nn.Module, run: Any) -> None:
    """Let ``run``, a function from the inputs of a model's network to its outputs, answer for the model.

    A config whose images are prepared otherwise than the file's were, or whose test_cfg is another, is a warning: the
    file's test_cfg holds.

    Raises:
        ConfigError: The model has no network, or another one than ``run`` was written from.
    """
    net = _around(model)
    own = net.holds()
    if (run.notes['model'], run.notes['classes']) != (own['model'], own['classes']):
        raise ConfigError(
            f'{run.path} holds a {run.notes["model"]} of {run.notes["classes"]} classes; the config describes a '
            f'{own["model"]} of {own["classes"]}. Give the config it was made of.'
        )
    for part, consequence in (('preprocessing', 'its images are not as it expects'), ('test_cfg', "the file's holds")):
        if run.notes[part] != own[part]:
            print_log(
                f"{run.path} was written with {part} {run.notes[part]}, the config's is {own[part]}: {consequence}.",
                logger='current',
                level=logging.WARNING,
            )
    net.serve(run)


def _around(host: nn.Module) -> Network:
    for package, module, function in FAMILIES:
        if available(package):
            found = getattr(importlib.import_module(f'mmgate.deploy.{module}'), function)(host)
            if found is not None:
                return found.eval()
    raise refuse(host, 'it is none of the detectors and segmentors')

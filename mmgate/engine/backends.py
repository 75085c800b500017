"""Whether the operators' backends that a model asks for can run where it runs."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mmengine.device import get_device
from torch import nn

from mmgate.errors import ConfigError
from mmgate.layers import PLuGAttention, PLuGMultiScaleDeformableAttention
from mmgate.ops.dispatch import Backend, select
from mmgate.ops.ms_deform_attn import BACKENDS as MS_DEFORM_ATTN
from mmgate.ops.plug_attention import BACKENDS as PLUG_ATTENTION


def check_backends(model: nn.Module) -> None:
    """Refuse a backend, of a rule or of an environment variable, that cannot run on the device of training and testing.

    Raises:
        ConfigError: With the attention's name and the reason.
    """
    backends: Sequence[Backend]
    for name, module in model.named_modules():
        if isinstance(module, PLuGMultiScaleDeformableAttention):
            operator, backends, width = 'ms_deform_attn', MS_DEFORM_ATTN, module.value_proj.out_features
        elif isinstance(module, PLuGAttention):
            operator, backends, width = 'plug_attention', PLUG_ATTENTION, module.embed_dim
        else:
            continue
        heads = torch.empty(1, 1, module.num_heads, width // module.num_heads, device=get_device())
        try:
            select(operator, backends, heads, module.backend)
        except ValueError as error:
            raise ConfigError(f'{name}: {error}') from error

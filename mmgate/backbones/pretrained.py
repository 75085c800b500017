"""Start a backbone from a checkpoint: the authors' key layouts of PVT and Swin, and mmdet's and mmseg's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mmdet.models.backbones.pvt import pvt_convert
from mmdet.models.backbones.swin import swin_converter
from torch import Tensor, nn

from mmgate.backbones.fitting import DERIVED, fill
from mmgate.checkpoints.tensors import State, read_checkpoint, tensors
from mmgate.layers.base.init import gate_parameters

# by what a key starts or ends with: not of a backbone for dense prediction
_HEADS = ('head.', 'norm.', 'head_dist.')
_NOT_SHARED = ('cls_token',)


def load_pretrained(backbone: nn.Module, init_cfg: Mapping[str, Any]) -> None:
    """Fill a backbone from the checkpoint of a ``Pretrained`` init_cfg, whose layout is recognised.

    A checkpoint with attention of the backbone's kind has to fill all of it. One of the vanilla PVT or Swin fills what
    is shared, and the rest of the attention keeps its start; so do the output norms that an ImageNet Swin lacks.
    Positions of another resolution are resized.

    Args:
        backbone: PVT or Swin with its attention swapped.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)``, path or address; mmdet's form without the type will do.

    Raises:
        FileNotFoundError: There is no such file.
        ConnectionError: It cannot be downloaded.
        ValueError: It is no checkpoint, or a key is unknown, missing or of another shape; they are listed.
    """
    if not isinstance(init_cfg, Mapping) or init_cfg.get('type', 'Pretrained') != 'Pretrained':
        raise ValueError(
            f"init_cfg of {type(backbone).__name__} must be None or dict(type='Pretrained', checkpoint=...), "
            f'got {init_cfg!r}.'
        )
    source = init_cfg['checkpoint']
    state = host_layout(tensors(read_checkpoint(source)))
    fill(backbone, state, source, may_miss=tuple(dict(gate_parameters(backbone))))


def host_layout(state: State) -> State:
    """Return the tensors of a backbone under mmdet's names, less what a backbone does not need.

    Args:
        state: In the authors' names of PVT, PVTv2 or Swin, with agent attention or vanilla, or in mmdet's or mmseg's.

    Raises:
        ValueError: The keys are of neither backbone, or a half of a projection is missing.
    """
    state = {
        key: value
        for key, value in state.items()
        if not key.endswith((*_NOT_SHARED, *DERIVED)) and not key.startswith(_HEADS)
    }
    if any(key.startswith('block1.') for key in state):
        for key in state:
            if '.attn.q.' in key and key.replace('.q.', '.kv.') not in state:
                raise ValueError(f'missing: {key.replace(".q.", ".kv.")}')
        return dict(pvt_convert(state))
    if any(key.startswith('layers.0.blocks.') for key in state):
        return _of_swin(state)
    if any(key.startswith(('layers.0.1.', 'stages.0.blocks.')) for key in state):
        return state
    raise ValueError(
        "Neither the keys of PVT (block1.0...) nor those of Swin (layers.0.blocks.0...), nor mmdet's or mmseg's names "
        f'of them (layers.0.1..., stages.0.blocks.0...): {", ".join(list(state)[:8])}.'
    )


def _of_swin(state: State) -> State:
    renamed: dict[str, Tensor] = swin_converter(state)
    converted = {key.removeprefix('backbone.'): value for key, value in renamed.items()}
    swapped = [key.removesuffix('an_bias') for key in converted if key.endswith('.w_msa.an_bias')]
    return {  # where there are agents, mmdet's window attention is gone
        key.replace('.w_msa.', '.') if key.startswith(tuple(swapped)) else key: value
        for key, value in converted.items()
    }

"""Convert published checkpoints of PVT, Swin, CSwin and DeiT, vanilla or with agents, for mmgate's backbones."""

from __future__ import annotations

from typing import Any

from mmgate.backbones.weights import LAST, OUTPUT_NORM, cswin_layout, deit_layout, host_layout, is_cswin, is_deit
from mmgate.checkpoints.tensors import State, tensors
from mmgate.errors import ConfigError


def convert(checkpoint: Any) -> State:
    """Return a published checkpoint's tensors under the names that mmgate's backbone, or mmpretrain's ViT, gives them.

    The backbones read published layouts themselves, so that only those who want a file need this. Tensors are renamed
    and nothing else. A model that loads them checks whether they fill it, a backbone of mmgate by its ``init_cfg``. A
    vanilla PVT or Swin gets mmdet's names; names that are ours stay.

    Args:
        checkpoint: Content of a file, from :func:`~mmgate.checkpoints.tensors.read_checkpoint` or ``torch.load``.

    Raises:
        ConfigError: It is none of these, or a key of DeiT is unknown.
    """
    state = tensors(checkpoint)
    if is_deit(state):
        return deit_layout(state)
    return cswin_layout(state) if is_cswin(state) else host_layout(state)


def convert_classifier(checkpoint: Any) -> State:
    """Return a published classifier's weights as the state dict of our ImageClassifier of the same size.

    ``configs/agent/classification`` builds that classifier.

    Agent-PVT, Agent-Swin and Agent-CSwin become ``backbone`` (only its last stage has an output norm, Swin's final
    one) and ``head.fc``, and so does a vanilla CSwin, of an ``AgentCSwin`` without agents; DeiT, with agent attention
    or vanilla, mmpretrain's ViT and ``head.layers.head``.

    Args:
        checkpoint: Content of a file, from :func:`~mmgate.checkpoints.tensors.read_checkpoint` or ``torch.load``.

    Raises:
        ConfigError: It has no head, is a vanilla PVT or Swin, or does not convert; see :func:`convert`.
    """
    state = tensors(checkpoint)
    missing = [key for key in ('head.weight', 'head.bias') if key not in state]
    if missing:
        raise ConfigError(f'The checkpoint is no classifier: it has no {", ".join(missing)}. Use --to backbone.')
    if not is_deit(state) and not is_cswin(state) and not any(key.endswith('.an_bias') for key in state):
        raise ConfigError(
            'A vanilla PVT or Swin makes no classifier of ours, whose attention would be new; --to backbone gives what '
            'is shared, to start from.'
        )
    backbone = convert(state)
    head = 'head.layers.head' if is_deit(state) else 'head.fc'
    if not is_deit(state):
        backbone = {key: value for key, value in backbone.items() if not OUTPUT_NORM.fullmatch(key)}
        final = {f'norm{LAST}.{part}': state.get(f'norm.{part}') for part in ('weight', 'bias')}
        backbone.update({key: value for key, value in final.items() if value is not None})  # Agent-PVT has none
    return {
        **{f'backbone.{key}': value for key, value in backbone.items()},
        f'{head}.weight': state['head.weight'],
        f'{head}.bias': state['head.bias'],
    }

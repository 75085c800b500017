"""Turn published classifiers with agent attention into those of mmpretrain's ImageClassifier, head and final norm."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from mmgate.backbones.convert import convert
from mmgate.backbones.cswin_layout import is_cswin
from mmgate.backbones.deit import is_deit
from mmgate.checkpoints.tensors import State, tensors

LAST = 3  # the stage whose map is classified


def convert_classifier(checkpoint: Any) -> State:
    """Return the state dict of the ImageClassifier that ``configs/agent/classification`` builds of the same size.

    Agent-PVT, Agent-Swin and Agent-CSwin become ``backbone`` (its last stage alone has an output norm, Swin's final
    one) and ``head.fc``, and so does a vanilla CSwin, of an ``AgentCSwin`` without agents; DeiT, with agent attention
    or vanilla, mmpretrain's ViT and ``head.layers.head``.

    Args:
        checkpoint: What :func:`~mmgate.checkpoints.tensors.read_checkpoint` or ``torch.load`` returned.

    Raises:
        ValueError: It has no head, is a vanilla PVT or Swin, or does not convert; see :func:`~.convert.convert`.
    """
    state = tensors(checkpoint)
    missing = [key for key in ('head.weight', 'head.bias') if key not in state]
    if missing:
        raise ValueError(f'The checkpoint is no classifier: it has no {", ".join(missing)}. Use --to backbone.')
    if not is_deit(state) and not is_cswin(state) and not any(key.endswith('.an_bias') for key in state):
        raise ValueError(
            'A vanilla PVT or Swin makes no classifier of ours, whose attention would be new; --to backbone gives what '
            'is shared, to start from.'
        )
    backbone, head = convert(state), 'head.layers.head' if is_deit(state) else 'head.fc'
    for key in [key for key in backbone if key.startswith(tuple(f'norm{i}.' for i in range(LAST + 1)))]:
        del backbone[key]
    if not is_deit(state):
        backbone.update(_final_norm(state))
    return {
        **{f'backbone.{key}': value for key, value in backbone.items()},
        f'{head}.weight': state['head.weight'],
        f'{head}.bias': state['head.bias'],
    }


def _final_norm(state: State) -> dict[str, Tensor]:
    """Swin's and CSwin's; PVT with agent attention has none."""
    return {f'norm{LAST}.{part}': state[f'norm.{part}'] for part in ('weight', 'bias') if f'norm.{part}' in state}

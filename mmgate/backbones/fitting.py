"""Whether a state dict fits a backbone: positions resized, what does not fit listed."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from math import isqrt
from typing import Any

from mmengine.logging import print_log
from torch import Tensor, nn

from mmgate.checkpoints.tensors import State
from mmgate.layers.base.map import MapAttention
from mmgate.layers.resizing import resize_grid

DERIVED = ('.relative_position_index', '.attn_mask')  # what a backbone computes itself
OUTPUT_NORM = re.compile(r'norm\d\.(weight|bias)')  # Swin's; a classifier has none


def fill(backbone: nn.Module, state: State, source: str, may_miss: tuple[str, ...]) -> None:
    """Load ``state``, which has to fill the backbone: all of it, or less the attention if it has none of its kind.

    Args:
        backbone: The model.
        state: By its names.
        source: Where it is from, for messages.
        may_miss: Endings of the keys of the backbone's attention that the vanilla one lacks.

    Raises:
        ValueError: A key is unknown, missing or of another shape; they are listed.
    """
    own = backbone.state_dict()
    # of outputs that this backbone does not give
    state = {key: value for key, value in state.items() if key in own or not OUTPUT_NORM.fullmatch(key)}
    vanilla = not any(key.endswith(may_miss) for key in state)
    faults = misfits(backbone, state, may_miss=may_miss if vanilla else ())
    if faults:
        listed = '\n  '.join(faults[:20] + [f'... and {len(faults) - 20} more'] * (len(faults) > 20))
        raise ValueError(
            f'{source} does not fit {type(backbone).__name__} (keys by its names):\n  {listed}\n'
            'The sizes have to be those of the checkpoint: arch, depths or blocks, agents in pre-training.'
        )
    start = backbone.load_state_dict(state, strict=False).missing_keys
    kept = sorted({key.split('.attn.')[-1] for key in start if not key.endswith(DERIVED)})
    if kept:
        print_log(f'{source} has no {", ".join(kept)}: they keep their start', logger='current')


def misfits(backbone: nn.Module, state: Mapping[str, Tensor], may_miss: Sequence[str] = ()) -> list[str]:
    """Return what keeps ``state`` from filling ``backbone``: unknown and missing keys and other shapes.

    Keys of the vanilla attention count as those of the attention in its place, and positions of another resolution
    fit. What a backbone derives, and output norms, may be missing.

    Args:
        backbone: The model.
        state: Its state dict to be.
        may_miss: Endings of further keys that may be missing.
    """
    state = dict(state)
    resize_positions(backbone, state)
    for name, module in backbone.named_modules():
        if isinstance(module, MapAttention):
            module.adopt(state, f'{name}.')
    own = backbone.state_dict()
    free = (*DERIVED, *may_miss)
    faults = [f'unknown: {key}' for key in state if key not in own]
    faults += [
        f'missing: {key}'
        for key in own
        if key not in state and not key.endswith(free) and not OUTPUT_NORM.fullmatch(key)
    ]
    return faults + [
        f'shape: {key} {tuple(value.shape)}, expected {tuple(own[key].shape)}'
        for key, value in state.items()
        if key in own and value.shape != own[key].shape
    ]


class ResizesPositions:
    """Base, before a host's backbone, of one that loads positions of another resolution, wherever it is loaded."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        backbone: Any = self
        resized = resize_positions(backbone, state_dict, prefix)
        if resized:
            print_log(f'{type(self).__name__}: resized {", ".join(resized)}', logger='current')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


def resize_positions(backbone: nn.Module, state: dict[str, Any], prefix: str = '') -> list[str]:
    """Resize mmdet's position embeddings (PVT) and relative position tables (Swin) in ``state``, in place.

    As the hosts do: embeddings bilinearly, as PVT's forward pass on a larger image; tables bicubically. The attentions
    of ours in a backbone see to their own positions.

    Args:
        backbone: Whose shapes they get.
        state: A state dict to be loaded.
        prefix: Of the backbone's keys in it.

    Returns:
        The names of the tensors that were resized.
    """
    resized = []
    for name, module in backbone.named_modules():
        found = _positions(module)
        key = f'{prefix}{name}.{found[0]}' if found else ''
        if not found or not isinstance(value := state.get(key), Tensor):
            continue
        state[key] = new = _resize(value, *found)
        if new is not value:
            resized.append(key)
            index = key.replace('bias_table', 'index')
            if index != key and index in state:
                state[index] = module.relative_position_index
    return resized


def _positions(module: Any) -> tuple[str, tuple[int, int], bool] | None:
    """Return the name of a module's positions, the size of their grid, and whether they are a table."""
    if isinstance(getattr(module, 'relative_position_bias_table', None), Tensor):
        height, width = module.window_size
        return 'relative_position_bias_table', (2 * int(height) - 1, 2 * int(width) - 1), True
    if isinstance(getattr(module, 'pos_embed', None), Tensor) and hasattr(module, 'pos_shape'):
        height, width = module.pos_shape
        return 'pos_embed', (int(height), int(width)), False
    return None


def _resize(value: Tensor, name: str, size: tuple[int, int], is_table: bool) -> Tensor:
    if not is_table:
        return resize_grid(value, size)
    if value.dim() != 2 or isqrt(len(value)) ** 2 != len(value):
        return value
    table = resize_grid(value[None], size, mode='bicubic')[0]
    return value if len(table) == len(value) else table

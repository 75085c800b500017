"""Find out what the model around an attention says of the map that the attention sees."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import nn

from mmgate.adapter import make_gate
from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Gate, gate_options
from mmgate.gates.base.map import HeightWidth, map_of_image
from mmgate.hosts.table import adapter_for
from mmgate.wrappers import named_part

# Names of the layer that shrinks the map, in an embedding or a merging of patches.
STRIDED = ('projection', 'sampler', 'conv')


def needs_image_size(model: nn.Module, path: str, gate: type[Gate], options: Mapping[str, Any]) -> bool:
    """Return True if a gate needs the map in pre-training, and neither its options nor the model tell it.

    Args:
        model: The model.
        path: Name of the module that a rule would name.
        gate: Class of the gate.
        options: Options of the gate.
    """
    found = adapter_for(gate, named_part(model, path))
    if found is None or 'image_size' not in gate_options(gate):
        return False
    adapter, child = found
    inner = f'{path}.{child}'.rstrip('.')
    try:
        # Nothing is drawn there.
        with torch.device('meta'):
            make_gate(adapter, named_part(model, inner), gate, model, inner, **options)
    except OptionError:
        return True
    except ConfigError:
        pass
    return False


def nearest_with(model: nn.Module, path: str, attribute: str) -> Any:
    """Return the nearest module around the one of this path that has an attribute, or None."""
    names = path.split('.')
    around = (model.get_submodule('.'.join(names[:count])) for count in range(len(names) - 1, -1, -1))
    return next((part for part in around if hasattr(part, attribute)), None)


def stride_of(image: Sequence[int] | None, map_size: HeightWidth) -> dict[str, int]:
    """Return the stride of a map of an image, as sizes, where it is one number; otherwise nothing."""
    sides = set() if image is None else {side / of_map for side, of_map in zip(image, map_size, strict=True)}
    stride = sides.pop() if len(sides) == 1 else 0.5
    return dict(stride=int(stride)) if stride == int(stride) else {}


def backbone_and_stage(model: nn.Module, path: str, stages: str) -> tuple[Any, int]:
    """Return the backbone around an attention and the number of its stage, or ``(None, 0)``.

    Args:
        model: The model.
        path: Path of the attention.
        stages: Name of the backbone's list of stages, which is followed by the number of one in the path.
    """
    names = path.split('.')
    for count in range(len(names) - 2, -1, -1):
        if names[count] == stages and names[count + 1].isdecimal():
            return model.get_submodule('.'.join(names[:count])), int(names[count + 1])
    return None, 0


def sizes_of_stage(backbone: Any, steps: Iterable[Any]) -> dict[str, Any]:
    """Return the sizes that a backbone tells of a stage: its stride, and the map in pre-training if it keeps that.

    mmpretrain's Swin keeps the size of its images in its patch embedding, mmgate's backbones as ``pretrain_img_size``,
    those of mmdet and mmseg do not.

    Args:
        backbone: The backbone.
        steps: The embeddings and mergings of patches that shrink the map up to this stage.

    Returns:
        Nothing where a step is of an unknown form.
    """
    steps = list(steps)
    strides = [_stride(step) for step in steps]
    if not steps or None in strides:
        return {}
    told: dict[str, Any] = dict(stride=prod(stride for stride in strides if stride))
    image = getattr(backbone, 'pretrain_img_size', None) or getattr(steps[0], 'init_input_size', None)
    if image is not None:
        told.update(host_map=map_of_image(image, told['stride']))
    return told


def _stride(step: Any) -> int | None:
    """Return the stride of the layer that shrinks the map in an embedding or a merging; None for another module."""
    strides = (getattr(getattr(step, name, None), 'stride', None) for name in STRIDED)
    stride = next((one for one in strides if one is not None), None)
    return stride if stride is None or isinstance(stride, int) else int(stride[0])

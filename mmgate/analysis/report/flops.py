"""Multiply-accumulates of a model, counted as papers on attention count them.

Every matrix product and convolution counts, whoever issues it: linear layers, einsum, linear attention, fused
attention. Deformable sampling counts its interpolation and its weighted sum. Norms, activations, softmax, gates, all
that is elementwise, and the resizing of maps do not.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from logging import WARNING
from typing import Any

import torch
from mmengine.config import Config
from mmengine.logging import print_log
from mmengine.registry import MODELS
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mmgate.analysis.report.structure import build_structure
from mmgate.layers.base.deformable import DeformableGate
from mmgate.layers.base.gate import Gate
from mmgate.ops.library import CAN_REGISTER

PROPOSALS = 1000  # what a two-stage detector's box heads see, as mmdet's own count has it
MASKS = 100  # and its mask heads

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Complexity:
    """Trainable parameters of a model, multiply-accumulates of a forward pass, and those of every direct child."""

    parameters: int
    macs: int
    by_module: dict[str, int]


def count_config(cfg: Config, height: int, width: int) -> Complexity:
    """Count the model of a config, or of a bare backbone, on one image of ``height`` x ``width``.

    Nothing is computed where the model runs on the meta device, which most do. A segmentor's auxiliary heads, which
    serve training alone, are left out. A two-stage detector's box heads see 1000 proposals and its
    mask heads 100, whatever its untrained RPN would find; the sampling of RoIAlign is not counted.
    """
    image = torch.zeros(1, 3, height, width)
    try:
        return _count_host(build_structure(cfg).to('meta'), image.to('meta'))
    except RuntimeError:  # the model reads a number off a tensor, or an operator lacks a kernel
        return _count_host(MODELS.build(deepcopy(cfg.model)), image)  # mmdet writes into the config


def _count_host(model: Any, image: Tensor) -> Complexity:
    if not hasattr(model, 'data_preprocessor') or type(model).__name__ == 'ImageClassifier':
        return count_model(model, image)
    segments = hasattr(model, 'decode_head')
    sample = empty_sample(segments, (image.shape[2], image.shape[3]))
    if segments:
        model.forward = model.encode_decode  # called as the model: the counter knows modules' names
        return count_model(model, image, [sample.metainfo])
    _fix_proposals(model, image)
    return count_model(model, image, [sample])


def count_model(model: nn.Module, *inputs: Any) -> Complexity:
    """Count ``model(*inputs)`` in evaluation mode and without gradients, which is how the model is left."""
    if not CAN_REGISTER and any(
        isinstance(module, DeformableGate) and module.gate_readings for module in model.modules()
    ):
        print_log('below torch 2.4 the sampling of gated deformable attention is not counted', 'current', WARNING)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    model.eval()
    model.requires_grad_(False)  # the counter hooks what requires a gradient, even where none is taken
    for layer in list(model.modules()):
        if isinstance(layer, Gate):
            layer.prepare_count()
    counter = FlopCounterMode(display=False, custom_mapping=RULES)
    # under a mode of torch's functions its attention leaves out the fused operator, which hides the products
    with torch.no_grad(), torch.device('cpu'), counter:
        model(*inputs)
    counts = {name: sum(by_op.values()) // 2 for name, by_op in counter.get_flop_counts().items()}
    prefix, total = type(model).__name__, counter.get_total_flops() // 2
    by_module = {name: _of(module, f'{prefix}.{name}', counts) for name, module in model.named_children()}
    rest = total - sum(by_module.values())
    return Complexity(parameters, total, {**by_module, **({'itself': rest} if rest > 0 else {})})


def _of(module: nn.Module, name: str, counts: dict[str, int]) -> int:
    """Return what ``module`` counted; hosts call ``forward`` of some heads, which leaves it to the modules in them."""
    if name in counts:
        return counts[name]
    return sum(_of(child, f'{name}.{child_name}', counts) for child_name, child in module.named_children())


def empty_sample(segments: bool, size: tuple[int, int]) -> Any:
    """Return a data sample, mmseg's or mmdet's, that says nothing but the image's height and width."""
    if segments:
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmdet.structures import DetDataSample as Sample
    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size, scale_factor=(1.0, 1.0))
    return Sample(metainfo=meta)


def _fix_proposals(model: Any, image: Tensor) -> None:
    """Let a two-stage detector's RPN find as many proposals, and RoIAlign, which has no meta kernel, give zeros."""
    head, second = getattr(model, 'rpn_head', None), getattr(model, 'roi_head', None)
    if head is None or second is None:
        return
    boxes = image.new_tensor([0, 0, image.shape[3], image.shape[2]]).repeat(PROPOSALS, 1)

    def predict(features: tuple[Tensor, ...], *_: Any, **__: Any) -> list[InstanceData]:
        head(features)
        return [InstanceData(bboxes=boxes, scores=boxes[:, 0], labels=boxes[:, 0].long())]

    head.predict = predict
    for module in second.modules():
        if hasattr(module, 'roi_layers'):
            module.forward = partial(_pooled, module)
    masks = getattr(second, 'mask_head', None) or []
    for mask_head in masks if isinstance(masks, (list, nn.ModuleList)) else [masks]:
        mask_head.forward = partial(_first_masks, mask_head)


def _pooled(extractor: Any, features: tuple[Tensor, ...], rois: Tensor, *_: Any) -> Tensor:
    return features[0].new_zeros(len(rois), extractor.out_channels, *extractor.roi_layers[0].output_size)


def _first_masks(head: nn.Module, features: Tensor, *_: Any) -> Tensor:
    masks = type(head).forward(head, features[:MASKS])
    return masks.new_zeros(len(features), *masks.shape[1:])


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    (batch, heads, rows, width), columns = query, key[-2]
    return 2 * batch * heads * rows * columns * (width + value[-1])


def _grid_sample(image: Shape, grid: Shape, *_: Any, out_shape: Shape | None = None, **__: Any) -> int:
    return 2 * 4 * torch.Size((*image[:2], *grid[1:-1])).numel()


def _ms_deform_attn(value: Shape, shapes: Shape, start: Shape, locations: Shape, *_: Any, **__: Any) -> int:
    # four corners and one weight for every channel of every point
    return 2 * 5 * torch.Size((*locations[:-1], value[-1])).numel()


# by namespace and name, because an older torch lacks some
_RULES: dict[tuple[Any, str], Callable[..., int]] = {
    (torch.ops.aten, '_scaled_dot_product_flash_attention_for_cpu'): _attention,
    (torch.ops.aten, 'grid_sampler_2d'): _grid_sample,
    (torch.ops.mmgate, 'ms_deform_sample'): _ms_deform_attn,
}
RULES = {getattr(space, name): rule for (space, name), rule in _RULES.items() if hasattr(space, name)}

"""Count the multiply-accumulates (MACs) of a model as papers on attention count them.

Every matrix product and convolution counts, in linear layers, einsum, linear attention and fused attention alike.
Deformable sampling counts its interpolation and its weighted sum. Norms, activations, softmax, gates, other elementwise
operations and the resizing of maps do not count.
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
from mmengine.structures import BaseDataElement, InstanceData
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from mmgate.adapter import unused_names
from mmgate.analysis.structure import build_structure
from mmgate.gates.agent import AgentGate
from mmgate.gates.base.deformable import DeformableGate
from mmgate.ops.backend import CAN_REGISTER

PROPOSALS = 1000  # of a two-stage detector's box heads, as in mmdet's count
MASKS = 100  # proposals of its mask heads

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Complexity:
    """Number of a model's trainable parameters, and the MACs of one forward pass, by module.

    Attributes:
        parameters: Trainable parameters.
        unused: Parameters that gates replace; they rest in the model.
        macs: Multiply-accumulates of a forward pass.
        by_module: Those of every direct child. What one child calls in another, as the decoders of Deformable DETR do
            with layers of the head, counts in both.
    """

    parameters: int
    unused: int
    macs: int
    by_module: dict[str, int]


def count_config(cfg: Config, height: int, width: int) -> Complexity:
    """Return the parameters and MACs of a config's model, or of a bare backbone, on one ``height`` x ``width`` image.

    Most models run on the meta device, where nothing is computed. A segmentor's auxiliary heads, which only training
    uses, are left out. A two-stage detector's box heads see 1000 proposals and its mask heads 100, instead of those of
    its untrained RPN; the sampling of RoIAlign is not counted.
    """
    image = torch.zeros(1, 3, height, width)
    try:
        return _count_host(build_structure(cfg).to('meta'), image.to('meta'))
    except RuntimeError:  # the model reads a number off a tensor, or an operator lacks a kernel
        # mmdet writes into the config.
        return _count_host(MODELS.build(deepcopy(cfg.model)), image)


def _count_host(model: Any, image: Tensor) -> Complexity:
    if not hasattr(model, 'data_preprocessor') or type(model).__name__ == 'ImageClassifier':
        return count_model(model, image)
    segments = hasattr(model, 'decode_head')
    sample = empty_sample((image.shape[2], image.shape[3]))
    if segments:
        # It is called as the model, because the counter goes by modules' names.
        model.forward = model.encode_decode
        return count_model(model, image, [sample.metainfo])
    _fix_proposals(model, image)
    return count_model(model, image, [sample])


def count_model(model: nn.Module, *inputs: Any) -> Complexity:
    """Return the parameters and MACs of the call ``model(*inputs)``; it changes the model, so give a copy.

    The model is changed: it is left in evaluation mode, with no parameter that requires a gradient, and Agent's gates
    with biases of zeros. Give a copy of a model that goes on.
    """
    if not CAN_REGISTER and any(
        isinstance(module, DeformableGate) and type(module) is not DeformableGate for module in model.modules()
    ):
        print_log('below torch 2.4 the sampling of gated deformable attention is not counted', 'current', WARNING)
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    resting = {*unused_names(model)}
    unused = sum(p.numel() for name, p in model.named_parameters() if name in resting)
    model.eval()
    # The counter hooks what requires a gradient, even if no gradient is taken.
    model.requires_grad_(False)
    for layer in model.modules():
        if isinstance(layer, AgentGate) and layer.an_bias is not None:
            layer.biases = partial(_unresized, layer)  # type: ignore[method-assign]
    counter = FlopCounterMode(display=False, custom_mapping=rules())
    # Under a torch function mode torch's attention leaves out its fused operator, which would hide the products.
    with torch.no_grad(), torch.device('cpu'), counter:
        model(*inputs)
    counts = {name: sum(by_op.values()) // 2 for name, by_op in counter.get_flop_counts().items()}
    prefix = type(model).__name__
    total = counter.get_total_flops() // 2
    by_module = {name: _of(module, f'{prefix}.{name}', counts) for name, module in model.named_children()}
    rest = total - sum(by_module.values())
    return Complexity(parameters, unused, total, {**by_module, **({'itself': rest} if rest > 0 else {})})


def _of(module: nn.Module, name: str, counts: dict[str, int]) -> int:
    """Return the MACs of a module: its entry in ``counts`` or, if it has none, the sum over its children.

    A module has no entry if its parent calls its ``forward`` directly, so that no hook of the counter runs.
    """
    if name in counts:
        return counts[name]
    return sum(_of(child, f'{name}.{child_name}', counts) for child_name, child in module.named_children())


def empty_sample(size: tuple[int, int]) -> BaseDataElement:
    """Return a data sample without annotations, which has only the height and width of an image."""
    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size, scale_factor=(1.0, 1.0))
    return BaseDataElement(metainfo=meta)


def _fix_proposals(model: Any, image: Tensor) -> None:
    """Make a two-stage detector countable: its RPN returns 1000 fixed proposals, and its RoIAlign returns zeros.

    An untrained RPN would return any number of proposals, and RoIAlign has no kernel for the device ``meta``.
    """
    head = getattr(model, 'rpn_head', None)
    second = getattr(model, 'roi_head', None)
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


def _unresized(gate: AgentGate, hw_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Return zeros of the shapes that :meth:`.AgentGate.biases` returns, without the products that resize."""
    tokens = gate.class_tokens + hw_shape[0] * hw_shape[1]
    bias = gate.an_bias.new_zeros(1, gate.num_heads, gate.grid**2, tokens)
    return bias, bias.transpose(2, 3)


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    batch, heads, rows, width = query
    columns = key[-2]
    return 2 * batch * heads * rows * columns * (width + value[-1])


def _grid_sample(image: Shape, grid: Shape, *_: Any, out_shape: Shape | None = None, **__: Any) -> int:
    return 2 * 4 * torch.Size((*image[:2], *grid[1:-1])).numel()


def _ms_deform_attn(value: Shape, shapes: Shape, start: Shape, locations: Shape, *_: Any, **__: Any) -> int:
    # Every channel of every point has four corners and one weight.
    return 2 * 5 * torch.Size((*locations[:-1], value[-1])).numel()


def rules() -> dict[Any, Callable[..., int]]:
    """Return the function that counts each operator that torch's own counter does not know, by operator.

    An older torch lacks some operators.
    """
    aten = torch.ops.aten
    named = (
        (aten, '_scaled_dot_product_flash_attention_for_cpu', _attention),
        (aten, 'grid_sampler_2d', _grid_sample),
        (torch.ops.mmgate, 'ms_deform_attn_native', _ms_deform_attn),
    )
    return {getattr(space, name): rule for space, name, rule in named if hasattr(space, name)}

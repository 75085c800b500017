"""Multiply-accumulates of a model, counted as papers on attention count them.

Every matrix product and convolution counts, whoever issues it: linear layers, einsum, linear attention, fused attention.
Deformable sampling counts its interpolation and its weighted sum. Norms, activations, softmax and gates, elementwise all
of them, do not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import InstanceData
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

import mmgate.ops  # noqa: F401  (registers the operators that have a rule)

PROPOSALS = 1000  # what a two-stage detector's heads see, as mmdet's own count has it
MASKS = 100

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Complexity:
    """Size of a model.

    Attributes:
        parameters: Trainable parameters.
        macs: Multiply-accumulates of one forward pass.
        by_module: The share of every direct child, by name.
    """

    parameters: int
    macs: int
    by_module: dict[str, int]


def count_macs(model: nn.Module, *inputs: Any) -> Complexity:
    """Count ``model(*inputs)``, in evaluation mode and without gradients."""
    training = model.training
    fastpath = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)  # its one operator hides the products in it
    counter = FlopCounterMode(display=False, custom_mapping=RULES)
    try:
        model.eval()
        with torch.no_grad(), counter:
            model(*inputs)
    finally:
        model.train(training)
        torch.backends.mha.set_fastpath_enabled(fastpath)
    counts = counter.get_flop_counts()
    root = type(model).__name__
    by_module = {
        name: sum(counts.get(f'{root}.{name}', {}).values()) // 2 for name, _ in model.named_children()
    }  # fmt: skip
    parameters = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Complexity(parameters, counter.get_total_flops() // 2, by_module)


def count_config(cfg: Config, height: int, width: int) -> Complexity:
    """Count the model of an mmdet or mmseg config, or a bare classifier, on one image of ``height`` x ``width``.

    A two-stage detector's box heads see 1000 proposals and its mask head 100, whatever its untrained RPN finds.
    """
    init_default_scope(cfg.get('default_scope', 'mmdet'))
    model = MODELS.build(cfg.model)
    image = torch.zeros(1, 3, height, width)
    if not hasattr(model, 'data_preprocessor'):
        return count_macs(model, image)
    sample = _sample(model, height, width)
    with _fixed_proposals(model, height, width):
        return count_macs(model, image, [sample])


def _sample(model: nn.Module, height: int, width: int) -> Any:
    """Return a data sample that says nothing but the image's size."""
    if hasattr(model, 'decode_head'):
        from mmseg.structures import SegDataSample as Sample
    else:
        from mmdet.structures import DetDataSample as Sample
    size = (height, width)
    meta = dict(img_shape=size, ori_shape=size, pad_shape=size, batch_input_shape=size, scale_factor=(1.0, 1.0))
    return Sample(metainfo=meta)


@contextmanager
def _fixed_proposals(model: nn.Module, height: int, width: int) -> Iterator[None]:
    head = getattr(model, 'rpn_head', None)
    if head is None or not hasattr(model, 'roi_head'):
        yield
        return
    corner = torch.tensor([width, height, width, height]) / 4
    boxes = (corner * torch.tensor([1.0, 1.0, 3.0, 3.0])).repeat(PROPOSALS, 1)

    def predict(features: tuple[Tensor, ...], *_: Any, **__: Any) -> list[InstanceData]:
        head(features)
        return [InstanceData(bboxes=boxes, scores=torch.ones(PROPOSALS), labels=torch.zeros(PROPOSALS, dtype=torch.long))]

    head.predict = predict
    try:
        yield
    finally:
        del head.predict


def _attention(query: Shape, key: Shape, value: Shape, *_: Any, **__: Any) -> int:
    (batch, heads, rows, width), columns = query, key[-2]
    return 2 * batch * heads * rows * columns * (width + value[-1])


def _sampling(output: Shape, corners: int) -> int:
    return 2 * corners * torch.Size(output).numel()


def _grid_sample(image: Shape, grid: Shape, *_: Any, out_shape: Shape | None = None, **__: Any) -> int:
    return _sampling((image[0], image[1], *grid[1:-1]), 4)


def _ms_deform_attn(value: Shape, shapes: Shape, start: Shape, locations: Shape, *_: Any, **__: Any) -> int:
    # four corners and one weight for every channel of every point
    return _sampling((*locations[:-1], value[-1]), 5)


RULES: dict[Any, Any] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten.grid_sampler_2d: _grid_sample,
    torch.ops.mmgate.ms_deform_sample: _ms_deform_attn,
}

"""Let whole models of mmdet and mmseg do a training step with few waits: heads, denoising, sizes, the sum of losses."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import numpy as np
import torch
from mmdet.models.dense_heads import DETRHead, Mask2FormerHead
from mmdet.models.detectors import DeformableDETR
from mmdet.models.layers import CdnQueryGenerator, DeformableDetrTransformerEncoder
from mmengine.model import BaseModel
from torch import Tensor, nn

from mmgate.speed.derived import derived_class

from . import head as boxes
from . import masks
from .pairs import AsynchronousConstants, to_device

Head = TypeVar('Head', bound=nn.Module)
NARROW = (torch.float16, torch.bfloat16)


def match_once(head: Head) -> Head:
    """Change a DETR-like or Mask2Former head in place so that it matches all layers and images of a step at once.

    Raises:
        TypeError: It is no such head of mmdet or mmseg, or has targets, losses, costs or an assigner of another kind.
    """
    if isinstance(head, (boxes.MatchedOnceHead, masks.MatchedOnceMaskHead)):
        return head
    if not isinstance(head, (DETRHead, Mask2FormerHead)):
        raise TypeError(
            f'MatchedOnce: {type(head).__name__} is no head that derives from mmdet.DETRHead or mmdet.Mask2FormerHead.'
        )
    mixin, is_plain = (
        (boxes.MatchedOnceHead, boxes.is_plain)
        if isinstance(head, DETRHead)
        else (masks.MatchedOnceMaskHead, masks.is_plain)
    )
    # In testing a head has no assigner.
    if getattr(head, 'assigner', None) is not None and not is_plain(head):
        raise TypeError(
            f"MatchedOnce: {type(head).__name__} has targets, losses or costs other than mmdet's usual ones, or does "
            'not assign as HungarianAssigner does.'
        )
    # The constructor of DETRHead compares the class, so that it is changed afterwards.
    cls: Any = type(head)
    head.__class__ = derived_class(mixin, cls, 'MatchedOnce')
    return head


def match_model_once(model: nn.Module) -> list[str]:
    """Change the classes of a model's heads, detector and layers in place; see ``mmgate.MatchOnceHook``.

    Returns:
        Lines for the log: the heads that stay the model's, or that there is no head to change, as where a config has
        inherited the hook and another head.
    """
    modules = list(model.modules())
    heads: list[Any] = [module for module in modules if isinstance(module, (DETRHead, Mask2FormerHead))]
    left = []
    if not heads:
        left.append(f'{type(model).__name__} has no head that derives from mmdet.DETRHead or mmdet.Mask2FormerHead.')
    for head in heads:
        try:
            match_once(head)
        except TypeError as error:
            left.append(f'a head stays as it is: {error}')
    for module in modules:
        for mixin, fits in MIXINS.items():
            if fits(module) and not isinstance(module, mixin):
                cls: Any = type(module)
                module.__class__ = derived_class(mixin, cls, '')
    return left


class KnownSizesDetector(DeformableDETR):
    """Mixin for DeformableDETR and DINO that keeps the sizes of feature maps on the CPU beside their tensor."""

    def pre_transformer(self, mlvl_feats: Sequence[Tensor], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """Prepare the inputs of encoder and decoder, as mmdet."""
        with AsynchronousConstants():
            encoder, decoder = super().pre_transformer(mlvl_feats, *args, **kwargs)
        encoder['spatial_shapes'].on_cpu = [tuple(feature.shape[-2:]) for feature in mlvl_feats]
        return encoder, decoder

    def gen_encoder_output_proposals(self, memory: Tensor, memory_mask: Tensor | None, spatial_shapes: Tensor) -> Any:
        """Propose boxes from the encoder's memory, as mmdet."""
        # mmdet divides by sizes that it makes of the dtype of the memory: bfloat16 would round them above 256.
        if memory_mask is None and memory.dtype in NARROW:
            memory_mask = memory.new_zeros(memory.shape[:2], dtype=torch.bool)
        with AsynchronousConstants():
            return super().gen_encoder_output_proposals(memory, memory_mask, on_cpu(spatial_shapes))


class KnownSizesEncoder(DeformableDetrTransformerEncoder):
    """Mixin for the encoder of DeformableDETR and DINO that reads the sizes of feature maps from the CPU."""

    def get_encoder_reference_points(self, spatial_shapes: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the reference points of the encoder, as mmdet."""
        return super().get_encoder_reference_points(on_cpu(spatial_shapes), *args, **kwargs)


def on_cpu(spatial_shapes: Tensor) -> Any:
    """Return the sizes that a KnownSizesDetector has left beside a tensor of sizes, or the tensor."""
    return getattr(spatial_shapes, 'on_cpu', spatial_shapes)


class DenoisingWithoutWaits(CdnQueryGenerator):
    """Mixin for DINO's generator of denoising queries that knows the number of objects and waits for nothing."""

    _counts: list[int]

    def __call__(self, batch_data_samples: Sequence[Any]) -> tuple[Any, ...]:
        """Generate denoising queries; arguments and results are those of mmdet."""
        self._counts = [len(sample.gt_instances) for sample in batch_data_samples]
        with AsynchronousConstants():
            return super().__call__(batch_data_samples)

    def generate_dn_label_query(self, gt_labels: Tensor, num_groups: int) -> Tensor:
        """Embed the labels of all groups, some of which are replaced by random ones."""
        labels = gt_labels.repeat(2 * num_groups)
        chosen = torch.rand(labels.shape, device=labels.device) < self.label_noise_scale * 0.5
        noisy = torch.where(chosen, torch.randint_like(labels, self.num_classes), labels)
        return self.label_embedding(noisy)

    def collate_dn_queries(
        self, input_label_query: Tensor, input_bbox_query: Tensor, batch_idx: Tensor, batch_size: int, num_groups: int
    ) -> tuple[Tensor, Tensor]:
        """Sort denoising queries ``(Q, C)`` and boxes ``(Q, 4)`` by image, and fill up with zeros.

        Returns:
            Queries ``(B, N, C)`` and boxes ``(B, N, 4)``; N is twice the groups times the largest number of objects.
        """
        counts = self._counts
        width = 2 * num_groups * max(counts)
        firsts = np.repeat(np.arange(batch_size) * width, counts)
        own = np.concatenate([np.arange(count) for count in counts])
        groups = np.arange(2 * num_groups)[:, None] * max(counts)
        places = to_device((firsts + own + groups).ravel(), batch_idx.device)
        both = [
            torch.zeros(batch_size * width, given.shape[1], device=given.device)
            .index_copy(0, places, given.float())
            .unflatten(0, (batch_size, width))
            for given in (input_label_query, input_bbox_query)
        ]
        return both[0], both[1]

    def generate_dn_mask(self, max_num_target: int, num_groups: int, device: torch.device | str) -> Tensor:
        """Return the mask of self attention: True where a query must not see a denoising query of another group."""
        denoising = max_num_target * 2 * num_groups
        queries = torch.arange(denoising + self.num_matching_queries, device=device)
        groups = queries // max(max_num_target * 2, 1)
        return (groups[:, None] != groups) & (queries < denoising)


class SummedLosses(BaseModel):
    """Mixin for a model that sums all losses in one operation."""

    def parse_losses(self, losses: dict[str, Any]) -> tuple[Tensor, Any]:
        """Sum the losses of a step; the numbers for the log are the losses themselves, with their names."""
        single = all(isinstance(loss, Tensor) and loss.numel() == 1 for loss in losses.values())
        if not single or 'loss' in losses or not any('loss' in name for name in losses):
            return super().parse_losses(losses)
        numbers = {name: loss.reshape(()) for name, loss in losses.items()}
        total = torch.stack([number for name, number in numbers.items() if 'loss' in name]).sum()
        return total, OrderedDict(loss=total, **numbers)


def _has(module: nn.Module, base: Any, *names: str) -> bool:
    """Return True if a module has these methods of mmdet's class, and not others that override them."""
    return isinstance(module, base) and all(getattr(type(module), name) is getattr(base, name) for name in names)


DENOISING = ('__call__', 'generate_dn_label_query', 'collate_dn_queries', 'generate_dn_mask')
# The mixin of each part, and a check of the modules that it is for.
MIXINS: dict[Any, Callable[[nn.Module], bool]] = {
    KnownSizesDetector: lambda module: _has(module, DeformableDETR, 'pre_transformer', 'gen_encoder_output_proposals'),
    KnownSizesEncoder: lambda module: _has(module, DeformableDetrTransformerEncoder, 'get_encoder_reference_points'),
    DenoisingWithoutWaits: lambda module: _has(module, CdnQueryGenerator, *DENOISING),
    SummedLosses: lambda module: getattr(type(module), 'parse_losses', None) is BaseModel.parse_losses,
}

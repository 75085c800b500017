"""mmdet's Mask2Former as a network of tensors, up to the classes and masks of their queries."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

from mmdet.models.detectors import Mask2Former, MaskFormer
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

from .network import Network, refuse


class MaskNetwork(Network):
    """Mask2Former up to ``classes`` ``(B, Q, C + 1)`` and ``masks`` ``(B, Q, H, W)``, both logits.

    Instances and panoptic maps, of any number and in the size of the original, are made by the host's fusion head.
    """

    inputs = ('images',)
    outputs = ('classes', 'masks')

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return classes and masks of images ``(B, 3, H, W)``."""
        sample = SimpleNamespace(metainfo=dict(batch_input_shape=images.shape[-2:]))
        return self.host.panoptic_head.predict(self.host.extract_feat(images), [sample])

    def feeds(self, images: Tensor, samples: Sequence[BaseDataElement]) -> tuple[Tensor, ...]:
        """Return the images; the host masks no padding."""
        return (images,)

    def classes(self) -> int:
        """Return the number of classes, things and stuff."""
        return self.host.panoptic_head.num_classes

    def results(self, outputs: Sequence[Tensor], samples: Any, rescale: bool) -> Any:
        """Return the fusion head's results."""
        return self.host.panoptic_fusion_head.predict(*outputs, samples, rescale=rescale)


def mask_former(host: nn.Module) -> Network | None:
    """Return the network of a Mask2Former of mmdet, None for what is none.

    Raises:
        ConfigError: A MaskFormer of another kind.
    """
    if not isinstance(host, MaskFormer):
        return None
    if not isinstance(host, Mask2Former):
        raise refuse(host, 'of the mask formers Mask2Former can be')
    return MaskNetwork(host)

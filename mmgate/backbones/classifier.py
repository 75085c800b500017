"""A backbone with a linear classifier, as the papers count parameters at 224 pixels."""

from __future__ import annotations

from typing import Any

from mmengine.model import BaseModule
from torch import Tensor, nn

from mmgate.registry import MODELS


@MODELS.register_module()
class Classifier(BaseModule):
    """Mean of the last map, then a linear layer.

    Args:
        backbone: Config of a backbone whose last output is the map ``(B, C, h, w)`` to classify.
        in_channels: C.
        num_classes: Classes K.
        init_cfg: mmengine's initialisation config.
    """

    def __init__(
        self, backbone: dict[str, Any], in_channels: int, num_classes: int = 1000, init_cfg: dict | None = None
    ) -> None:
        super().__init__(init_cfg=init_cfg)
        self.backbone = MODELS.build(backbone)
        self.head = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Return logits ``(B, K)`` for images ``(B, 3, H, W)``."""
        return self.head(self.backbone(x)[-1].mean((2, 3)))

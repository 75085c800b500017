"""Faster Hungarian matching and losses in mmdet's heads, with one GPU synchronisation for each training step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmgate.registry import MODELS

if TYPE_CHECKING:
    from torch import nn


@MODELS.register_module()
def MatchedOnce(*, host: str, **host_cfg: Any) -> nn.Module:
    """Build a new DETR-like or Mask2Former head, of the class ``host``, that matches a step with one synchronisation.

    Losses and gradients equal mmdet's up to rounding, and the state dict is the host's. mmdet's heads wait for the
    device eleven times for each image and layer, and five times for each layer. Here the costs of all layers and
    images are computed together and copied in one transfer, and the losses of all layers, of the encoder's proposals
    and of DINO's denoising queries are one batch. A head that overrides mmdet's targets or losses, or has a loss or a
    cost that is none of mmdet's usual ones, computes by its own code: Grounding DINO, DDQ, QualityFocalLoss.

    Args:
        host: Registered name of a head that derives from mmdet's DETRHead or Mask2FormerHead, with its scope.
        **host_cfg: The host's config.

    Returns:
        The host, whose class is derived from the registered one.

    Raises:
        TypeError: ``host`` is no such head.
    """
    from .model import match_once

    return match_once(MODELS.build(dict(type=host, **host_cfg)))

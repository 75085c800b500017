"""One-to-one matching of predictions and objects that waits for the device once, in mmdet's DETR-like heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmgate.registry import MODELS

if TYPE_CHECKING:
    from torch import nn


@MODELS.register_module()
def MatchedOnce(*, host: str, **host_cfg: Any) -> nn.Module:
    """Build the DETR-like head ``host`` so that a step waits for the device once to match all layers and images.

    Assignments are mmdet's, losses are mmdet's to rounding, the state dict is the host's. mmdet's heads wait eleven
    times an image and layer and five times a layer. Here the costs of all of them are moved in one transfer, and
    nothing else waits. What a host does in a way of its own waits as it did: Grounding DINO's targets and losses (but
    not its costs), DINO's and DDQ's denoising, DDQ's distinct queries.

    Args:
        host: Registered name of a head that derives from mmdet's DETRHead, with its scope.
        **host_cfg: The host's own config.

    Returns:
        The host, of a class derived from its own.

    Raises:
        TypeError: ``host`` is no such head, or it assigns by another class than HungarianAssigner.
    """
    from .head import match_once

    return match_once(MODELS.build(dict(type=host, **host_cfg)))

"""mmcv's deformable attention and ours with its weights, and what both are called with."""

from __future__ import annotations

from typing import Any

import torch
from conftest import filled
from mmcv.ops import MultiScaleDeformableAttention
from torch import Tensor

from mmgate.gates import PLuGMultiScaleDeformableAttention

SIZES = dict(embed_dims=16, num_heads=4, num_levels=2, num_points=3)


def make_call(columns: int = 2, batch_first: bool = True) -> dict[str, Tensor]:
    tokens = dict(query=5, value=30, query_pos=5, identity=5)
    call = {name: torch.randn(2, count, 16) for name, count in tokens.items()}
    return dict(
        **{name: x if batch_first else x.transpose(0, 1) for name, x in call.items()},
        key_padding_mask=torch.arange(30) >= torch.tensor([[30], [26]]),
        reference_points=torch.rand(2, 5, 2, columns),
        spatial_shapes=torch.tensor([(4, 6), (2, 3)]),
        level_start_index=torch.tensor([0, 24]),
    )


def pair(kind: Any = PLuGMultiScaleDeformableAttention, host: Any = (), **options: Any) -> tuple[Any, Any]:
    """Return mmcv's attention with ``host``'s arguments, and ours with its weights, loaded from its state dict."""
    common: dict[str, Any] = dict(batch_first=True, dropout=0.0) | dict(host)
    vanilla, ours = MultiScaleDeformableAttention(**SIZES, **common), kind(**SIZES, **common, **options)
    keys = ours.load_state_dict(filled(vanilla, 0.3).state_dict(), strict=False)
    assert not keys.unexpected_keys
    assert all(key.startswith(('gate.gate_proj.', 'gate.gml.')) for key in keys.missing_keys)
    return vanilla, ours

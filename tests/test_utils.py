"""The function that mmengine's hub calls in every package."""

from __future__ import annotations

import pytest
from mmengine.hub import get_model

DETECTOR = 'mmgate::plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes.py'
SEGMENTOR = 'mmgate::plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'
BACKBONE = 'mmgate::agent/mask_rcnn/agent-mask-rcnn_pvt-demo_1xb8-8e_shapes.py'


@pytest.mark.parametrize(
    'path, kind, gate',
    [
        (DETECTOR, 'DeformableDETR', 'PLuGDeformableGate'),
        (SEGMENTOR, 'EncoderDecoder', 'PLuGGate'),
        (BACKBONE, 'MaskRCNN', 'AgentGate'),
    ],
    ids=['detector', 'segmentor', 'backbone'],
)
def test_the_hub_takes_our_configs(path: str, kind: str, gate: str) -> None:
    model = get_model(path)
    assert type(model).__name__ == kind
    assert any(type(module).__name__ == gate for module in model.modules())

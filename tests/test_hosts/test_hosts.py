"""Agent and SAGA backbones in their hosts, and the guide for contributors."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from conftest import ROOT
from helpers import zoo
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmengine.registry import MODELS
from torch import Tensor, nn

import mmgate
from mmgate import record, swap_attention
from mmgate.analysis.complexity import count_model
from mmgate.gate import named_gate_parameters

SIDE = 64
HOSTS = [  # beside Mask R-CNN, which test_mmcv_ext.py trains; every config takes a step in test_steps.py
    'agent/semantic_fpn/agent-semantic-fpn_pvt-t_8xb2-40k_ade20k-512x512.py',
    'saga/retinanet/saga-retinanet_pvt-t_1x_coco.py',
    'saga/upernet/saga-upernet_swin-t_8xb2-160k_ade20k-512x512.py',
]
REDUCED: dict[str, dict[str, Any]] = {
    'pvt': dict(num_layers=(1, 1, 1, 1)),
    'swin': dict(depths=(1, 1, 1, 2), blocks=(1, 1, 1, 0)),
}


@pytest.mark.parametrize('name', HOSTS)
def test_backbones_train_in_their_hosts(name: str) -> None:
    cfg = zoo.reduced(f'mmgate::{name}')
    model_cfg = cfg.model
    model_cfg.backbone.update(REDUCED['pvt' if '_pvt-' in name else 'swin'])
    model = MODELS.build(model_cfg)
    model.init_weights()
    model.train()
    losses = model(**zoo.batch(cfg, (SIDE, SIDE)), mode='loss')
    total = sum(v if isinstance(v, Tensor) else sum(v) for k, v in losses.items() if 'loss' in k)
    assert total.isfinite()
    total.backward()
    silent = [n for n, p in model.backbone.named_parameters() if p.requires_grad and p.grad is None]
    # Swin norms each output, of which RetinaNet's FPN skips the first
    assert not [n for n in silent if not n.startswith('norm')]
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


def macs(model: nn.Module, x: Tensor) -> int:
    return count_model(copy.deepcopy(model), x).macs  # which freezes what it counts


def test_gates_that_are_written_by_the_guide(monkeypatch: pytest.MonkeyPatch) -> None:
    """The classes of docs/extend.md in hosts of each kind: they train, are counted, and recorded for figures."""
    guide = (ROOT / 'docs/extend.md').read_text()
    monkeypatch.setattr(mmgate.MODELS, '_module_dict', dict(mmgate.MODELS.module_dict))
    blocks = [part.split('```')[0] for part in guide.split('```python\n')[1:]]
    exec('\n'.join(block for block in blocks if ' Attention' not in block and 'swap_attention' not in block), {})
    host = nn.ModuleDict(dict(attn=MultiScaleDeformableAttention(16, 4, 2, 3, batch_first=True, dropout=0.0)))
    nn.init.normal_(host['attn'].attention_weights.weight)
    maps = dict(
        spatial_shapes=torch.tensor([[4, 4], [2, 2]]),
        level_start_index=torch.tensor([0, 16]),
        reference_points=torch.rand(2, 20, 2, 2),
    )
    tokens = torch.randn(2, 20, 16)
    before = host['attn'](tokens, **maps)
    swap_attention(host, dict(path='attn', type='LevelGate'))
    torch.testing.assert_close(host['attn'](tokens, **maps), before)
    host['attn'](tokens, **maps).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for _, parameter in named_gate_parameters(host))

    dense = dict(path='encoder.layers.*.self_attn', type='HeadGate', factor=0.5)
    swin = dict(type='mmgate.Gated', host='mmdet.SwinTransformer', depths=(2, 2, 2, 2))
    model = MODELS.build(dict(swin, attention=dict(path='stages.0.**.attn', type='MeanGate')))
    attn = model.stages[0].blocks[1].attn
    assert isinstance(attn, ShiftWindowMSA) and type(attn.gate).__name__ == 'MeanGate'
    image = torch.randn(1, 3, 64, 64)
    assert all(map_.isfinite().all() for map_ in model(image))
    vanilla = MODELS.build(dict(type='mmdet.SwinTransformer', depths=(2, 2, 2, 2)))
    assert 0 < macs(model, image) < macs(vanilla, image)
    encoder = nn.ModuleDict(dict(encoder=nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, 16), 2)))
    x = torch.randn(6, 2, 16)
    encoder.eval()
    expected = encoder['encoder'](x)
    counted = macs(encoder['encoder'], x)
    assert len(swap_attention(encoder, dense)) == 2
    torch.testing.assert_close(encoder['encoder'](x), expected)
    assert macs(encoder['encoder'], x) == counted + 2 * (6 * 2) * 16 * 4  # layers, tokens, channels, heads
    gates = dict(named_gate_parameters(encoder))
    assert {name.split('self_attn.')[1] for name in gates} == {'gate.gate_proj.weight', 'gate.gate_proj.bias'}
    encoder['encoder'](x).square().sum().backward()
    assert all(parameter.grad.abs().sum() > 0 for parameter in gates.values())
    with record(encoder, ('gate', 'attention')) as recording:
        encoder['encoder'](x)
    assert recording['encoder.layers.0.self_attn']['gate'].tensors[0].shape == (2, 4, 6, 1)

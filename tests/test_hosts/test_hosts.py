"""The guide for contributors: gates of each kind, written as it says, in their hosts."""

from __future__ import annotations

import copy

import pytest
import torch
from conftest import ROOT
from mmcv.ops import MultiScaleDeformableAttention
from mmdet.models.backbones.swin import ShiftWindowMSA
from mmengine.registry import MODELS
from torch import Tensor, nn

import mmgate
from mmgate import record, swap_attention
from mmgate.analysis.complexity import count_model
from mmgate.gate import named_gate_parameters


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

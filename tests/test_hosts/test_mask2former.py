"""The dense gates in Mask2Former's decoder: identity start through the Runner's path, and a bf16 training step."""

from __future__ import annotations

import logging

import pytest
import torch
from conftest import ROOT
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample
from torch import nn

import mmgate  # noqa: F401

CONFIG = ROOT / 'configs/plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'


def load() -> ConfigDict:
    init_default_scope('mmseg')
    logging.getLogger('mmengine').setLevel(logging.WARNING)
    return Config.fromfile(CONFIG).model


def batch() -> dict:
    labels = torch.full((1, 64, 64), 255)
    labels[:, 10:40, 8:30] = 2
    labels[:, 30:60, 30:60] = 5
    samples = [SegDataSample(metainfo=dict(img_shape=(64, 64), ori_shape=(64, 64))) for _ in range(2)]
    for sample in samples:
        sample.gt_sem_seg = PixelData(data=labels)
    return dict(inputs=torch.randn(2, 3, 64, 64), data_samples=samples)


def losses(model: nn.Module, data: dict) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)  # Mask2Former samples the points of its mask losses
    return {name: loss for name, loss in model(**data, mode='loss').items() if 'loss' in name}


def test_plug_starts_as_vanilla_and_trains() -> None:
    gated_cfg = load()
    vanilla_cfg = load()
    vanilla_cfg.type = vanilla_cfg.pop('host').split('.')[1]
    del vanilla_cfg['attention']
    vanilla, gated = MODELS.build(vanilla_cfg), MODELS.build(gated_cfg)
    assert type(gated) is type(vanilla)
    vanilla.init_weights()
    gated.init_weights()  # runs xavier over every matrix of the decoder
    keys = gated.load_state_dict(vanilla.state_dict(), strict=False)
    assert not keys.unexpected_keys and keys.missing_keys
    assert all('.gml.' in key or '.gate_' in key for key in keys.missing_keys)
    data = batch()
    expected, actual = losses(vanilla, data), losses(gated, data)
    for name, loss in expected.items():
        torch.testing.assert_close(actual[name], loss, rtol=1e-6, atol=1e-6)
    sum(actual.values()).backward()
    for name, parameter in gated.named_parameters():
        if name.endswith('gml.weight') and 'decode_head' in name:
            assert parameter.grad[0] != 0, name


def test_gates_have_the_last_word_in_init_weights() -> None:
    """The head draws every matrix of its decoder from a normal distribution, after all others."""
    cfg = load()
    cfg.attention.update(init='paper')
    model = MODELS.build(cfg)
    model.init_weights()
    for name, module in model.named_modules():
        if name.endswith(('gate_q_proj', 'gate_k_proj')):
            assert module.weight.abs().max() <= (6 / sum(module.weight.shape)) ** 0.5, name
    cfg = load()
    cfg.attention.update(type='SDPAGatedMultiheadAttention', init='identity', scale=2.0)
    model = MODELS.build(cfg)
    model.init_weights()
    gates = [parameter for name, parameter in model.named_parameters() if name.endswith('gate_weight')]
    assert gates and all(gate.dim() == 2 and torch.count_nonzero(gate) == 0 for gate in gates)


@pytest.mark.parametrize('gate', ['PLuG', 'SDPAGated', 'DifferentialGated'])
def test_bf16_training_step(gate: str) -> None:
    cfg = load()
    cfg.attention.type = f'{gate}MultiheadAttention'
    model = MODELS.build(cfg)
    model.init_weights()
    with torch.autocast('cpu', torch.bfloat16):
        terms = losses(model, batch())
    sum(terms.values()).backward()
    assert all(torch.isfinite(loss) for loss in terms.values())
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)
    gates = [p for name, p in model.named_parameters() if '.gate_' in name or '.gml.' in name]
    assert gates and all(p.grad is not None for p in gates)

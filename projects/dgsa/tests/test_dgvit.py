"""DGViT: its layers, its start, its configs."""

from pathlib import Path

import numpy as np
import pytest
import torch

pytest.importorskip('mmpretrain', reason='DGViT is built on the ViT of mmpretrain, which is not installed')

from mmengine.config import Config
from mmpretrain.structures import DataSample

from mmgate import ConfigError
from mmgate.gates import DGSAGate, DifferentialGate
from mmgate.registry import MODELS
from projects.dgsa.swiglu import SwiGLU

CONFIGS = Path(__file__).parents[1] / 'configs'
SMALL = dict(type='mmgate.DGViT', num_layers=3, embed_dims=32, num_heads=2)


@pytest.mark.parametrize(
    'name, gate', [('dgvit', DGSAGate), ('diff-vit', DifferentialGate), ('vanilla/vit', None)], ids=lambda v: str(v)
)
def test_a_config_takes_a_step(name, gate):
    cfg = Config.fromfile(CONFIGS / f'{name}_1xb128-100e_cifar10.py')
    model = MODELS.build(cfg.model)
    model.init_weights()
    losses = model.loss(torch.rand(2, 3, 32, 32), [DataSample().set_gt_label(label) for label in (1, 2)])
    losses['loss'].backward()
    kinds = {type(module) for module in model.backbone.modules()}
    assert kinds & {DGSAGate, DifferentialGate} == ({gate} if gate else set())
    assert (SwiGLU in kinds) == (gate is not None)


@pytest.mark.parametrize('data', ['cifar10', 'cifar100', 'fashionmnist', 'svhn'])
def test_training_images_are_plain_but_for_noise(data):
    """The paper names no augmentation; ``dgvit-crop`` has the usual one."""

    def transforms(name, part):
        cfg = Config.fromfile(CONFIGS / f'{name}_1xb128-100e_{data}.py')
        return [transform['type'] for transform in cfg[f'{part}_dataloader'].dataset.pipeline]

    tested = transforms('dgvit', 'test')
    assert transforms('dgvit', 'train') == transforms('vanilla/vit', 'train') == tested
    assert transforms('dgvit-noise', 'train') == [*tested[:-1], 'mmgate.RandomNoise', tested[-1]]
    assert transforms('dgvit-noise', 'test') == tested
    if data == 'cifar10':
        assert transforms('dgvit-crop', 'train') == ['RandomCrop', 'RandomFlip', *tested]
        assert transforms('dgvit-crop', 'test') == tested


def test_the_matched_vit_has_the_parameters_of_dgvit():
    counts = []
    for name in ('dgvit', 'vanilla/vit-matched'):
        with torch.device('meta'):
            model = MODELS.build(Config.fromfile(CONFIGS / f'{name}_1xb128-100e_cifar10.py').model)
        counts.append(sum(parameter.numel() for parameter in model.parameters()))
    assert abs(counts[1] / counts[0] - 1) < 1e-3


def test_layers_know_their_depth_and_may_be_frozen():
    model = MODELS.build(dict(attention=dict(type='DifferentialMultiheadAttention'), **SMALL))
    found = [module.lambda_init for module in model.modules() if isinstance(module, DifferentialGate)]
    assert found == pytest.approx([0.2, 0.8 - 0.6 * np.exp(-0.3), 0.8 - 0.6 * np.exp(-0.6)])
    frozen = MODELS.build(dict(frozen_stages=2, **SMALL))
    assert [any(p.requires_grad for p in layer.parameters()) for layer in frozen.layers] == [False, False, True]
    vanilla = MODELS.build(dict(attention=None, drop_path_rate=0.1, **SMALL))
    assert type(vanilla.layers[2].attn).__module__.startswith('mmpretrain')
    assert vanilla.layers[2].ffn.drop_path.drop_prob == pytest.approx(0.1)
    with pytest.raises(ConfigError, match='must be 1 or 2'):
        MODELS.build(dict(ffn_dropouts=3, **SMALL))


@pytest.mark.parametrize('gate', ['DifferentialGatedMultiheadAttention', 'DifferentialMultiheadAttention'])
def test_it_starts_where_its_vanilla_partner_starts(gate):
    states = []
    for attention in (None, dict(type=gate)):
        torch.manual_seed(3)
        model = MODELS.build(dict(attention=attention, **SMALL))
        model.init_weights()
        states.append(model.state_dict())
    vanilla, gated = states
    assert all(torch.equal(vanilla[key], gated[key]) for key in vanilla) and len(gated) > len(vanilla)

"""What trains while gates train alone, and what rests."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from helpers.finetuned import PLUG, Layer, gated, layers, train
from torch import Tensor, nn

import mmgate


@pytest.mark.parametrize('host, head', [('retinanet_pvtv2', 'bbox_head'), ('swin', 'decode_head')])
def test_training_modes(host: str, head: str) -> None:
    """Frozen batch norms and dropouts rest while the gates train; the model itself knows that it trains."""
    model = gated(host, train='gates')
    for one in (model, copy.deepcopy(model)):
        one.train()
        assert one.training and one.get_submodule(head).training
        working = [n for n, m in one.named_modules() if isinstance(m, (nn.BatchNorm2d, nn.Dropout)) and m.training]
        assert working and all('.attn.' in name for name in working)
    mmgate.train_only_gates(model, 'all')
    model.train()
    assert all(p.requires_grad for p in model.parameters()) and all(module.training for module in model.modules())


def test_what_lies_before_the_gates_rests_and_what_was_frozen_stays_so() -> None:
    model = gated('deformable_detr')
    frozen = [name for name, parameter in model.named_parameters() if not parameter.requires_grad]
    assert frozen  # the first stage of the ResNet
    mmgate.train_only_gates(model)
    levels: list[Tensor] = []
    model.neck.register_forward_hook(lambda module, args, out: levels.extend(out))
    train(model, 'deformable_detr', steps=1)
    assert levels and not any(level.requires_grad for level in levels)
    mmgate.restore_attention(model)
    assert [name for name, parameter in model.named_parameters() if not parameter.requires_grad] == frozen


class Frozen(nn.Sequential):
    def train(self, mode: bool = True) -> Any:
        """As mm backbones freeze their stages."""
        return super().train(mode).requires_grad_(False)


def test_gates_in_frozen_stages_train() -> None:
    model = nn.Sequential(Frozen(Layer(), Layer()))
    mmgate.swap_attention(model, dict(PLUG, path='0.*.attn'))
    names = mmgate.train_only_gates(model)
    assert names == list(mmgate.gate_parameters(model))
    model.eval().train()
    assert names == [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    mmgate.train_only_gates(model, 'all')
    assert not any(parameter.requires_grad for parameter in model.parameters())


def test_dropout_works_in_a_gate_inside_an_attention() -> None:
    from mmcv.cnn.bricks.transformer import MultiheadAttention

    model = nn.Sequential(MultiheadAttention(16, 2, 0.5, 0.5, dropout_layer=dict(type='Dropout', drop_prob=0.5)))
    mmgate.swap_attention(model, dict(path='0.attn', type='mmgate.PLuGMultiheadAttention'))
    mmgate.train_only_gates(model)
    assert model[0].attn.training and not (model[0].proj_drop.training or model[0].dropout_layer.training)


def test_shared_projections_are_no_gates() -> None:
    model = layers(())
    model[0].attn.out_proj.weight = model[1].attn.out_proj.weight
    model[0].attn.out_proj.bias = model[1].attn.out_proj.bias
    vanilla_names = dict(model.named_parameters())
    mmgate.swap_attention(model, PLUG)
    assert not set(mmgate.gate_parameters(model)) & set(vanilla_names)


@pytest.mark.parametrize('inside', [True, False], ids=['inside', 'beside'])
def test_norms_of_gated_attention_keep_their_statistics(inside: bool) -> None:
    from mmseg.models.backbones.mit import EfficientMultiheadAttention

    model = nn.Sequential(EfficientMultiheadAttention(16, 2, sr_ratio=2, norm_cfg=dict(type='BN')))
    if inside:
        model[0].attn.norm = nn.BatchNorm2d(16)
    mmgate.swap_attention(model, dict(path='0', type='mmgate.PLuGMultiheadAttention'))
    mmgate.train_only_gates(model)
    model.train()
    gated = model[0].attn
    assert gated.training and gated.gate.training and gated.gate.gml.training
    assert not model[0].norm.training and not (inside and gated.norm.training)
    mmgate.restore_attention(model)
    assert all(module.training for module in model.modules())

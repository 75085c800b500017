"""Load transformers' models with gates in them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip('transformers', '5.20', reason='needs transformers: the extra "transformers"')

import transformers
from helpers.hub_models import build, feed, largest_difference, moved, outputs

import mmgate
from mmgate.transformers import from_pretrained

RULES = [
    dict(path='model.encoder.layers.*.self_attn', type='PLuGMultiScaleDeformableAttention'),
    dict(path='model.decoder.layers.*.self_attn', type='PLuGMultiheadAttention'),
]
CLASS = transformers.DeformableDetrForObjectDetection


def test_a_vanilla_checkpoint_misses_the_gates_alone(tmp_path: Path) -> None:
    """They start as in a swap."""
    vanilla, fed = build('deformable_detr'), feed('deformable_detr')
    vanilla.save_pretrained(tmp_path)
    torch.manual_seed(7)
    model, info = from_pretrained(CLASS, tmp_path, RULES, output_loading_info=True)
    loaded = mmgate.gate_parameters(model)
    assert type(model) is CLASS and not model.training
    assert set(info['missing_keys']) == set(loaded)
    assert not info['unexpected_keys'] and not info['mismatched_keys']
    expected = outputs(vanilla, fed)
    assert largest_difference(expected, outputs(model, fed)) < 1e-5
    mmgate.restore_attention(model)
    assert largest_difference(expected, outputs(model, fed)) == 0
    torch.manual_seed(7)
    mmgate.swap_attention(vanilla, RULES)
    assert all(torch.equal(p, loaded[name]) for name, p in mmgate.gate_parameters(vanilla).items())


def test_a_gated_checkpoint_comes_back(tmp_path: Path) -> None:
    model, fed = build('deformable_detr'), feed('deformable_detr')
    mmgate.swap_attention(model, RULES)
    moved(model)
    expected = outputs(model, fed)
    model.save_pretrained(tmp_path)
    again, info = from_pretrained(CLASS, tmp_path, RULES, output_loading_info=True)
    assert not info['missing_keys'] and not info['unexpected_keys']
    assert largest_difference(expected, outputs(again, fed)) == 0
    assert again.config.architectures == ['DeformableDetrForObjectDetection']
    vanilla = CLASS.from_pretrained(tmp_path)  # who has no mmgate reads it, too
    mmgate.restore_attention(again)
    assert largest_difference(outputs(vanilla, fed), outputs(again, fed)) == 0


def test_half_precision_and_gates_of_a_mixed_checkpoint(tmp_path: Path) -> None:
    model = build('deformable_detr')
    mmgate.swap_attention(model, RULES[0])
    model.save_pretrained(tmp_path)
    again, info = from_pretrained(CLASS, tmp_path, RULES, output_loading_info=True, dtype=torch.bfloat16)
    assert info['missing_keys'] and all('decoder' in name for name in info['missing_keys'])
    assert {parameter.dtype for parameter in again.parameters()} == {torch.bfloat16}
    assert all(parameter.isfinite().all() for parameter in again.parameters())
    mmgate.train_only_gates(again)


def test_a_class_for_several_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match='AutoModelForObjectDetection is no model'):
        from_pretrained(transformers.AutoModelForObjectDetection, tmp_path, RULES)

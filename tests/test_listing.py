"""The attention that a model has is listed, by the name that a rule takes."""

from __future__ import annotations

from mmcv.ops import MultiScaleDeformableAttention
from torch import nn

from mmgate import list_attention, swap_attention
from mmgate.listing import attention_modules


def test_inventory_names_every_attention() -> None:
    """Also one that no gate fits, and one module under each of its names."""
    shared = MultiScaleDeformableAttention(16, 4, 2, 3)
    model = nn.ModuleDict(dict(a=shared, b=nn.ModuleDict(dict(c=shared)), mha=nn.MultiheadAttention(16, 4)))
    assert [name for name, _ in attention_modules(model)] == ['a', 'b.c', 'mha']


def test_attention_is_listed_from_python() -> None:
    """Of any model: paths, sizes by the names of its package, and the gates that fit or that it has."""
    model = nn.ModuleDict(dict(layer=nn.TransformerEncoderLayer(16, 2, 32), other=nn.Linear(2, 2)))
    (found,) = list_attention(model)
    assert (found.path, found.class_name, found.gate) == ('layer.self_attn', 'MultiheadAttention', None)
    assert found.sizes == dict(embed_dim=16, num_heads=2, head_dim=8) and 'PLuGMultiheadAttention' in found.gates
    swap_attention(model, dict(path=found.path, type='PLuGMultiheadAttention'))
    (found,) = list_attention(model)
    assert (found.class_name, found.gate) == ('MultiheadAttention', 'PLuGGate')

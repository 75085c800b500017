"""Attentions of mmdet that are special: content and position apart, and two streams at once."""

from __future__ import annotations

import pytest
import torch
from helpers.backbones import trained
from helpers.families import PLUG, SDPA
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from torch import nn

from mmgate import gate_parameters, swap_attention


@pytest.mark.parametrize('cross_attn, is_first', [(False, False), (True, True), (True, False)])
def test_the_gate_of_conditional_attention_reads_positions(cross_attn: bool, is_first: bool) -> None:
    """Also without the projection that Conditional DETR's decoder removes from its later layers.

    A gate of queries or keys has a score for each channel of content and position.
    """
    attention = ConditionalAttention(32, 4, cross_attn=cross_attn)
    if cross_attn and not is_first:
        attention.qpos_proj = None
    model = trained(nn.ModuleDict(dict(attn=attention)))
    given = {name: torch.randn(2, 5, 32) for name in ('query', 'key', 'query_pos', 'key_pos', 'ref_sine_embed')}
    expected = attention(**given, is_first=is_first)
    swap_attention(model, dict(PLUG, path='attn'))
    read: list[torch.Tensor] = []
    for proj in (attention.gate.gate_q_proj, attention.gate.gate_k_proj):
        proj.register_forward_hook(lambda module, args, output: read.append(args[0]))
    torch.testing.assert_close(attention(**given, is_first=is_first), expected, rtol=1e-5, atol=1e-5)
    assert is_first or torch.equal(attention(**given), attention(**given, is_first=False))  # the host's default
    query, key = given['query'], given['query'] + given['query_pos']
    if cross_attn:
        query, key = query + given['ref_sine_embed'], given['key'] + given['key_pos']
    if is_first or not cross_attn:
        query = query + given['query_pos']
    torch.testing.assert_close(read[:2], [query, key])
    for position in ('G3', 'G4'):
        model = nn.ModuleDict(dict(attn=ConditionalAttention(32, 4, cross_attn=cross_attn)))
        swap_attention(model, dict(SDPA, path='attn', position=position, scale=2.0))
        assert model['attn'].gate.gate_weight.shape == (64 if cross_attn else 32, 32)


def test_both_directions_have_a_gate() -> None:
    model = nn.ModuleDict(dict(attn=BiMultiHeadAttention(16, 24, 64, 4)))
    swap_attention(model, dict(PLUG, path='attn'))
    assert {name.split('.')[2] for name in gate_parameters(model)} == {'vision', 'language'}

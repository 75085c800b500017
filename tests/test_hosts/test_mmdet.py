"""Attentions of mmdet that are special: content and position apart, and two streams at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.backbones import trained
from helpers.gated import GATES, gated_copy, learning
from mmdet.models.layers.transformer.utils import ConditionalAttention
from mmdet.models.utils.vlfuse_helper import BiMultiHeadAttention
from torch import nn

from mmgate import swap_attention


def conditional(cross_attn: bool) -> dict[str, Any]:
    names = ('query', 'key', 'query_pos', 'key_pos', 'ref_sine_embed')
    inputs: dict[str, Any] = {name: torch.randn(2, 7 if 'key' in name else 5, 32) for name in names}
    if cross_attn:
        inputs['key_padding_mask'] = torch.arange(7)[None] >= torch.tensor([[7], [4]])
    else:
        inputs['attn_mask'] = torch.ones(5, 5).triu(1).bool()
    return inputs


@pytest.mark.parametrize('gate', GATES)
@pytest.mark.parametrize('cross_attn, is_first', [(False, False), (True, True), (True, False)])
def test_conditional_attention_starts_as_the_vanilla_one(cross_attn: bool, is_first: bool, gate: str) -> None:
    """Masks included, and without the projection that Conditional DETR's decoder removes from its later layers."""
    attention = ConditionalAttention(32, 4, cross_attn=cross_attn)
    if cross_attn and not is_first:
        attention.qpos_proj = None
    model = trained(nn.ModuleDict(dict(attn=attention)))
    gated, _ = gated_copy(model, dict(GATES[gate], path='attn'))
    inputs = conditional(cross_attn)
    expected, actual = (m['attn'](**inputs, is_first=is_first) for m in (model, gated))
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    if not is_first:  # the host's default
        torch.testing.assert_close(gated['attn'](**inputs), actual)


@pytest.mark.parametrize('position', ['G3', 'G4'])
def test_a_gate_of_queries_or_keys_is_as_wide_as_content_and_position(position: str) -> None:
    """It has a score for each channel that is multiplied, and starts as the vanilla attention."""
    model = trained(nn.ModuleDict(dict(attn=ConditionalAttention(32, 4, cross_attn=True))))
    rule = dict(type='SDPAGatedMultiheadAttention', position=position, init='identity', scale=2.0, path='attn')
    gated, _ = gated_copy(model, rule)
    assert gated['attn'].gate.gate_weight.shape == (64, 32)
    inputs = conditional(True)
    expected = model['attn'](**inputs)
    torch.testing.assert_close(gated['attn'](**inputs), expected, rtol=1e-5, atol=1e-5)
    nn.init.normal_(gated['attn'].gate.gate_weight)
    assert not torch.allclose(gated['attn'](**inputs), expected, atol=1e-3)


def test_the_gate_of_conditional_attention_reads_positions() -> None:
    model = trained(nn.ModuleDict(dict(attn=ConditionalAttention(32, 4, cross_attn=True))))
    swap_attention(model, dict(GATES['plug'], path='attn', init='paper'))
    read = []
    for proj in (model['attn'].gate.gate_q_proj, model['attn'].gate.gate_k_proj):
        proj.register_forward_hook(lambda module, args, output: read.append(args[0]))
    inputs = conditional(True)
    model['attn'](**inputs, is_first=True)
    query = inputs['query'] + inputs['query_pos'] + inputs['ref_sine_embed']
    torch.testing.assert_close(read, [query, inputs['key'] + inputs['key_pos']])


@pytest.mark.parametrize('gate', ['plug', 'sdpa_G1'])
@pytest.mark.parametrize('mask', ['none', 'bool', 'float'])
def test_bidirectional_attention_starts_as_the_vanilla_one(mask: str, gate: str) -> None:
    """Widths of their own for vision, language and heads; masks as GLIP and as Grounding DINO hand them in."""
    model = trained(nn.ModuleDict(dict(attn=BiMultiHeadAttention(16, 24, 64, 4))))
    gated, _ = gated_copy(model, dict(GATES[gate], path='attn'))
    inputs: dict[str, Any] = dict(vision=torch.randn(2, 9, 16), lang=torch.randn(2, 5, 24))
    if mask != 'none':
        inputs['attention_mask_v'] = torch.arange(9)[None] >= torch.tensor([[9], [6]])
        lengths = torch.arange(5)[None] < torch.tensor([[5], [3]])
        inputs['attention_mask_l'] = lengths if mask == 'bool' else lengths.float()
    torch.testing.assert_close(gated['attn'](**inputs), model['attn'](**inputs), rtol=1e-5, atol=1e-5)
    sum(out.square().sum() for out in gated['attn'](**inputs)).backward()
    assert {name.partition('.gate.')[2].split('.')[0] for name in learning(gated)} == {'vision', 'language'}


def test_a_gate_after_a_narrower_projection_is_refused() -> None:
    model = nn.ModuleDict(dict(fusion=BiMultiHeadAttention(16, 24, 64, 4)))
    for rule, message in (
        (GATES['sdpa_G5'], 'goes from 64 to 16 channels'),
        (dict(type='DifferentialGatedMultiheadAttention'), 'acts after an output projection'),
    ):
        with pytest.raises(ValueError, match=message):
            swap_attention(model, dict(rule, path='fusion'))

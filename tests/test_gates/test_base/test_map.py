"""Attention over a map: its scale, its map in pre-training and at run time, and a checkpoint of another size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Sizes
from mmgate.gates import AgentAttention, SAGAAttention, SAGAGate, SoftmaxAttention
from mmgate.gates.base.linear import LinearGate
from mmgate.gates.base.map import MapAttention, pretraining_map

C, HEADS = 12, 3


def formula(layer: SoftmaxAttention, x: Tensor, scale: float) -> Tensor:
    """Return ``softmax(Q K^T scale) V`` of every head, projected."""
    query, key, value = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in layer.qkv(x).chunk(3, -1))
    heads = (query @ key.mT * scale).softmax(-1) @ value
    return layer.proj(heads.transpose(1, 2).flatten(2))


@pytest.mark.parametrize('class_tokens', [0, 2], ids=['map', 'class_tokens'])
@pytest.mark.parametrize('qk_scale', [None, 0.3], ids=['usual_scale', 'scale'])
def test_softmax_attention_is_its_formula(qk_scale: float | None, class_tokens: int) -> None:
    layer = SoftmaxAttention(C, HEADS, qk_scale=qk_scale, class_tokens=class_tokens).double()
    x = torch.randn(2, class_tokens + 3 * 5, C, dtype=torch.float64)
    torch.testing.assert_close(layer(x, (3, 5)), formula(layer, x, qk_scale or (C // HEADS) ** -0.5))


def test_softmax_attention_drops_weights_in_training_alone() -> None:
    layer = SoftmaxAttention(C, HEADS, attn_drop=0.5).double()
    x = torch.randn(1, 15, C, dtype=torch.float64)
    expected = formula(layer, x, (C // HEADS) ** -0.5)
    assert not torch.allclose(layer.train()(x, (3, 5)), expected)
    torch.testing.assert_close(layer.eval()(x, (3, 5)), expected)


TOLD = Sizes(8, 2, host_map=(14, 7), stride=16)


@pytest.mark.parametrize(
    'sizes, rule, size',
    [
        (TOLD, {}, (14, 7)),
        (TOLD, dict(image_size=384), (24, 24)),
        (TOLD, dict(image_size=(100, 33)), (7, 3)),
        (TOLD, dict(map_size=[3, 5]), (3, 5)),
        (TOLD, dict(map_size=(3, 5), image_size=384), (3, 5)),
        (Sizes(8, 2, host_map=(4, 4)), {}, (4, 4)),
        (Sizes(8, 2, stride=32), dict(image_size=224), (7, 7)),
        (Sizes(8, 2), dict(map_size=(2, 2)), (2, 2)),
    ],
    ids=str,
)
def test_the_rule_says_the_map_in_training_before_the_model(sizes: Sizes, rule: dict, size: tuple[int, int]) -> None:
    """A patch that an image does not fill counts, as in the hosts, which pad it."""
    assert pretraining_map(sizes, rule.get('map_size'), rule.get('image_size')) == size


@pytest.mark.parametrize(
    'sizes, rule, said',
    [
        (Sizes(8, 2, stride=16), {}, r'Write image_size=224 into .*image_size / 16'),
        (Sizes(8, 2), {}, r'around it tells its stride, for image_size. Write map_size=\(14, 14\)'),
        (Sizes(8, 2, host_map=(4, 4)), dict(image_size=384), 'tells its stride'),
        (TOLD, dict(image_size=(3, 4, 5)), r'image_size=\(3, 4, 5\) must be a height and a width'),
        (TOLD, dict(image_size=0), r'image_size\[0\]=0 must be an integer'),
    ],
    ids=str,
)
def test_a_map_that_nothing_tells_is_asked_for(sizes: Sizes, rule: dict, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as error:
        pretraining_map(sizes, rule.get('map_size'), rule.get('image_size'))
    assert isinstance(error.value, OptionError) == ('must be' not in said)


def test_position_encodings_are_where_the_paper_has_them_or_the_rule_says() -> None:
    for gate, default in ((SAGAGate, True), (LinearGate, False)):
        for options, expected in (({}, default), (dict(position_encoding=not default), not default)):
            made = gate(TOLD, **options)
            assert (made.position_encoding is not None) == (made.map_size is not None) == expected
    assert LinearGate(TOLD, image_size=32).map_size == LinearGate(TOLD, map_size=(2, 2)).map_size == (2, 2)
    assert SAGAGate(Sizes(8, 2), position_encoding=False).map_size is None


@pytest.mark.parametrize('size', [(7, 14), (4, 16), (8, 8)], ids=str)
def test_a_call_that_names_no_map_is_of_the_one_that_the_model_keeps(size: tuple[int, int]) -> None:
    """Not of the one in pre-training; other numbers of tokens are refused."""
    layer: Any = AgentAttention(8, 2, map_size=(3, 5), agent_num=4, window=4, class_tokens=0)
    x = torch.randn(2, size[0] * size[1], 8)
    with pytest.raises(ValueError, match='AgentGate was told no map: hand hw_shape to attend_gated'):
        layer.attend_gated(x)
    layer.gate.host_map = size
    assert torch.equal(layer.attend_gated(x), layer(x, size))
    said = rf'10 tokens are not the 0 \+ {size[0]} x {size[1]} of the image size that the model was built for'
    with pytest.raises(ValueError, match=said):
        layer.attend_gated(x[:, :10])


def test_attention_says_how_many_tokens_come_before_its_map() -> None:
    layer, x = MapAttention(8, 2, class_tokens=3), torch.randn(1, 3 + 4, 8)
    assert layer(x, (2, 2)).shape == x.shape
    with pytest.raises(ValueError, match='6 tokens do not make a map of 2 x 2 and 3 class tokens'):
        layer(x[:, 1:], (2, 2))
    assert SAGAAttention(8, 2, map_size=(2, 2), class_tokens=3).gate.class_tokens == 3
    with pytest.raises(ConfigError, match='class_tokens=-1 must be an integer'):
        MapAttention(8, 2, class_tokens=-1)


@pytest.mark.parametrize(
    'kind, options, said',
    [
        (SAGAAttention, {}, 'position_encoding resized to a map of (8, 8)'),
        (AgentAttention, {}, 'ah_bias, aw_bias, ha_bias, wa_bias resized to a map of (8, 8)'),
        (AgentAttention, dict(window=4), 'ah_bias, aw_bias, ha_bias, wa_bias resized to windows of (4, 4)'),
    ],
    ids=['positions', 'biases', 'windows'],
)
def test_what_is_resized_on_loading_is_logged(
    kind: Any, options: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr('mmgate.gates.base.map.log', logged.append)
    sizes = dict(agent_num=4) if kind is AgentAttention else {}
    small, large = kind(8, 2, map_size=(3, 3), **sizes), kind(8, 2, map_size=(8, 8), **sizes, **options)
    large.load_state_dict(large.state_dict())
    assert not logged
    large.load_state_dict(small.state_dict())
    assert logged == [f'gate: {said}']

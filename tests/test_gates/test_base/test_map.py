"""Attention over a map: its scale, its map in pre-training and at run time."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Sizes
from mmgate.gates import AgentAttention, SAGAAttention, SAGAGate
from mmgate.gates.base.map import MapAttention
from mmgate.gates.parts.resizing import resize_axis, resize_grid
from mmgate.gates.parts.stripes import merge_stripes, split_stripes
from mmgate.ops.agent import interpolation_matrix

TOLD = Sizes(8, 2, host_map=(14, 7), stride=16)


@pytest.mark.parametrize(
    'sizes, rule, size',
    [
        (TOLD, {}, (14, 7)),
        (TOLD, dict(image_size=(100, 33)), (7, 3)),
        (TOLD, dict(map_size=[3, 5], image_size=384), (3, 5)),
        (Sizes(8, 2, host_map=(4, 4)), {}, (4, 4)),
        (Sizes(8, 2, stride=32), dict(image_size=224), (7, 7)),
        (Sizes(8, 2, stride=16), {}, r'Write image_size=224 into .*image_size / 16'),
        (Sizes(8, 2), {}, r'around it tells its stride, for image_size. Write map_size=\(14, 14\)'),
        (Sizes(8, 2, host_map=(4, 4)), dict(image_size=384), 'tells its stride'),
        (TOLD, dict(image_size=(3, 4, 5)), r'image_size=\(3, 4, 5\) must be a height and a width'),
        (TOLD, dict(image_size=0), r'image_size\[0\]=0 must be an integer'),
    ],
    ids=str,
)
def test_the_rule_says_the_map_in_training_before_the_model(sizes: Sizes, rule: dict, size: Any) -> None:
    """A patch that an image does not fill counts, as in the hosts, which pad it; a map that nothing tells is named."""
    if isinstance(size, tuple):
        assert SAGAGate(sizes, **rule).map_size == size
        return
    with pytest.raises(ConfigError, match=size) as error:
        SAGAGate(sizes, **rule)
    assert isinstance(error.value, OptionError) == ('must be' not in size)


def test_a_call_that_names_no_map_is_of_the_one_that_the_model_keeps() -> None:
    """Not of the one in pre-training; other numbers of tokens are refused."""
    layer: Any = AgentAttention(8, 2, map_size=(3, 5), agent_num=4, window=4, class_tokens=0)
    x = torch.randn(2, 7 * 14, 8)
    with pytest.raises(ValueError, match='AgentGate was told no map: hand hw_shape to attend_gated'):
        layer.attend_gated(x)
    layer.gate.host_map = (7, 14)
    assert torch.equal(layer.attend_gated(x), layer(x, (7, 14)))
    with pytest.raises(ValueError, match=r'10 tokens are not the 0 \+ 7 x 14 of the image size that the model was'):
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
    'before, after, resized',
    [
        ((6, 10), (12, 20), True),
        ((12, 20), (25, 41), True),  # maps of strides that do not divide the image
        ((7, 7), (12, 20), True),
        ((4, 9), (6, 6), False),  # as many
        ((8, 18), (16, 36), False),  # or 12 x 12
        ((4, 6), (6, 7), False),
    ],
    ids=str,
)
def test_a_map_that_is_not_square_is_resized_where_its_shape_is_known(
    before: tuple[int, int], after: tuple[int, int], resized: bool
) -> None:
    """What may have two shapes, or is of neither, is not guessed at: loading it names its shape."""
    x = torch.randn(1, before[0] * before[1], 8)
    expected = F.interpolate(x.transpose(1, 2).unflatten(-1, before), size=after, mode='bilinear')
    actual = resize_grid(x, after)
    if resized:
        torch.testing.assert_close(actual, expected.flatten(2).transpose(1, 2))
    else:
        assert actual is x


def test_an_axis_that_is_resized_keeps_its_precision() -> None:
    half = torch.randn(2, 5, 3).half()
    assert resize_axis(half, 1, 9).dtype == torch.float16 and resize_axis(half, 1, 9).shape == (2, 9, 3)
    x = torch.randn(2, 5, 3, dtype=torch.float64)
    expected = torch.einsum('ij,ajb->aib', interpolation_matrix(5, 9, x), x)
    torch.testing.assert_close(resize_axis(x, 1, 9), expected)


@pytest.mark.parametrize('stripe', [(2, 2), (4, 1), (3, 5), (4, 6)], ids=str)
def test_stripes_of_a_map_merge_to_the_map(stripe: tuple[int, int]) -> None:
    x = torch.randn(2, 24, 3)
    stripes = split_stripes(x, (4, 6), stripe)
    assert torch.equal(merge_stripes(stripes, (4, 6), stripe), x)
    padded = F.pad(x.view(2, 4, 6, 3)[0], (0, 0, 0, 9, 0, 9))
    assert torch.equal(stripes[0], padded[: stripe[0], : stripe[1]].flatten(0, 1))

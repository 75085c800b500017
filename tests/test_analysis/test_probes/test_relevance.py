"""Rollout, maps of heads, CKA and sinks of whole models, on cases that are known by hand."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cv2
import numpy as np
import pytest
import torch
from conftest import needs_mmpretrain
from mmengine.structures import BaseDataElement
from torch import Tensor, nn

import mmgate
from mmgate.analysis.figures.maps import draw_maps
from mmgate.analysis.probes.attention import reads
from mmgate.analysis.probes.cka import attention_cka
from mmgate.analysis.probes.layers import sinks
from mmgate.analysis.probes.recording import class_tokens
from mmgate.analysis.probes.relevance import head_maps, head_mean, record_maps, relevance_map
from mmgate.errors import ConfigError

SIDE = 3
TOKENS = 1 + SIDE**2


class Given(nn.Module):
    """An attention whose weights ``(images, B, H, N, M)`` are given."""

    def __init__(self, weights: Tensor, geometry: tuple[int, ...] | None = None) -> None:
        super().__init__()
        self.weights, self.geometry = weights, geometry

    def forward(self, image: int) -> None:
        """Attend to nothing."""


class Placed(Given):
    """Likewise, and where it lies."""


for kind in ('Given', 'Placed'):
    places = {'geometry': lambda module, given: torch.tensor(module.geometry)} if kind == 'Placed' else {}
    reads(f'{__name__.split(".")[0]}.{kind}', attention=lambda module, given: module.weights[given['image']], **places)


class Layer(nn.Module):
    """An attention; the hidden states after it are ``states``."""

    def __init__(self, attn: nn.Module, states: Tensor) -> None:
        super().__init__()
        self.attn, self.states = attn, states

    def forward(self, image: int) -> Tensor:
        self.attn(image)
        return self.states


class Model(nn.Module):
    """Layers of given attention, with a class token or without."""

    def __init__(self, *layers: nn.Module, class_token: bool = True) -> None:
        super().__init__()
        self.layers, self.cls_token = nn.ModuleList(layers), nn.Parameter(torch.zeros(1)) if class_token else None

    def test_step(self, batch: dict[str, int]) -> list[Any]:
        for layer in self.layers:
            layer(batch['image'])
        return [SimpleNamespace(get=dict(img_shape=(9, 9)).get, img_shape=(9, 9))]


def batches(count: int) -> list[dict[str, int]]:
    return [dict(image=image) for image in range(count)]


def attention(*shape: int) -> Tensor:
    return torch.randn(*shape).softmax(-1)


@pytest.mark.parametrize('images', [8, 1032], ids=['one block', 'two blocks'])
def test_layers_of_one_class_token_row_have_a_cka_of_one(images: int) -> None:
    """Whatever their other rows are."""
    one, other, unrelated = (attention(images, 1, 2, TOKENS, TOKENS) for _ in range(3))
    other[..., 0, :] = one[..., 0, :]
    model = Model(Given(one), Given(other), Given(unrelated))
    paths, found = attention_cka(model, batches(images))
    assert paths == ['layers.0', 'layers.1', 'layers.2']
    assert found[0, 1] == pytest.approx(1) and np.diag(found) == pytest.approx(1)
    assert abs(found[0, 2]) < (0.9 if images == 8 else 0.1)


def test_cka_without_a_class_token_is_of_the_mean_query() -> None:
    one, other = (attention(8, 1, 2, SIDE**2, SIDE**2) for _ in range(2))
    other += (one - other).mean(-2, keepdim=True)
    found = attention_cka(Model(Given(one), Given(other), class_token=False), batches(8))[1]
    assert found[0, 1] == pytest.approx(1)


def test_cka_refuses_what_has_no_samples() -> None:
    with pytest.raises(ConfigError, match='needs 4 images or more, got 3'):
        attention_cka(Model(Given(attention(3, 1, 2, TOKENS, TOKENS))), batches(3))


@pytest.mark.parametrize(('first', 'sink'), [(0, 0), (0.2, 4)], ids=['the first', 'another'])
def test_first_token_score_beside_the_most_attended(first: float, sink: int) -> None:
    """Known shares: 0.6 on the sink, and what is said on the first token; 7 is the first token's activation."""
    weights = torch.full((1, 1, 2, TOKENS, TOKENS), 0.0)
    weights[..., 0] = first
    weights[..., sink] = 0.6
    weights[..., 7] += 0.4 - first
    states = torch.ones(1, TOKENS, 4)
    states[0, 0, 1], states[0, 3, 2] = -7, 50
    (found,) = sinks(Model(Layer(Given(weights), states)), batches(1))
    assert found['sink_share'] == pytest.approx(0.6)
    assert found['first_token_share'] == pytest.approx(0.6 if sink == 0 else 0.2)
    assert (found['maximum_activation'], found['first_token_activation']) == (50, 7)
    (without,) = sinks(Model(Layer(Given(weights), states), class_token=False), batches(1))
    assert np.isnan([without['first_token_share'], without['first_token_activation']]).all()
    assert without['sink_share'] == found['sink_share'] and without['uniform'] == pytest.approx(1 / TOKENS)


def test_each_window_has_its_own_sink() -> None:
    """Four windows, each with all attention of a head on another key; what has become infinite is not nothing."""
    weights = torch.full((1, 4, 2, TOKENS, TOKENS), 1 / TOKENS)
    weights[0, :, 0] = torch.eye(TOKENS)[:4, None]
    (found,) = sinks(Model(Layer(Given(weights), torch.full((1, TOKENS, 4), torch.inf)), class_token=False), batches(1))
    assert found['largest_head_share'] == 1 and found['sink_share'] == pytest.approx(0.5 + 0.5 / TOKENS)
    assert found['maximum_activation'] == torch.inf


def test_class_tokens_join_where_they_join() -> None:
    """T2T-ViT's first attentions have none; DeiT's distillation token is one more."""
    model = nn.ModuleDict(dict(backbone=Model(), neck=nn.Identity()))
    keys = {'backbone.tokens.0': 64, 'backbone.layers.0': 17, 'backbone.layers.1': 17, 'neck': 17}
    assert class_tokens(model, keys) == {'backbone.layers.0': 1, 'backbone.layers.1': 1}
    model['backbone'].num_extra_tokens = 2
    assert set(class_tokens(model, keys).values()) == {2}
    model['backbone'].with_cls_token = False  # mmseg's ViT keeps the parameter
    assert not class_tokens(model, keys)


def test_heads_that_disagree_cancel_out_but_by_their_sizes() -> None:
    """Signed, their mean is 0 throughout; by its size each has a share."""
    signed = torch.tensor([[0.75, -0.25], [-0.75, 0.25]])[None, :, None].expand(1, 2, 2, 2)
    assert head_mean(signed, absolute=True).unique().tolist() == [0.25, 0.75]
    assert head_mean(signed).unique().tolist() == [0]


def test_rollout_of_signed_maps_is_signed() -> None:
    """The class token's row, two layers deep, with the sizes of each head's rows summing to 1."""
    weights = [attention(1, 1, 2, TOKENS, TOKENS) - attention(1, 1, 2, TOKENS, TOKENS) for _ in range(2)]
    model = Model(*(Given(x) for x in weights))
    with record_maps(model) as recording:
        model.test_step(dict(image=0))
    found = relevance_map(recording, (9, 9))
    shares = [(x[0, 0] / x[0, 0].abs().sum(-1, keepdim=True)).mean(0) for x in weights]
    first, last = (0.5 * (x + torch.eye(TOKENS)) for x in shares)
    expected = (last @ first)[0, 1:]
    torch.testing.assert_close(found.flatten(), expected / expected.abs().sum())
    assert found.min() < 0 < found.max()
    with record_maps(model, partial(head_mean, absolute=True)) as recording:
        model.test_step(dict(image=0))
    assert relevance_map(recording, (9, 9)).min() >= 0


def test_inhibition_has_its_own_colour(tmp_path: Path) -> None:
    """An excited map is red throughout, an inhibited one blue, on an image without colours."""
    cv2.imwrite(str(tmp_path / 'image.png'), np.full((40, 40, 3), 128, np.uint8))
    sample = BaseDataElement(metainfo=dict(img_path=str(tmp_path / 'image.png'), img_shape=(40, 40)))
    maps = [('excited', np.ones((4, 4))), ('inhibited', -np.ones((4, 4)))]
    picture = cv2.imread(str(draw_maps(sample, maps, tmp_path / 'maps.png', columns=3, label='attention'))).astype(int)
    redness = (picture[..., 2] - picture[..., 0])[:, : picture.shape[1] * 4 // 5]  # left of the scale
    half = redness.shape[1] * 2 // 3
    assert redness[:, :half].max() > 50 and redness[:, :half].min() > -20 and redness[:, half:].min() < -50


def test_maps_of_heads_keep_their_signs() -> None:
    """The class token's row of each head, inhibition below 0."""
    weights = attention(1, 1, 2, TOKENS, TOKENS)
    weights[:, :, 1] *= -1
    path, maps, _ = head_maps(Model(Given(weights), Given(-weights)), dict(image=0), layer=0)
    assert path == 'layers.0' and maps.shape == (2, SIDE, SIDE)
    np.testing.assert_array_equal(maps, weights[0, 0, :, 0, 1:].view(2, SIDE, SIDE))
    assert maps[0].min() > 0 > maps[1].max()
    with pytest.raises(ConfigError, match='--layer 2: Model has 2 attentions over an image'):
        head_maps(Model(Given(weights), Given(-weights)), dict(image=0), layer=2)


def test_maps_of_heads_in_windows_lie_where_they_are() -> None:
    """Four windows of 2 x 2; each attends to its own first token, which the second head inhibits."""
    weights = torch.zeros(1, 4, 2, 4, 4)
    weights[:, :, 0, :, 0], weights[:, :, 1, :, 0] = 1, -1
    _, maps, _ = head_maps(Model(Placed(weights, (4, 4, 2, 0)), class_token=False), dict(image=0))
    expected = np.zeros((4, 4))
    expected[::2, ::2] = 1
    np.testing.assert_array_equal(maps, [expected, -expected])


def tiny_vit() -> nn.Module:
    from mmpretrain.models import TinyViT

    arch = dict(channels=[8, 16, 16, 16], num_heads=[1, 2, 2, 2], depths=[1, 1, 2, 1])
    return TinyViT(arch, img_size=(64, 64), window_size=[4, 3, 4, 2], out_indices=(3,), drop_path_rate=0.0)


def gc_vit() -> nn.Module:
    from timm.models.gcvit import GlobalContextVit

    return GlobalContextVit(
        img_size=64, window_size=(4, 4, 2, 2), embed_dim=8, depths=(2, 2, 1, 1), num_heads=(1, 2, 2, 2)
    )


def swin() -> nn.Module:
    from mmpretrain.models import SwinTransformer

    arch = dict(embed_dims=8, depths=[2, 2], num_heads=[1, 2])
    return SwinTransformer(arch, img_size=64, window_size=4, out_indices=(1,))


@needs_mmpretrain
@pytest.mark.parametrize('gate', ['PLuGMultiheadAttention', 'SDPAGatedMultiheadAttention'])
@pytest.mark.parametrize('make', [tiny_vit, gc_vit, swin], ids=lambda make: make.__name__)
def test_rollout_through_the_windows_of_classifiers(make: Any, gate: str) -> None:
    """Every window is found, gated or not; a start that is the vanilla one has the vanilla map."""
    maps = []
    for gated in (False, True):
        torch.manual_seed(0)
        model = make()
        for parameter in model.parameters():
            nn.init.normal_(parameter, std=0.3)
        if gated:
            mmgate.swap_attention(model, dict(path='**', type=gate))
        model.eval()
        torch.manual_seed(1)
        with record_maps(model) as recording, torch.no_grad():
            model(torch.randn(1, 3, 64, 64))
        weights = [x for of in recording.values() if 'attention' in of for x in of['attention'].tensors]
        for x in weights:
            torch.testing.assert_close(x.sum(-1), torch.ones(x.shape[:-1]))
        maps.append(relevance_map(recording, (64, 64)))
        assert float(maps[-1].sum()) == pytest.approx(1, abs=1e-4) and maps[-1].min() >= 0
    assert maps[0].shape == {'tiny_vit': (8, 8)}.get(make.__name__, (16, 16)) and maps[0].std() > 0
    if gate == 'PLuGMultiheadAttention':
        torch.testing.assert_close(maps[1], maps[0], rtol=1e-3, atol=1e-6)

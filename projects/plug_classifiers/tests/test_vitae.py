"""ViTAE against its formulas: Performer attention, both cells, maps of any size."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip('mmpretrain', reason="ViTAE has mmpretrain's attention, which is not installed")

from projects.plug_classifiers.vitae import ViTAE, _Performer

SMALL = dict(conv_dims=(8, 8, 16), embed_dims=(16, 16, 32), depths=(1, 0, 2), num_heads=2, groups=8)


def backbone(**options: Any) -> Any:
    model = ViTAE(**{**SMALL, **options})
    model.init_weights()
    return model


def performer(state: dict[str, Tensor], x: Tensor) -> Tensor:
    """By the N x N products of features, as the paper defines them."""
    key, query, value = F.linear(x, state['kqv.weight'], state['kqv.bias']).chunk(3, -1)

    def features(tokens: Tensor) -> Tensor:
        return (tokens @ state['rows'].T - tokens.square().sum(-1, keepdim=True) / 2).exp()

    products = features(query) @ features(key).transpose(-1, -2)
    heads = products / products.sum(-1, keepdim=True) @ value
    return value + F.linear(heads, state['proj.weight'], state['proj.bias'])


@torch.no_grad()
def test_performer_is_its_formula() -> None:
    attention = _Performer(12, 16).double().eval()
    rows = attention.rows
    torch.testing.assert_close(rows @ rows.T, 8 * torch.eye(8).double(), rtol=1e-5, atol=1e-5)
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    torch.testing.assert_close(attention(x), performer(attention.state_dict(), x), rtol=1e-4, atol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.to(dtype)(100 * x.to(dtype)).isfinite().all()


def part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {key.removeprefix(prefix): value for key, value in state.items() if key.startswith(prefix)}


def convolve(own: dict[str, Tensor], name: str, x: Tensor, **options: Any) -> Tensor:
    return F.conv2d(x, own[f'{name}.weight'], own[f'{name}.bias'], **options)


def normalise(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    of_name = [own[f'{name}.{kind}'] for kind in ('running_mean', 'running_var', 'weight', 'bias')]
    return F.batch_norm(x, *of_name)


def layer_norm(own: dict[str, Tensor], name: str, x: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, x.shape[-1:], own[f'{name}.weight'], own[f'{name}.bias'], eps)


def linear(own: dict[str, Tensor], name: str, x: Tensor) -> Tensor:
    return F.linear(x, own[f'{name}.weight'], own[f'{name}.bias'])


def tokens_of(grid: Tensor) -> Tensor:
    return grid.flatten(2).transpose(1, 2)


def plain(state: dict[str, Tensor], x: Tensor) -> list[Tensor]:
    """ViTAE from its parameters: maps of the three stages; images whose sides are multiples of 16."""
    maps = []
    for stage, (paddings, factor, strides) in enumerate(
        (
            ((2, 5, 8, 11), 4, (2, 2, 1)),
            ((1, 2, 3), 2, (2, 1, 1)),
            ((1, 2), 2, None),
        )
    ):
        own = part(state, f'stages.{stage}.0.')
        convolved = [
            F.gelu(convolve(own, f'pyramid.{i}.0', x, stride=factor, padding=padding, dilation=i + 1))
            for i, padding in enumerate(paddings)
        ]
        joint = torch.cat(convolved, 1)
        if strides:
            y = F.silu(convolve(own, 'branch.0', x, stride=strides[0], padding=1))
            y = F.silu(normalise(own, 'branch.3', convolve(own, 'branch.2', y, stride=strides[1], padding=1)))
            y = F.silu(convolve(own, 'branch.5', y, stride=strides[2], padding=1))
            tokens = performer(part(own, 'attn.'), layer_norm(own, 'norm1', tokens_of(joint), 1e-5)) + tokens_of(y)
            hidden = F.gelu(linear(own, 'mlp.0', layer_norm(own, 'norm2', tokens, 1e-5)))
            tokens = tokens + linear(own, 'mlp.2', hidden)
            joint = tokens.transpose(1, 2).unflatten(-1, joint.shape[2:])
        x = joint
        for cell in range(SMALL['depths'][stage]):  # type: ignore[index]
            own, groups = part(state, f'stages.{stage}.{cell + 1}.'), 8
            y = F.silu(normalise(own, 'branch.1', convolve(own, 'branch.0', x, padding=1, groups=groups)))
            y = F.silu(normalise(own, 'branch.4', convolve(own, 'branch.3', y, padding=1, groups=groups)))
            y = F.silu(convolve(own, 'branch.6', y, padding=1, groups=groups))
            tokens = tokens_of(x)
            joint = linear(own, 'attn.qkv', layer_norm(own, 'norm1', tokens, 1e-6))
            q, k, v = joint.unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
            heads = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).softmax(-1) @ v
            tokens = tokens + linear(own, 'attn.proj', heads.transpose(1, 2).flatten(2)) + tokens_of(y)
            hidden = F.gelu(linear(own, 'ffn.layers.0.0', layer_norm(own, 'norm2', tokens, 1e-6)))
            x = (tokens + linear(own, 'ffn.layers.1', hidden)).transpose(1, 2).unflatten(-1, x.shape[2:])
        maps.append(x)
    return maps


@torch.no_grad()
def test_forward_is_its_formula() -> None:
    model = backbone(out_indices=(0, 1, 2)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    x = torch.randn(2, 3, 48, 80, dtype=torch.float64)
    expected = plain(model.state_dict(), x)
    assert [tuple(found.shape) for found in expected] == [(2, 16, 12, 20), (2, 16, 6, 10), (2, 32, 3, 5)]
    for found, wanted in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert found.is_contiguous()


@torch.no_grad()
@pytest.mark.parametrize('size', [(33, 50), (64, 30), (16, 17)], ids=str)
def test_images_of_any_size(size: tuple[int, int]) -> None:
    """Padded below and at the right to a multiple of each stage's factor."""
    model = backbone(out_indices=(0, 1, 2)).eval()
    sides = [tuple(-(-side // stride) for side in size) for stride in (4, 8, 16)]
    x = torch.randn(1, 3, *size)
    found = model(x)
    assert [tuple(grid.shape[2:]) for grid in found] == sides
    padded = F.pad(x, (0, -size[1] % 4, 0, -size[0] % 4))
    torch.testing.assert_close(found[0], model(padded)[0])


@pytest.mark.parametrize('arch, parameters, heads', [('tiny', 4_882_792, 4), ('small', 24_009_096, 6)])
def test_parameters_and_heads_are_as_many_as_published(arch: str, parameters: int, heads: int) -> None:
    """With a classifier of 1000 classes, as counted from the authors' public code; their paper prints 4.8 M for T."""
    model = ViTAE(arch)
    attention = model.stages[2][1].attn
    channels = attention.embed_dims
    assert attention.num_heads == heads
    assert sum(parameter.numel() for parameter in model.parameters()) + 1000 * (channels + 1) == parameters


def test_drop_path_rises_over_the_normal_cells() -> None:
    model = backbone(drop_path_rate=0.2)
    cells = [cell for stage in model.stages for cell in stage[1:]]
    for rates in (
        [cell.drop_path.drop_prob for cell in cells],
        [cell.attn.out_drop.drop_prob for cell in cells],
        [cell.ffn.dropout_layer.drop_prob for cell in cells],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    'options, message',
    [
        (dict(arch='huge'), "arch='huge' is unknown; choose one of tiny, small"),
        (dict(depths=(1, 1)), 'depths=.* needs one value for each of the 3 stages'),
        (dict(out_indices=(3,)), 'must lie in 0 to 2'),
        (dict(embed_dims=(16, 16, 48)), 'must end with 32, 2 times the last of conv_dims'),
    ],
    ids=['arch', 'stages', 'outputs', 'channels'],
)
def test_what_does_not_fit_says_so(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backbone(**options)

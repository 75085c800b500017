"""LV-ViT and ViTAE: their formulas, sizes, labels of tokens, and PLuG in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip('mmpretrain', reason='the classifiers are built on mmpretrain, which is not installed')

from conftest import filled
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmpretrain.models.backbones import VisionTransformer
from mmpretrain.registry import TRANSFORMS
from mmpretrain.structures import DataSample

from projects.plug_classifiers import LVViT, TokenLabelHead, ViTAE
from projects.plug_classifiers.vitae import _Performer

CONFIGS = Path(__file__).parents[1] / 'configs'
C, CLASSES = 24, 5
LABELS = dict(type='LabelSmoothLoss', label_smooth_val=0.0)  # takes labels and shares of classes
SMALL: dict[Any, dict[str, Any]] = {
    LVViT: dict(embed_dims=C, num_layers=2, num_heads=4, img_size=64),
    ViTAE: dict(conv_dims=(8, 8, 16), embed_dims=(16, 16, 32), depths=(1, 0, 2), num_heads=2, groups=8),
}
CONFIGURED: dict[str, dict[str, Any]] = {
    'lvvit-t_8xb128-300e_in1k': dict(num_layers=2, img_size=64, drop_path_rate=0.0),
    'vitae-t_4xb128-300e_in1k': dict(depths=(0, 0, 2), drop_path_rate=0.0),
}


def backbone(kind: Any = LVViT, **options: Any) -> Any:
    model = kind(**{**SMALL[kind], **options})
    model.init_weights()
    return model


def head(**options: Any) -> Any:
    init_default_scope('mmpretrain')
    return filled(TokenLabelHead(CLASSES, C, loss=LABELS, **options), 0.5)


def lv_vit(model: Any, x: Tensor, divisor: float) -> Tensor:
    """LV-ViT from its parameters: convolutions before mmpretrain's ViT, whose branches end with divided layers."""
    state = model.state_dict()
    for i, (stride, padding) in zip((0, 3, 6), ((2, 3), (1, 1), (1, 1)), strict=True):
        x = F.conv2d(x, state.pop(f'stem.{i}.weight'), stride=stride, padding=padding)
        norm = [state.pop(f'stem.{i + 1}.{name}') for name in ('running_mean', 'running_var', 'weight', 'bias')]
        x = F.batch_norm(x, *norm).relu()
    sizes = dict(embed_dims=C, num_layers=2, num_heads=4, feedforward_channels=3 * C)
    options: dict[str, Any] = dict(in_channels=64, patch_size=8, out_type='raw', qkv_bias=False)
    theirs = VisionTransformer(sizes, img_size=32, norm_cfg=dict(type='LN'), **options).to(x.dtype)
    theirs.eval()  # returns nothing
    for key in theirs.state_dict():
        if '.attn.proj.' in key or '.ffn.layers.1.' in key:
            state[key] = state[key] / divisor
    theirs.load_state_dict({key: value for key, value in state.items() if not key.startswith('stem.')})
    return theirs(x)[0]


@torch.no_grad()
@pytest.mark.parametrize('arch, divisor', [('tiny', 1), ('small', 2)])
def test_lv_vit_is_its_formula(arch: str, divisor: int) -> None:
    model = filled(backbone(arch=arch), 0.3).double()
    model.eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model(x)[0], lv_vit(model, x, divisor), rtol=1e-9, atol=1e-9)
    classes = backbone(arch=arch, out_type='cls_token').double()
    classes.load_state_dict(model.state_dict())
    classes.eval()
    torch.testing.assert_close(classes(x)[0], model(x)[0][:, 0])


@torch.no_grad()
def test_lv_vit_of_another_size() -> None:
    """A patch for every 16 pixels begun, each with a position of the map, resized as mmpretrain's ViT does."""
    model = filled(backbone(), 0.3)
    model.eval()
    assert model(torch.rand(1, 3, 97, 33))[0].shape[1] - 1 == 7 * 3
    x = torch.randn(1, 3, 96, 48)
    torch.testing.assert_close(model(x)[0], lv_vit(model, x, 1), rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_mixed_tokens_are_another_images_and_go_back() -> None:
    """In a box, in training alone; what no layer changes is in the end as without."""
    model = filled(backbone(mix_token=True), 0.3)
    for layer in model.layers:
        for branch in (layer.attn.proj, layer.ffn.layers[1]):
            nn.init.zeros_(branch.weight)
            nn.init.zeros_(branch.bias)
    entered: list[Tensor] = []
    model.layers[0].register_forward_pre_hook(lambda layer, args: entered.append(args[0]))
    x = torch.randn(4, 3, 96, 64)
    model.mix_token = False
    (expected,) = model(x)
    model.mix_token = True
    shares = set()
    for seed in range(4):
        np.random.seed(seed)
        ((tokens, share),) = model(x)
        torch.testing.assert_close(tokens, expected, rtol=1e-4, atol=1e-5)
        own, other = entered[0], entered[0].flip(0)
        theirs = (entered[-1] - own).abs().amax((0, 2)) > 1e-4  # (1 + N)
        torch.testing.assert_close(entered[-1][:, theirs], other[:, theirs], rtol=1e-4, atol=1e-4)
        rows, columns = theirs[1:].unflatten(0, (6, 4)).nonzero().unbind(1)
        box = (rows.max() - rows.min() + 1) * (columns.max() - columns.min() + 1) if len(rows) else 0
        assert not theirs[0] and len(rows) == box and share == pytest.approx(1 - len(rows) / 24)
        shares.add(share)
    assert len(shares) > 1
    model.eval()
    assert isinstance(model(x)[0], Tensor)


def entropy(scores: Tensor, target: Tensor) -> Tensor:
    """Of every row, for labels or for shares of the classes."""
    shares = F.one_hot(target, CLASSES) if target.dtype == torch.long else target
    return -(shares * scores.log_softmax(-1)).sum(-1)


@pytest.mark.parametrize('share', [1.0, 0.75])
@pytest.mark.parametrize('kind', ['labels', 'scores', 'labels of tokens'])
def test_loss_is_its_formula(kind: str, share: float) -> None:
    model, tokens = head(token_weight=0.5), torch.randn(3, 1 + 6, C)
    labels = torch.tensor([4, 0, 2])
    samples = [DataSample().set_gt_label(int(label)) for label in labels]
    target, of_tokens = labels, labels[:, None].expand(3, 6)
    if kind == 'scores':
        target = torch.rand(3, CLASSES).softmax(-1)
        of_tokens = target[:, None].expand(3, 6, CLASSES)
        for sample, score in zip(samples, target, strict=True):
            sample.set_gt_score(score)
    elif kind == 'labels of tokens':
        of_tokens = torch.randn(3, 6, CLASSES).softmax(-1)
        for sample, scores in zip(samples, of_tokens, strict=True):
            sample.set_field(scores, 'gt_token_score')
    losses = model.loss(((tokens, share) if share < 1 else tokens,), samples)
    classes = model.layers.head(tokens[:, 0])
    expected = share * entropy(classes, target).mean() + (1 - share) * entropy(classes, target.flip(0)).mean()
    torch.testing.assert_close(losses['loss_cls'], expected)
    every = entropy(model.token_head(tokens[:, 1:]), of_tokens)
    torch.testing.assert_close(losses['loss_token'], 0.5 * every.mean())
    assert set(losses) == {'loss_cls', 'loss_token'}


def test_config_lets_labels_of_tokens_pass() -> None:
    """From the results of a pipeline, arrays as well, to the loss."""
    cfg = Config.fromfile(CONFIGS / 'vanilla/lvvit-t_8xb128-300e_in1k.py')
    pack = TRANSFORMS.build(cfg.train_dataloader.dataset.pipeline[-1])
    scores, image = np.random.rand(6, CLASSES).astype('float32'), np.zeros((32, 48, 3), dtype='uint8')
    packed = [pack.transform(dict(img=image, gt_label=1, gt_token_score=scores)) for _ in range(2)]
    samples = [result['data_samples'] for result in packed]
    model, tokens = head(), torch.randn(2, 1 + 6, C)
    expected = entropy(model.token_head(tokens[:, 1:]), torch.from_numpy(scores)).mean()
    torch.testing.assert_close(model.loss((tokens,), samples)['loss_token'], expected)


def test_prediction_asks_every_token() -> None:
    model, tokens = head(), torch.randn(3, 1 + 6, C)
    expected = (
        model.layers.head(tokens[:, 0])
        + 0.5 * torch.stack([model.token_head(tokens[:, i]) for i in range(1, 7)]).max(0)[0]
    )
    torch.testing.assert_close(model((tokens,)), expected)
    (sample, *_) = model.predict((tokens,))
    torch.testing.assert_close(sample.pred_score, expected[0].softmax(-1))


def test_stem_learns_as_slowly_as_the_patches() -> None:
    """By mmpretrain's rates for depths; a frozen model keeps it as it is."""
    model = backbone(frozen_stages=1)
    for prefix in ('', 'backbone.'):
        assert model.get_layer_depth(f'{prefix}stem.0.weight', prefix) == (0, 4)
        assert model.get_layer_depth(f'{prefix}layers.1.ln1.weight', prefix) == (2, 4)
    assert not any(parameter.requires_grad for parameter in model.stem.parameters())


@torch.no_grad()
def test_performer_is_its_formula() -> None:
    """By the N x N products of features, as the paper defines them."""
    attention = _Performer(12, 16).double().eval()
    rows = attention.rows
    torch.testing.assert_close(rows @ rows.T, 8 * torch.eye(8).double(), rtol=1e-5, atol=1e-5)
    x = torch.randn(2, 20, 12, dtype=torch.float64)
    key, query, value = attention.kqv(x).chunk(3, -1)
    of_query, of_key = ((t @ rows.T - t.square().sum(-1, keepdim=True) / 2).exp() for t in (query, key))
    products = of_query @ of_key.mT
    heads = products / products.sum(-1, keepdim=True) @ value
    torch.testing.assert_close(attention(x), value + attention.proj(heads), rtol=1e-4, atol=1e-5)
    for dtype in (torch.float32, torch.bfloat16):
        assert attention.to(dtype)(100 * x.to(dtype)).isfinite().all()


def tokens_of(grid: Tensor) -> Tensor:
    return grid.flatten(2).transpose(1, 2)


def network(first: nn.Module, second: nn.Module, tokens: Tensor) -> Tensor:
    return second(F.gelu(first(tokens)))


def convolved(branch: nn.Sequential, x: Tensor, strides: tuple[int, int, int], groups: int = 1) -> Tensor:
    """By three convolutions of 3 x 3, norms and SiLU; images whose sides are multiples of 16."""
    remaining = iter(strides)
    for layer in branch:
        if isinstance(layer, nn.Conv2d):
            x = F.conv2d(x, layer.weight, layer.bias, next(remaining), 1, groups=groups)
        else:
            x = layer(x) if isinstance(layer, nn.BatchNorm2d) else F.silu(x)
    return x


def vitae(model: Any, x: Tensor) -> list[Tensor]:
    """ViTAE from its layers: maps of the three stages; mmpretrain's attention and Performer have tests of their own."""
    maps = []
    cells = (
        ((2, 5, 8, 11), 4, (2, 2, 1)),
        ((1, 2, 3), 2, (2, 1, 1)),
        ((1, 2), 2, None),
    )
    for (reduction, *normal), (paddings, factor, strides) in zip(model.stages, cells, strict=True):
        joint = torch.cat(
            [
                F.gelu(F.conv2d(x, layer.weight, layer.bias, factor, padding, dilation))
                for dilation, ((layer, _), padding) in enumerate(zip(reduction.pyramid, paddings, strict=True), 1)
            ],
            1,
        )
        if strides:
            tokens = reduction.attn(reduction.norm1(tokens_of(joint)))
            tokens = tokens + tokens_of(convolved(reduction.branch, x, strides))
            tokens = tokens + network(reduction.mlp[0], reduction.mlp[2], reduction.norm2(tokens))
            joint = tokens.transpose(1, 2).unflatten(-1, joint.shape[2:])
        x = joint
        for cell in normal:
            assert cell.norm1.eps == cell.norm2.eps == 1e-6
            tokens = tokens_of(x)
            tokens = tokens + cell.attn(cell.norm1(tokens)) + tokens_of(convolved(cell.branch, x, (1, 1, 1), groups=8))
            tokens = tokens + network(cell.ffn.layers[0][0], cell.ffn.layers[1], cell.norm2(tokens))
            x = tokens.transpose(1, 2).unflatten(-1, x.shape[2:])
        maps.append(x)
    return maps


@torch.no_grad()
def test_vitae_is_its_formula() -> None:
    model = backbone(ViTAE, out_indices=(0, 1, 2)).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.15)
    x = torch.randn(2, 3, 48, 80, dtype=torch.float64)
    expected = vitae(model, x)
    assert [tuple(found.shape) for found in expected] == [(2, 16, 12, 20), (2, 16, 6, 10), (2, 32, 3, 5)]
    for found, wanted in zip(model(x), expected, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert found.is_contiguous()


@torch.no_grad()
@pytest.mark.parametrize('size', [(33, 50), (64, 30), (16, 17)], ids=str)
def test_vitae_of_any_size(size: tuple[int, int]) -> None:
    """Padded below and at the right to a multiple of each stage's factor."""
    model = backbone(ViTAE, out_indices=(0, 1, 2)).eval()
    sides = [tuple(-(-side // stride) for side in size) for stride in (4, 8, 16)]
    x = torch.randn(1, 3, *size)
    found = model(x)
    assert [tuple(grid.shape[2:]) for grid in found] == sides
    padded = F.pad(x, (0, -size[1] % 4, 0, -size[0] % 4))
    torch.testing.assert_close(found[0], model(padded)[0])


def test_drop_path_rises_over_the_normal_cells() -> None:
    model = backbone(ViTAE, drop_path_rate=0.2)
    cells = [cell for stage in model.stages for cell in stage[1:]]
    for rates in (
        [cell.drop_path.drop_prob for cell in cells],
        [cell.attn.out_drop.drop_prob for cell in cells],
        [cell.ffn.dropout_layer.drop_prob for cell in cells],
    ):
        assert rates == pytest.approx([0.0, 0.1, 0.2])


@pytest.mark.parametrize(
    'kind, arch, parameters, heads',
    [
        (LVViT, 'tiny', 8.53, 4),
        (LVViT, 'small', 26.15, 6),
        (LVViT, 'medium', 55.83, 8),
        (ViTAE, 'tiny', 4.882792, 4),
        (ViTAE, 'small', 24.009096, 6),
    ],
)
def test_parameters_and_heads_are_as_many_as_published(kind: Any, arch: str, parameters: float, heads: int) -> None:
    """In millions, with LV-ViT's two classifiers or ViTAE's one, whose paper prints 4.8 for T."""
    model = kind(arch)
    layers = [model.stages[2][1]] if kind is ViTAE else model.layers
    assert {layer.attn.num_heads for layer in layers} == {heads}
    classifiers = 1000 * (layers[0].attn.embed_dims + 1) * (1 if kind is ViTAE else 2)
    count = sum(parameter.numel() for parameter in model.parameters()) + classifiers
    assert round(count / 1e6, 2 if kind is LVViT else 6) == parameters


@pytest.mark.parametrize(
    'make, options, message',
    [
        (backbone, dict(arch='huge'), "arch='huge' is unknown; choose one of tiny, small, medium"),
        (backbone, dict(residual_scale=0), 'residual_scale=0 must be positive'),
        (backbone, dict(mix_token=True, out_type='cls_token'), "mix_token=True needs out_type='raw'"),
        (head, dict(token_weight=0), r"token_weight=0 must be positive.*out_type='cls_token'"),
        (backbone, dict(kind=ViTAE, arch='huge'), "arch='huge' is unknown; choose one of tiny, small"),
        (backbone, dict(kind=ViTAE, depths=(1, 1)), 'depths=.* needs one value for each of the 3 stages'),
        (backbone, dict(kind=ViTAE, out_indices=(3,)), 'must lie in 0 to 2'),
        (backbone, dict(kind=ViTAE, embed_dims=(16, 16, 48)), 'must end with 32, 2 times the last of conv_dims'),
    ],
)
def test_what_does_not_fit_says_so(make: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make(**options)


def test_labels_of_tokens_of_another_map_are_refused() -> None:
    samples = [DataSample().set_gt_label(0) for _ in range(2)]
    for sample in samples:
        sample.set_field(torch.rand(4, CLASSES), 'gt_token_score')
    with pytest.raises(ValueError, match=r'gt_token_score must be \(tokens, classes\) = \(6, 5\).*got \(4, 5\)'):
        head().loss((torch.rand(2, 7, C),), samples)


@pytest.mark.parametrize('name', CONFIGURED)
def test_gated_config_takes_a_step_from_the_vanilla_start(name: str) -> None:
    """Shared parameters are equal, logits are to rounding; then every parameter gets a gradient."""
    init_default_scope('mmpretrain')
    models = []
    for path in (f'vanilla/{name}.py', f'plug-{name}.py'):
        cfg = Config.fromfile(CONFIGS / path).model
        cfg.backbone.update(CONFIGURED[name])
        torch.manual_seed(0)
        models.append(MODELS.build(cfg))
        models[-1].init_weights()
        models[-1].eval()
    vanilla, gated = models
    shared = dict(vanilla.named_parameters())
    gates = {key for key, _ in gated.named_parameters()} - set(shared)
    assert {key.split('.attn.gate.')[0][-1] for key in gates} == ({'0', '1'} if 'lvvit' in name else {'1', '2'})
    assert all(torch.equal(value, shared[key]) for key, value in gated.named_parameters() if key in shared)
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(gated(x), vanilla(x), rtol=1e-4, atol=1e-5)
    losses = gated.train().loss(x, [DataSample().set_gt_label(1), DataSample().set_gt_label(2)])
    sum(losses.values()).backward()
    assert [key for key, parameter in gated.named_parameters() if parameter.grad is None] == []

"""LV-ViT against its formulas: the stem, divided residuals, MixToken, labels of tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip('mmpretrain', reason='LV-ViT is built on mmpretrain, which is not installed')

from mmengine.config import Config
from mmengine.registry import init_default_scope
from mmpretrain.registry import TRANSFORMS
from mmpretrain.structures import DataSample

from projects.plug_classifiers import LVViT, TokenLabelHead

CONFIG = Path(__file__).parents[1] / 'configs/vanilla/lvvit-t_8xb128-300e_in1k.py'
C, CLASSES = 24, 5
LABELS = dict(type='LabelSmoothLoss', label_smooth_val=0.0)  # takes labels and shares of classes
SMALL = dict(embed_dims=C, num_layers=2, num_heads=4, img_size=64)


def backbone(**options: Any) -> Any:
    model = LVViT(**{**SMALL, **options})
    model.init_weights()
    return model


def head(**options: Any) -> Any:
    init_default_scope('mmpretrain')
    return filled(TokenLabelHead(CLASSES, C, loss=LABELS, **options), 0.5)


def filled(module: Any, std: float) -> Any:
    """Draw every parameter of a module anew, so that what is lost, added or left out shows."""
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=std)
    return module


def plain(model: Any, x: Tensor, divisor: float, positions: Tensor) -> Tensor:
    """LV-ViT from its parameters: convolutions, patches, layers whose branches are divided, a norm."""
    state = model.state_dict()
    for i, (stride, padding) in zip((0, 3, 6), ((2, 3), (1, 1), (1, 1)), strict=True):
        x = F.conv2d(x, state[f'stem.{i}.weight'], stride=stride, padding=padding)
        norm = [state[f'stem.{i + 1}.{name}'] for name in ('running_mean', 'running_var', 'weight', 'bias')]
        x = F.batch_norm(x, *norm).relu()
    x = F.conv2d(x, state['patch_embed.projection.weight'], state['patch_embed.projection.bias'], stride=8)
    x = torch.cat([state['cls_token'].expand(len(x), -1, -1), x.flatten(2).transpose(1, 2)], 1) + positions
    for i in range(2):
        own = {key.removeprefix(f'layers.{i}.'): value for key, value in state.items() if f'layers.{i}.' in key}
        y = F.layer_norm(x, [C], own['ln1.weight'], own['ln1.bias'])
        q, k, v = (y @ own['attn.qkv.weight'].T).unflatten(-1, (3, 4, C // 4)).permute(2, 0, 3, 1, 4)
        heads = (q @ k.transpose(-1, -2) / (C // 4) ** 0.5).softmax(-1) @ v
        x = x + (heads.transpose(1, 2).flatten(2) @ own['attn.proj.weight'].T + own['attn.proj.bias']) / divisor
        y = F.layer_norm(x, [C], own['ln2.weight'], own['ln2.bias'])
        y = F.gelu(y @ own['ffn.layers.0.0.weight'].T + own['ffn.layers.0.0.bias'])
        x = x + (y @ own['ffn.layers.1.weight'].T + own['ffn.layers.1.bias']) / divisor
    return F.layer_norm(x, [C], state['ln1.weight'], state['ln1.bias'])


@torch.no_grad()
@pytest.mark.parametrize('arch, divisor', [('tiny', 1), ('small', 2)])
def test_forward_is_its_formula(arch: str, divisor: int) -> None:
    model = filled(backbone(arch=arch), 0.3).double()
    model.eval()
    x = torch.randn(2, 3, 64, 64, dtype=torch.float64)
    torch.testing.assert_close(model(x)[0], plain(model, x, divisor, model.pos_embed), rtol=1e-9, atol=1e-9)
    classes = backbone(arch=arch, out_type='cls_token').double()
    classes.load_state_dict(model.state_dict())
    classes.eval()
    torch.testing.assert_close(classes(x)[0], model(x)[0][:, 0])


@torch.no_grad()
def test_images_of_another_size() -> None:
    """A patch for every 16 pixels begun, each with a position of the resized map."""
    model = filled(backbone(), 0.3)
    model.eval()
    assert [model(torch.rand(1, 3, *size))[0].shape[1] - 1 for size in ((64, 64), (97, 33))] == [4 * 4, 7 * 3]
    x = torch.randn(1, 3, 96, 48)
    grid = model.pos_embed[:, 1:].transpose(1, 2).unflatten(-1, (4, 4))
    grid = F.interpolate(grid, (6, 3), mode='bicubic', align_corners=False)
    positions = torch.cat([model.pos_embed[:, :1], grid.flatten(2).transpose(1, 2)], 1)
    torch.testing.assert_close(model(x)[0], plain(model, x, 1, positions), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('arch, millions, heads', [('tiny', 8.53, 4), ('small', 26.15, 6), ('medium', 55.83, 8)])
def test_parameters_and_heads_are_as_many_as_published(arch: str, millions: float, heads: int) -> None:
    """Parameters with both classifiers, as the authors publish them."""
    model = LVViT(arch)
    assert {layer.attn.num_heads for layer in model.layers} == {heads}
    count = sum(parameter.numel() for parameter in model.parameters()) + 2 * 1000 * (model.embed_dims + 1)
    assert round(count / 1e6, 2) == millions


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
    cfg = Config.fromfile(CONFIG)
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


def test_what_does_not_fit_says_so() -> None:
    for options, message in (
        (dict(arch='huge'), "arch='huge' is unknown; choose one of tiny, small, medium"),
        (dict(residual_scale=0), 'residual_scale=0 must be positive'),
        (dict(mix_token=True, out_type='cls_token'), "mix_token=True needs out_type='raw'"),
    ):
        with pytest.raises(ValueError, match=message):
            backbone(**options)
    with pytest.raises(ValueError, match=r"token_weight=0 must be positive.*out_type='cls_token'"):
        head(token_weight=0)
    samples = [DataSample().set_gt_label(0) for _ in range(2)]
    for sample in samples:
        sample.set_field(torch.rand(4, CLASSES), 'gt_token_score')
    with pytest.raises(ValueError, match=r'gt_token_score must be \(tokens, classes\) = \(6, 5\).*got \(4, 5\)'):
        head().loss((torch.rand(2, 7, C),), samples)


def test_stem_learns_as_slowly_as_the_patches() -> None:
    """By mmpretrain's rates for depths; a frozen model keeps it as it is."""
    model = backbone(frozen_stages=1)
    for prefix in ('', 'backbone.'):
        assert model.get_layer_depth(f'{prefix}stem.0.weight', prefix) == (0, 4)
        assert model.get_layer_depth(f'{prefix}layers.1.ln1.weight', prefix) == (2, 4)
    assert not any(parameter.requires_grad for parameter in model.stem.parameters())

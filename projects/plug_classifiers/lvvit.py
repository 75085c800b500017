"""LV-ViT: a convolutional stem before mmpretrain's vision transformer, and a head that classifies every token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from mmengine.model import trunc_normal_init
from mmengine.model.weight_init import trunc_normal_
from mmpretrain.models.backbones import VisionTransformer
from mmpretrain.models.heads import VisionTransformerClsHead
from mmpretrain.models.utils.batch_augments import CutMix
from torch import Tensor, nn

from mmgate import MODELS, ConfigError

LV_VIT = {
    'tiny': dict(embed_dims=240, num_layers=12, num_heads=4, residual_scale=1),
    'small': dict(embed_dims=384, num_layers=16, num_heads=6, residual_scale=2),
    'medium': dict(embed_dims=512, num_layers=20, num_heads=8, residual_scale=2),
}
STEM = 64  # channels
STRIDE = 2  # of the stem
PATCH = 8  # side of a patch of the stem's map


class _Divided(nn.Module):
    """Module that divides a residual branch by a constant; it replaces the learnt LayerScale of mmpretrain's layers."""

    def __init__(self, divisor: float) -> None:
        super().__init__()
        self.divisor = divisor

    def forward(self, x: Tensor) -> Tensor:
        return x / self.divisor


@MODELS.register_module(force=True)
class LVViT(VisionTransformer):
    """The backbone LV-ViT: a ViT with three convolutions before its patches and scaled-down residual branches.

    Args:
        arch: ``'tiny'``, ``'small'`` or ``'medium'``.
        img_size: Side of the images in training; positions are resized for others.
        mix_token: True replaces, in training and before the transformer, a box of every image's tokens by those of
            another image of the batch (MixToken). Needs ``out_type='raw'``.
        out_type: ``'raw'`` for all tokens, which :class:`TokenLabelHead` reads, or another of mmpretrain's.
        in_channels: Of the images.
        embed_dims: Instead of the preset's.
        num_layers: Instead of the preset's.
        num_heads: Instead of the preset's.
        residual_scale: Divisor of the residual branches, instead of the preset's.
        **kwargs: Further arguments of mmpretrain's ``VisionTransformer``.

    Raises:
        ConfigError: An unknown ``arch``, a ``residual_scale`` that is not positive, or MixToken without raw tokens.

    Source: All tokens matter (Jiang et al., 2021), section 3 and Table 1.
    """

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        img_size: int | tuple[int, int] = 224,
        mix_token: bool = False,
        out_type: str = 'raw',
        in_channels: int = 3,
        embed_dims: int | None = None,
        num_layers: int | None = None,
        num_heads: int | None = None,
        residual_scale: float | None = None,
        **kwargs: Any,
    ) -> None:
        if arch not in LV_VIT:
            raise ConfigError(f'arch={arch!r} is unknown; choose one of {", ".join(LV_VIT)} and override its fields.')
        given = dict(embed_dims=embed_dims, num_layers=num_layers, num_heads=num_heads, residual_scale=residual_scale)
        sizes: dict[str, Any] = {**LV_VIT[arch], **{name: one for name, one in given.items() if one is not None}}
        scale = sizes.pop('residual_scale')
        if scale <= 0:
            raise ConfigError(f'residual_scale={scale} must be positive: residual branches are divided by it.')
        if mix_token and out_type != 'raw':
            raise ConfigError(
                f"mix_token=True needs out_type='raw', for each token to get its label; got {out_type!r}."
            )
        height, width = (img_size, img_size) if isinstance(img_size, int) else img_size
        patches = dict(
            in_channels=STEM, kernel_size=PATCH, stride=PATCH, input_size=(-(-height // STRIDE), -(-width // STRIDE))
        )
        super().__init__(
            {**sizes, 'feedforward_channels': 3 * sizes['embed_dims']},
            img_size=(height, width),
            patch_cfg=patches,
            out_type=out_type,
            **{'qkv_bias': False, 'norm_cfg': dict(type='LN'), **kwargs},
        )
        self.mix_token = mix_token
        blocks: list[nn.Module] = []
        for inputs, kernel, stride in ((in_channels, 7, STRIDE), (STEM, 3, 1), (STEM, 3, 1)):
            convolution = nn.Conv2d(inputs, STEM, kernel, stride, kernel // 2, bias=False)
            blocks += [convolution, nn.BatchNorm2d(STEM), nn.ReLU(inplace=True)]
        self.stem = nn.Sequential(*blocks)
        if scale != 1:
            for layer in self.layers:
                layer.attn.gamma1 = _Divided(scale)
                layer.ffn.gamma2 = _Divided(scale)
        if self.frozen_stages > 0:
            # mmpretrain freezes from the patches on, and the stem comes before them.
            self.stem.eval().requires_grad_(False)

    def init_weights(self) -> None:
        """Initialise as the authors do, or from the checkpoint of a ``Pretrained`` init_cfg."""
        super().init_weights()
        if not (isinstance(self.init_cfg, dict) and self.init_cfg['type'] == 'Pretrained'):
            for module in self.modules():
                if isinstance(module, nn.Linear):
                    trunc_normal_init(module, std=0.02)
            trunc_normal_(self.cls_token, std=0.02)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        """Return the tokens ``(B, 1 + N, C)`` of images ``(B, 3, H, W)``, with the class token first.

        In training with MixToken every output is a pair: the tokens, with the exchanged box back in its own image, and
        the share of an image's area that was not exchanged while its class token attended to it.
        """
        grid = self.stem(x)
        if not (self.mix_token and self.training):
            return super().forward(grid)
        hw_shape = -(-grid.shape[2] // PATCH), -(-grid.shape[3] // PATCH)
        box, share = CutMix(alpha=1.0).cutmix_bbox_and_lam(hw_shape, np.random.beta(1.0, 1.0))
        # Patches do not overlap, so that a box of tokens is a box of the stem's map.
        outputs = super().forward(_exchange(grid, [PATCH * side for side in box]))
        return tuple((self._restore(tokens, hw_shape, box), share) for tokens in outputs)

    def get_layer_depth(self, param_name: str, prefix: str = '') -> tuple[int, int]:
        """Return a parameter's depth and the number of depths, for layer-wise learning rates.

        The stem has the depth of the patch embedding.
        """
        stem = f'{prefix}stem.'
        patches = f'{prefix}patch_embed.'
        name = patches + param_name.removeprefix(stem) if param_name.startswith(stem) else param_name
        return super().get_layer_depth(name, prefix)

    @staticmethod
    def _restore(tokens: Tensor, hw_shape: tuple[int, int], box: Sequence[int]) -> Tensor:
        """Put the tokens that MixToken has exchanged between two images back into their own image."""
        grid = _exchange(tokens[:, 1:].transpose(1, 2).unflatten(-1, hw_shape), box)
        return torch.cat([tokens[:, :1], grid.flatten(2).transpose(1, 2)], 1)


def _exchange(maps: Tensor, box: Sequence[int]) -> Tensor:
    """Exchange a box of each map ``(B, C, H, W)`` with the image opposite in the batch; a second call undoes it."""
    top, bottom, left, right = box
    exchanged = maps.clone()
    exchanged[:, :, top:bottom, left:right] = maps.flip(0)[:, :, top:bottom, left:right]
    return exchanged


@MODELS.register_module(force=True)
class TokenLabelHead(VisionTransformerClsHead):
    """LV-ViT's head: a classifier on the class token, and a second one on every other token, trained with token labels.

    The loss is ``H(class token, y) + token_weight * mean_i H(token_i, y_i)``. With MixToken the first term is the mean
    of those with the labels of both images, by their shares. A data sample's ``gt_token_score`` has the labels
    ``y_i``, ``(N, num_classes)``, row by row; where there is none they are the image's own, ``gt_score`` or
    ``gt_label``. Augmentations that mix images mix no ``gt_token_score``: leave them off beside it. The prediction is
    the class token's, plus half of the largest that the other tokens make of each class.

    Args:
        num_classes: Number of classes.
        in_channels: Of the tokens.
        token_weight: Of the tokens' loss; 1 in the authors' code.
        **kwargs: Further arguments of mmpretrain's ``VisionTransformerClsHead``.

    Raises:
        ConfigError: A ``token_weight`` that is not positive.

    Source: All tokens matter (Jiang et al., 2021), Eq. 2 to 6; the prediction as in the authors' code.
    """

    def __init__(self, num_classes: int, in_channels: int, *, token_weight: float = 1.0, **kwargs: Any) -> None:
        super().__init__(num_classes, in_channels, **kwargs)
        if token_weight <= 0:
            raise ConfigError(
                f'token_weight={token_weight} must be positive. Without labels of tokens take the class token alone: '
                "out_type='cls_token' in the backbone and mmpretrain's VisionTransformerClsHead."
            )
        self.token_weight = token_weight
        self.token_head = nn.Linear(in_channels, num_classes)

    def forward(self, feats: tuple[Any, ...]) -> Tensor:
        """Return the class scores ``(B, num_classes)`` for the backbone's last tokens ``(B, 1 + N, C)``."""
        tokens, _ = _tokens_and_share(feats)
        return super().forward((tokens[:, 0],)) + 0.5 * self.token_head(tokens[:, 1:]).amax(1)

    def loss(self, feats: tuple[Any, ...], data_samples: list[Any], **kwargs: Any) -> dict[str, Tensor]:
        """Return the losses of the class token (``loss_cls``) and of all other tokens (``loss_token``).

        The class token's accuracies are there, too, if they are asked for.

        Raises:
            ConfigError: A ``gt_token_score`` of another shape than ``(N, num_classes)``.
        """
        tokens, share = _tokens_and_share(feats)
        scores = super().forward((tokens[:, 0],))
        losses = self._get_loss(scores, data_samples, **kwargs)
        losses['loss_cls'] = losses.pop('loss')
        if share < 1:
            # The tokens of images in reverse order are exchanged.
            other = self._get_loss(scores, data_samples[::-1], **kwargs)['loss']
            losses['loss_cls'] = share * losses['loss_cls'] + (1 - share) * other
        token_scores = self.token_head(tokens[:, 1:])
        labels = _labels_of_tokens(data_samples, token_scores)
        token_scores = token_scores.flatten(0, 1)
        token_loss = self.loss_module(token_scores, labels, avg_factor=len(token_scores), **kwargs)
        losses['loss_token'] = self.token_weight * token_loss
        return losses


def _tokens_and_share(feats: tuple[Any, ...]) -> tuple[Tensor, float]:
    """Return the last layer's tokens, and the share of each image that MixToken left unmixed (1 without MixToken)."""
    last = feats[-1]
    return last if isinstance(last, tuple) else (last, 1.0)


def _labels_of_tokens(data_samples: Sequence[Any], scores: Tensor) -> Tensor:
    """Return the training labels of all tokens: a class number, or the scores of all classes, for each."""
    number = scores.shape[1]
    if 'gt_token_score' in data_samples[0]:
        labels = [torch.as_tensor(sample.gt_token_score, device=scores.device) for sample in data_samples]
        for of_image in labels:
            if of_image.shape != scores.shape[1:]:
                raise ConfigError(
                    f'gt_token_score must be (tokens, classes) = {tuple(scores.shape[1:])}, row by row of the map, got '
                    f'{tuple(of_image.shape)}.'
                )
        return torch.cat(labels)
    if 'gt_score' in data_samples[0]:
        return torch.stack([sample.gt_score for sample in data_samples]).repeat_interleave(number, 0)
    return torch.cat([sample.gt_label for sample in data_samples]).repeat_interleave(number, 0)

"""Measure how similar the attention patterns of layers are, by centred kernel alignment (CKA) over images."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from mmgate.analysis.probes.recording import predict
from mmgate.analysis.probes.relevance import attended, query_rows, record_maps
from mmgate.errors import ConfigError

MOST_IMAGES = 1024  # compared at once
LEAST_IMAGES = 4  # for the unbiased dependence


def attention_cka(model: nn.Module, batches: Iterable[dict[str, Any]]) -> tuple[list[str], np.ndarray]:
    """Run a model over images; return its layers' paths and the similarity (CKA) of each two ``(layers, layers)``.

    A sample is an image. Its features are the weights of the class token for each region, or in a layer without one the
    weights of the mean query; heads, which the paper does not mention, are concatenated. Unbiased dependences of blocks
    of 1024 images are summed up before their ratio is taken, so that a data set of any size fits; up to three images
    that are left over do not count.

    Raises:
        ConfigError: There are fewer than four images, or images of different sizes.

    Source: PLuG, section 4.3 and Fig. 6.
    """
    total: Any = 0.0
    block: list[list[Tensor]] = []
    paths: list[str] = []
    for batch in batches:
        with record_maps(model, query_rows) as recording:
            predict(model, batch)
        features = attended(model, recording)
        paths = list(features)
        block.append([x.flatten() for x in features.values()])
        if any(x.shape != first.shape for x, first in zip(block[-1], block[0], strict=True)):
            raise ConfigError(
                'CKA over images needs images of one size, whose regions are the same. Give --images of one size, or '
                'resize all to one: where step 1 of the pipeline is the Resize, by --cfg-options '
                'val_dataloader.dataset.pipeline.1.keep_ratio=False, for --images of test_dataloader.'
            )
        if len(block) == MOST_IMAGES:
            total = total + len(block) * dependences([torch.stack(layer) for layer in zip(*block, strict=True)])
            block = []
    if len(block) >= LEAST_IMAGES:
        total = total + len(block) * dependences([torch.stack(layer) for layer in zip(*block, strict=True)])
    if np.ndim(total) == 0:
        raise ConfigError(f'CKA over images needs {LEAST_IMAGES} images or more, got {len(block)}.')
    return paths, alignment(total)


def dependences(layers: list[Tensor]) -> np.ndarray:
    """Return the unbiased Hilbert-Schmidt independence criterion (HSIC) of each two of L layers, ``(L, L)``.

    A layer is a matrix ``(n, p)`` whose row i belongs to image i. The biased criterion grows with the width: maps of
    unrelated layers would look alike as soon as they have more regions than there are images. It is NaN for fewer than
    four rows.

    Source: Song et al., Feature selection via dependence maximization (JMLR 13, 2012), Eq. 5.
    """
    count = len(layers[0])
    if count < LEAST_IMAGES:
        return np.full((len(layers), len(layers)), np.nan)
    # The dependence does not change by the shift, but its rounding gets better.
    centred = [x.double() - x.double().mean(0) for x in layers]
    products = torch.stack([(x @ x.T).fill_diagonal_(0) for x in centred])  # (L, n, n)
    sums = products.sum(1)
    totals = sums.sum(1)
    found = torch.einsum('aij, bij -> ab', products, products)
    found = found + torch.outer(totals, totals) / ((count - 1) * (count - 2)) - 2 / (count - 2) * sums @ sums.T
    return (found / (count * (count - 3))).cpu().numpy()


def alignment(found: np.ndarray) -> np.ndarray:
    """Return the similarity (linear centred kernel alignment) of each two layers, computed from :func:`dependences`.

    1 for matrices that are equal up to rotation and scale, 0 on average for unrelated ones, which may be less; NaN
    where one of the two is constant.

    Source: Kornblith et al., Similarity of neural network representations revisited (arXiv 1905.00414), section 3;
    Nguyen et al., Do wide and deep networks learn the same things? (arXiv 2010.15327), Eq. 3.
    """
    scale = np.outer(np.diagonal(found), np.diagonal(found))
    return found / np.sqrt(np.where(scale > 0, scale, np.nan))

"""Whole models with the Triton backends beside the reference: losses and the gradients of their attention."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from conftest import ROOT
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from mmgate.benchmarks.training import random_batch
from mmgate.ops.triton_backend import interpreted

pytest.importorskip('triton', minversion='3.2')
SMALL_DETR = {
    'model.num_queries': 4,
    'model.encoder.num_layers': 1,
    'model.encoder.layer_cfg.self_attn_cfg.num_heads': 2,
    'model.decoder.num_layers': 1,
    'model.decoder.layer_cfg.cross_attn_cfg.num_heads': 2,
}


@pytest.mark.parametrize(
    'config, options, variable, size',
    [
        (
            'plug/deformable_detr/plug-deformable-detr-refine_r18_1xb8-12e_shapes',
            SMALL_DETR,
            'MMGATE_MS_DEFORM_ATTN',
            (32, 32),
        ),
        ('plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128', {}, 'MMGATE_PLUG_ATTENTION', (64, 64)),
    ],
    ids=['deformable_detr', 'mask2former'],
)
@pytest.mark.skipif(not interpreted(), reason='the kernels are compiled in this process, not interpreted')
def test_same_losses_and_gradients(
    config: str, options: dict[str, Any], variable: str, size: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = Config.fromfile(ROOT / f'configs/{config}.py')
    cfg.merge_from_dict(options)
    init_default_scope(cfg.default_scope)
    model = MODELS.build(deepcopy(cfg.model))  # mmdet writes into the config it builds from
    model.init_weights()  # level embeddings are empty memory before
    model.train()
    for module in model.modules():
        if isinstance(module, (nn.BatchNorm2d, nn.Dropout)):
            module.eval()
    for parameter in model.parameters():  # no gate is closed, no offset nought
        if parameter.dim() == 1:
            nn.init.normal_(parameter, std=0.2)
    data = model.data_preprocessor(random_batch(cfg, size, 1), True)
    results: dict[str, dict[str, Tensor]] = {}
    for backend in ('torch', 'triton'):
        monkeypatch.setenv(variable, backend)
        torch.manual_seed(0)  # losses sample points
        model.zero_grad()
        loss, _ = model.parse_losses(model(**data, mode='loss'))
        loss.backward()
        gradients = {
            name: parameter.grad.clone()
            for name, parameter in model.named_parameters()
            if 'attn' in name and parameter.grad is not None
        }
        results[backend] = {'loss': loss.detach(), **gradients}
    assert len(results['torch']) > 20
    # a rounding may change which points the losses sample
    torch.testing.assert_close(results['triton'].pop('loss'), results['torch'].pop('loss'), rtol=1e-3, atol=0)
    for name, expected in results['torch'].items():
        error = ((results['triton'][name] - expected).norm() / expected.norm()).item()
        assert error < 0.02, f'{name}: {error:.1e}'  # what nearly cancels, as the gates' scalars, has few digits

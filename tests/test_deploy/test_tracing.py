"""Stand-ins for operations that graphs lack compute the same."""

from __future__ import annotations

import importlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from mmseg.models.utils import Upsample

from mmgate.deploy.tracing import adaptive_avg_pool2d, upsample, window_reverse


@pytest.mark.parametrize('size', [1, 3, 6, (2, None), 40], ids=str)
def test_pooling_is_torchs(size: Any) -> None:
    x = torch.randn(2, 3, 17, 32, dtype=torch.float64)
    torch.testing.assert_close(adaptive_avg_pool2d(x, size), F.adaptive_avg_pool2d(x, size))


@pytest.mark.parametrize('host', ['mmdet', 'mmseg'])
def test_windows_are_the_hosts(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    swin = importlib.import_module(f'{host}.models.backbones.swin')
    attention = swin.ShiftWindowMSA(8, 2, window_size=3, shift_size=1)
    x = torch.randn(2, 6 * 9, 8)
    expected = attention(x, (6, 9))
    monkeypatch.setattr(swin.ShiftWindowMSA, 'window_reverse', window_reverse)
    torch.testing.assert_close(attention(x, (6, 9)), expected)


@pytest.mark.parametrize('options', [dict(scale_factor=2), dict(scale_factor=1.5), dict(size=(5, 7))], ids=str)
def test_upsampling_is_mmsegs(options: dict[str, Any]) -> None:
    module = Upsample(mode='bilinear', align_corners=False, **options)
    x = torch.randn(1, 2, 6, 8)
    torch.testing.assert_close(upsample(module, x), module(x))

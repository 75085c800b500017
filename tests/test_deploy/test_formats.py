"""Needs of exports, which are said before any work."""

from __future__ import annotations

import pytest
import torch

from mmgate.deploy import formats
from mmgate.errors import ConfigError


@pytest.mark.parametrize('version', ['2.1.2', '2.8.0+cpu'])
def test_an_older_torch_is_refused(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, '__version__', version)
    with pytest.raises(ConfigError, match=r'needs torch 2\.9 or newer, this is 2'):
        formats.check_format('torch-export')


def test_missing_packages_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """For ONNX alone."""
    monkeypatch.setattr(torch, '__version__', '2.10.0')
    monkeypatch.setattr(formats, 'why_not', lambda package: None if package == 'onnx' else 'missing')
    with pytest.raises(ConfigError, match=r'needs onnxscript, onnxruntime: pip install "mmgate\[deploy\]"'):
        formats.check_format('onnx')
    formats.check_format('torch-export')

"""The tool that tests an exported file."""

from __future__ import annotations

import pytest
from conftest import tool

from mmgate.errors import ConfigError


def test_a_file_is_looked_for_before_its_config() -> None:
    with pytest.raises(ConfigError, match=r'exported file missing\.onnx does not exist'):
        tool('test', 'deploy').main(['no-config.py', 'missing.onnx'])

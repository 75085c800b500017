"""The tool that counts a config's parameters and multiply-accumulates."""

from __future__ import annotations

import json

import pytest
from conftest import ROOT, tool
from mmengine.config import Config

from mmgate.analysis.complexity import count_config


def test_the_tool_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    config = 'mmgate::plug/mask2former/plug-mask2former_r18_1xb8-1k_shapes-128x128.py'
    tool('get_flops').main([config, '--shape', '64', '96', '--json'])
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert printed['shape'] == [64, 96] and printed['macs'] > 1e7
    expected = count_config(Config.fromfile(ROOT / 'configs' / config.partition('::')[2]), 64, 96)
    assert (printed['parameters'], printed['macs']) == (expected.parameters, expected.macs)

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
    assert not expected.unused


def test_what_gates_replace_is_said_and_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's number is of what trains."""
    config = 'mmgate::agent/retinanet/agent-retinanet_pvt-t_1x_coco.py'
    tool('get_flops').main([config, '--shape', '64'])
    counted = count_config(Config.fromfile(ROOT / 'configs' / config.partition('::')[2]), 64, 64)
    assert counted.unused > 1e6
    assert f'{counted.unused / 1e6:6.3f} M, frozen and not counted above' in capsys.readouterr().out

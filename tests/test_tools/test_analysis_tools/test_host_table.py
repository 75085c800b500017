"""The table of hosts, read from the zoos."""

from __future__ import annotations

from pathlib import Path

import pytest
from conftest import ROOT, tool

from mmgate.errors import ConfigError

table = tool('host_table')
SEGFORMER = 'segformer/segformer_mit-b0_8xb2-160k_ade20k-512x512.py'


def test_the_zoo_has_each_architecture_once_for_each_backbone() -> None:
    assert [config for config in table.zoo('mmseg') if config.startswith('segformer/')] == [SEGFORMER]


def test_gates_that_fit_all_are_named_by_their_kind() -> None:
    (host,) = table.hosts_in('mmseg', SEGFORMER)
    assert host.gates['PLuGMultiheadAttention'] == host.gates['AgentAttention'] == host.count == 8
    row = table.markdown([host], []).splitlines()[-1]
    assert row == (
        '| mmseg | segformer | `backbone.layers.*.*.*.attn` | EfficientMultiheadAttention | **dense**, **map** |'
    )
    assert row in (ROOT / 'configs/README.md').read_text()


def test_a_gate_that_fits_none_and_why() -> None:
    """In the words of the table that is there."""
    hosts = table.hosts_in('mmdet', 'conditional_detr/conditional-detr_r50_8xb2-50e_coco.py')
    (cross,) = (host for host in hosts if host.path == 'decoder.layers.*.cross_attn')
    once = [name for name in table.kinds()['dense'] if not name.startswith('Differential')]
    assert once and cross.gates == dict.fromkeys(once, cross.count)
    *_, cell = table.markdown([cross], []).splitlines()[-1].split(' | ')
    assert 'DifferentialGatedMultiheadAttention, DifferentialMultiheadAttention: the gate splits heads into' in cell
    assert cell in (ROOT / 'configs/README.md').read_text(), 'run tools/analysis_tools/host_table.py'


def test_what_cannot_be_built_says_why_without_paths_of_this_machine() -> None:
    with pytest.raises(ConfigError, match=r'^`mmseg::vpd/vpd_sd_4xb8-25k_nyu-480x480.py`: '):
        table.hosts_in('mmseg', 'vpd/vpd_sd_4xb8-25k_nyu-480x480.py')
    root = Path('/here/site-packages/mmdet/.mim/configs')
    assert table.shortened(f'file {root}/a.py and /here/site-packages/b.py,   c\nmore', root) == 'file a.py and b.py, c'

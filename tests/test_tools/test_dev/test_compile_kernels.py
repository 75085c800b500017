"""The Triton kernels as GPUs would run them. No device is needed: Triton brings its own assembler."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT

triton = pytest.importorskip('triton', minversion='3.2')
if not (Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump').exists():
    pytest.skip('this Triton brings no disassembler', allow_module_level=True)

SHARED = {80: 163, 89: 99, 90: 227, 100: 227, 120: 99}  # KiB of shared memory that a program may have
SPILLED = 24  # bytes of a thread, at most: KERNELS.md has the counts
FORWARD = 'forward_kernel'
SAMPLER = [FORWARD, 'backward_kernel']
TILED = ['order_kernel', FORWARD, 'order_kernel', 'backward_kernel']  # as many queries as tokens
PLUG = [FORWARD, 'rows_backward_kernel', 'columns_backward_kernel']


def compiled(capability: int, *calls: str) -> list[dict[str, Any]]:
    """Compile in a process, as this one's Triton is interpreted and a kernel keeps its first GPU."""
    environment = {key: value for key, value in os.environ.items() if key != 'TRITON_INTERPRET'}
    command = [sys.executable, 'tools/dev/compile_kernels.py', str(capability), *calls]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_kernels_of_sixteen_bits_fit_hopper() -> None:
    rows = compiled(90, 'odd', 'sampler-bf16', 'plug-bf16')
    by_call = {call: [row for row in rows if row['call'] == call] for call in ('odd', 'sampler-bf16', 'plug-bf16')}
    assert [row['kernel'] for row in by_call['odd']] == [*SAMPLER, *TILED, *4 * PLUG]
    # Triton 3.3 and 3.5 spill up to six registers of one of them, later versions none.
    assert all(row['spilled'] <= SPILLED for row in (*by_call['sampler-bf16'], *by_call['plug-bf16']))
    assert by_call['plug-bf16'][0]['shared'] <= SHARED[90] / 3 * 1024  # three programs a multiprocessor
    assert all(row['shared'] <= 99 * 1024 for row in rows)  # every GPU since sm_80 has it


@pytest.mark.slow
@pytest.mark.parametrize('capability', SHARED)
def test_every_launch_compiles_and_fits(capability: int) -> None:
    """Also the widest PLuG, and a gate of 32 channels beside heads of 128, which once spilled 4.3 kB a thread."""
    rows = compiled(capability)
    assert [row['kernel'] for row in rows if row['call'] == 'odd'] == [*SAMPLER, *TILED, *4 * PLUG]
    for row in rows:
        assert row['shared'] <= SHARED[capability] * 1024, row
        if row['call'].startswith('sampler'):
            assert row['spilled'] <= SPILLED, row
        if row['call'] == 'plug-narrow-gate':
            assert row['spilled'] <= 256, row  # by Triton 3.9 at most 208, on sm_120
        if row['call'] == 'plug-bf16':
            assert row['spilled'] <= SPILLED and row['shared'] <= (SHARED[capability] - 1) / 2 * 1024, row

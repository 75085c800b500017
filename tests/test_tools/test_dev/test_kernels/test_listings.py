"""The Triton kernels as Hopper would run them. No device is needed: Triton brings its own assembler."""

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
import listings  # noqa: E402  (needs Triton)
from warpgroups import hazards  # noqa: E402

SPILLED = 24  # bytes of a thread, at most: KERNELS.md has the counts
KERNELS = ('forward_kernel', 'backward_kernel', 'rows_backward_kernel', 'columns_backward_kernel')


def compile_by(*arguments: str) -> str:
    """Run a script in a process of its own, as this one's Triton is interpreted, and return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    result = subprocess.run([sys.executable, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout


# One process for several runs of the tool, as its imports take longer than the compilation of a kernel.
RUNS = """
import json, runpy, sys
sys.path.insert(0, 'tools/dev/kernels')
for arguments in json.loads(sys.argv[1]):
    sys.argv = ['tools/dev/kernels/listings.py', *arguments]
    runpy.run_path(sys.argv[0], run_name='__main__')
"""


def run_tool(out: Path, *runs: list[str]) -> list[list[dict[str, Any]]]:
    """Return the rows of each run."""
    if not (Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump').exists():
        pytest.skip('this Triton brings no disassembler')
    files = [out / f'rows{number}.json' for number in range(len(runs))]
    commands = [['--out', str(file), *arguments] for file, arguments in zip(files, runs, strict=True)]
    compile_by('-c', RUNS, json.dumps(commands))
    return [json.loads(file.read_text()) for file in files]


@pytest.fixture(scope='module', params=[pytest.param('fp32', marks=pytest.mark.slow), 'bf16'])
def dtype(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope='module')
def code(dtype: str, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], dict[str, Any]]:
    """Listings at 32 channels by operator and kernel."""
    runs = [['--op', op, '--dim', '32', '--dtype', dtype] for op in listings.OPS]
    found = run_tool(tmp_path_factory.mktemp('code'), *runs)
    return {(op, row['kernel']): row for op, rows in zip(listings.OPS, found, strict=True) for row in rows}


def count(row: dict[str, Any], start: str) -> int:
    return sum(number for opcode, number in row['opcodes'].items() if opcode.startswith(start))


def test_sampler_moves_whole_vectors_and_does_not_spill(code: dict, dtype: str) -> None:
    forward, backward = (code['ms_deform_attn', kernel] for kernel in KERNELS[:2])
    assert forward['spilled'] == backward['spilled'] == 0
    assert count(forward, 'LDG.E.128') >= 32  # two pieces of four corners of four points
    assert count(backward, 'LDG.E.128' if dtype == 'fp32' else 'LDG.E.64') >= 16  # as many lanes as float32 sums
    assert count(backward, 'REDG.E.ADD.F32x4') == 16  # two pieces of four corners of two queries
    assert forward['barriers'] == backward['barriers'] == 0
    assert forward['in_flight'] >= (2 if dtype == 'fp32' else 1.5) and backward['in_flight'] >= 4
    assert forward['instructions'] <= 18 and backward['instructions'] <= (42 if dtype == 'fp32' else 48)


def test_plug_multiplies_pairs_of_heads_by_warpgroups_and_hardly_spills(code: dict, dtype: str) -> None:
    for kernel in (KERNELS[0], *KERNELS[2:]):
        row = code['plug_attention', kernel]
        assert count(row, 'HGMMA') and not count(row, 'HMMA')
        assert row['shared'] <= 99 * 1024  # every GPU since sm_80 has it
        if dtype == 'bf16':
            assert row['spilled'] <= SPILLED and count(row, 'MUFU.TANH') and row['block'].endswith('2 heads')
    if dtype == 'bf16':
        forward = code['plug_attention', KERNELS[0]]
        assert forward['instructions'] <= 11 and forward['special'] <= 1.6
        assert forward['shared'] <= listings.SHARED[90] / 3 * 1024  # three programs a multiprocessor
    assert not any(row['hazards'] for row in code.values()), 'a register of a product in flight is touched'


@pytest.mark.slow
@pytest.mark.parametrize('capability', [89, 120])
def test_plug_by_pairs_of_heads_before_and_after_hopper(tmp_path: Path, capability: int) -> None:
    arguments = ['--op', 'plug_attention', '--dim', '32', '--dtype', 'bf16', '--capability', str(capability)]
    (rows,) = run_tool(tmp_path, arguments)
    for row in rows:
        assert row['block'].endswith('2 heads') and not row['spilled']
        assert row['shared'] <= (listings.SHARED[capability] - 1) / 2 * 1024  # two programs a multiprocessor


@pytest.mark.slow
@pytest.mark.parametrize('capability', [80, 90])
def test_a_narrow_gate_beside_wide_heads_does_not_spill(tmp_path: Path, capability: int) -> None:
    """Of 32 channels beside 128, with a bias of each head, where it once spilled 4.3 kB a thread."""
    arguments = ['--op', 'plug_attention', '--dim', '128', '--width', '32', '--bias', '3', '--dtype', 'bf16']
    (rows,) = run_tool(tmp_path, [*arguments, '--capability', str(capability)])
    assert [row['kernel'] for row in rows] == [KERNELS[0], *KERNELS[2:]]
    assert not any(row['spilled'] for row in rows)
    assert all(row['shared'] <= 99 * 1024 for row in rows)


FIRST = ('HGMMA.64x32x16.F32.BF16 R24, gdesc[UR8], RZ, !UPT', 'HGMMA.64x32x16.F32.BF16 R24, R40, gdesc[UR8], R24, gsb0')
WAIT = 'WARPGROUP.DEPBAR.LE gsb0, 0x0'
SECOND = 'HGMMA.64x32x16.F32.BF16 R56, R44, gdesc[UR8], R56, gsb0'


@pytest.mark.parametrize(
    'listing, expected',
    [
        ((*FIRST, WAIT, 'FADD R1, R24, R40'), 0),
        ((*FIRST, 'FADD R1, R40, R2', WAIT), 0),  # reading an operand does no harm
        ((*FIRST, 'FADD R40, R1, R2', WAIT), 1),
        ((*FIRST, 'FADD R1, R39, R2', WAIT), 1),  # the last register of the sum
        ((*FIRST, 'STG.E.128 desc[UR4][R2.64], R20', WAIT), 0),
        ((*FIRST, 'STG.E.128 desc[UR4][R2.64], R21', WAIT), 1),
        ((*FIRST, 'IMAD.WIDE R4, R23, 0x4, R2', WAIT), 0),
        ((*FIRST, '@P0 IMAD.WIDE R42, R1, 0x4, R2', WAIT), 1),
        ((*FIRST, SECOND, 'WARPGROUP.DEPBAR.LE gsb0, 0x1', 'MOV R40, R24', 'MOV R1, R2'), 0),
        ((*FIRST, SECOND, 'WARPGROUP.DEPBAR.LE gsb0, 0x1', 'MOV R44, R2'), 1),
        (('MOV R40, R2', *FIRST, '@!P0 BRA 0x0', WAIT), 1),  # of the loop's next turn
        (('MOV R48, R2', *FIRST, '@!P0 BRA 0x0', WAIT), 0),
    ],
)
def test_hazards_of_warpgroup_products(listing: tuple[str, ...], expected: int) -> None:
    assert len(hazards([(16 * index, text) for index, text in enumerate(listing)])) == expected


@pytest.mark.slow
@pytest.mark.parametrize('capability', [89, 120])
@pytest.mark.parametrize('dtype, bias', [('fp32', '0'), ('bf16', '2')], ids=['float32', 'full_bias'])
def test_the_widest_plug_fits_the_smallest_shared_memory(
    tmp_path: Path, dtype: str, bias: str, capability: int
) -> None:
    arguments = ['--op', 'plug_attention', '--dim', '128', '--dtype', dtype, '--bias', bias]
    (rows,) = run_tool(tmp_path, [*arguments, '--capability', str(capability)])
    assert len(rows) == 3 and all(row['shared'] <= listings.SHARED[capability] * 1024 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize('capability', [80, 89])
def test_sampler_where_floats_are_added_one_by_one(tmp_path: Path, capability: int) -> None:
    """One channel of a piece a lane: reductions are of neighbouring floats, and no barrier is in the loop."""
    arguments = ['--op', 'ms_deform_attn', '--dim', '32', '64', '--dtype', 'fp32', '--capability', str(capability)]
    (rows,) = run_tool(tmp_path, arguments)
    assert all(row['shared'] <= listings.SHARED[capability] * 1024 for row in rows)
    for backward in rows[1::2]:
        assert count(backward, 'RED') == 32  # four pieces of four corners of two queries
        assert backward['spilled'] == backward['barriers'] == 0


@pytest.mark.slow
@pytest.mark.parametrize('capability', [80, 89, 90, 100, 120])
def test_launches_compile(capability: int) -> None:
    """Of sizes that are 1, too, which Triton makes constants of; a process each, as a kernel keeps its first GPU."""
    lines = compile_by('tools/dev/kernels/launches.py', str(capability)).splitlines()
    tiled = ['order_kernel', KERNELS[0], 'order_kernel', KERNELS[1]]  # as many queries as tokens
    kernels = [*KERNELS[:2], *tiled] + 4 * [KERNELS[0], *KERNELS[2:]]
    assert lines == [f'{kernel} {capability}' for kernel in kernels]


def test_integers_are_compiled_as_they_are_launched() -> None:
    """What 16 divides is known to the compiler, and changes its counts: here four strides of 0, rows and columns."""
    code = """
import re, sys, torch
sys.path.insert(0, 'tools/dev/kernels')
from launches import compile_for, plug
import mmgate.ops
known = []
compile_for(90, lambda name, kernel, _: known.append(len(re.findall(r': i32 \\{tt.divisibility', kernel.asm['ttir']))))
plug(torch.bfloat16, 64, 64, 2, 1, 32, 32, None)
plug(torch.bfloat16, 63, 65, 2, 1, 32, 32, None)
print(known)
"""
    assert compile_by('-c', code).split('\n')[0] == '[6, 6, 6, 4, 4, 4]'

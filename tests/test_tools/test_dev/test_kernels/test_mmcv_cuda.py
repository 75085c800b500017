"""What compiles mmcv's CUDA operator alone: its sources and its binding; the operator itself on a GPU."""

from __future__ import annotations

import re
from pathlib import Path

import mmcv_cuda
import pytest
import torch

from mmgate.benchmarks import ops


def test_mmcv_operator_needs_a_gpu_and_its_sources_are_installed(tmp_path: Path) -> None:
    """What compiles it elsewhere is here: the functions that the binding declares, and the header newer torch lacks."""
    files, headers = mmcv_cuda.sources()
    text = files[0].read_text()
    for function in re.findall(r'\b(ms_deform_attn_cuda_\w+)\(', mmcv_cuda.BINDING):
        declared = re.search(rf'{function}\(([^;{{]*?)\);', mmcv_cuda.BINDING, re.S)[1]
        defined = re.search(rf'{function}\(([^;{{]*?)\)\s*{{', text, re.S)[1]
        assert [part.split('&')[0].split() for part in declared.split(',')] == [
            part.replace(' im2col_step', '').split('&')[0].split() for part in defined.split(',')
        ]
    assert all(path.is_dir() for path in headers)
    (folder,) = mmcv_cuda.shim(tmp_path, [str(tmp_path / 'torch')])
    assert (folder / 'THC/THCAtomics.cuh').exists() and mmcv_cuda.shim(tmp_path / 'other', [str(folder)]) == []
    if not torch.cuda.is_available():
        with pytest.raises(RuntimeError, match='torch sees no CUDA device'):
            mmcv_cuda.provide_operator()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs a CUDA device')
def test_mmcv_operator_runs() -> None:
    mmcv_cuda.provide_operator()
    inputs, reference = ops.sampler_inputs([(8, 8), (4, 4)], 2, None, 2, 'cuda')
    actual, expected = (run(*inputs, reference=reference) for run in (ops._mmcv, ops._grid_sample))
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)

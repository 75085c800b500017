"""mmcv's CUDA operator compiled alone: its sources and its binding, and the half of mmcv that a GPU machine gets."""

from __future__ import annotations

import re
from pathlib import Path

import mmcv_cuda
import pytest
import torch
from conftest import ROOT, run_python

# A compiler that writes what it is asked for, and knows where CUDA is.
COMPILER = """#!/bin/sh
case "$*" in
  *--dryrun*) echo '#$ TOP=/nowhere/cuda' >&2;;
  *--version*) echo 'Cuda compilation tools, release 13.0, V13.0.88';;
esac
while [ $# -gt 1 ]; do
  [ "$1" = -o ] && echo compiled > "$2"
  shift
done
"""
# Beside operators of the library's names that sample by the reference, mmgate's backend and the benchmark find mmcv.
USE = """
import torch
from mmgate.benchmarks import ops
from mmgate.ops.deformable import mmcv, reference
from mmgate.ops.deformable.samples import WeightedSamples

def sample(*tensors):
    return reference.sum_samples(WeightedSamples(*tensors))

library = torch.library.Library('mmcv_alone', 'DEF')
inputs = 'Tensor value, Tensor shapes, Tensor starts, Tensor locations, Tensor weights'
library.define(f'forward({inputs}, int step) -> Tensor')
grads = 'Tensor(a!) grad_value, Tensor(b!) grad_locations, Tensor(c!) grad_weights'
library.define(f'backward({inputs}, Tensor grad, {grads}, int step) -> ()')

def backward(value, shapes, starts, locations, weights, grad, *outputs):
    leaves = [x.detach().requires_grad_() for x in (value, locations, weights)]
    with torch.enable_grad():
        output = sample(leaves[0], shapes, starts, *leaves[1:])
    for to, found in zip(outputs, torch.autograd.grad(output, leaves, grad)):
        to.add_(found)

library.impl('forward', lambda *x: sample(*x[:5]), 'CPU')
library.impl('backward', lambda *x: backward(*x[:9]), 'CPU')
loaded = []
torch.ops.load_library = loaded.append
assert mmcv.why_unavailable() is None, mmcv.why_unavailable()
inputs, points = ops.sampler_inputs([(8, 8), (4, 4)], 2, None, 2, 'cpu')
for x in (inputs[0], inputs[3], inputs[4], inputs[5]):
    x.requires_grad_()
leaves = [x for x in inputs if x.requires_grad]
found, expected = (run(*inputs, reference=points) for run in (ops._mmcv, ops._grid_sample))
torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
gradients = [torch.autograd.grad(x.square().sum(), leaves) for x in (found, expected)]
torch.testing.assert_close(*gradients, rtol=1e-3, atol=1e-3)
print(loaded)
"""


def test_the_binding_declares_what_the_source_defines() -> None:
    source = (mmcv_cuda.sources_of(None) / mmcv_cuda.SOURCE).read_text()
    binding = (mmcv_cuda.ALONE / 'binding.cpp').read_text()
    names = re.findall(r'^(?:at::Tensor|void) (ms_deform_attn_cuda_\w+)\(', binding, re.M)
    assert len(names) == 2
    for name in names:
        declared = re.search(rf'{name}\(([^;{{]*?)\);', binding, re.S)[1]
        defined = re.search(rf'{name}\(([^;{{]*?)\)\s*{{', source, re.S)[1]
        assert [part.split('&')[0].split() for part in declared.split(',')] == [
            part.replace(' im2col_step', '').split('&')[0].split() for part in defined.split(',')
        ]


def test_headers_are_written_where_none_are(tmp_path: Path) -> None:
    (tmp_path / 'cuda').mkdir()
    (tmp_path / 'cuda/cusparse.h').write_text('')
    mmcv_cuda.shims(tmp_path / 'shims', [tmp_path / 'cuda'])
    written = {path.relative_to(tmp_path / 'shims').as_posix() for path in (tmp_path / 'shims').rglob('*.*')}
    assert written == set(mmcv_cuda.SHIMS) - {'cusparse.h'}


def test_what_is_missing_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r'comes without its sources\. --source names an unpacked'):
        mmcv_cuda.build(tmp_path / 'out', 90, source=tmp_path)
    monkeypatch.setattr(mmcv_cuda.shutil, 'which', lambda *name, **path: None)
    with pytest.raises(RuntimeError, match='nvcc was not found; set CUDA_HOME'):
        mmcv_cuda.build(tmp_path / 'out', 90)
    assert not (tmp_path / 'out').exists()


def test_the_folder_is_mmcv_for_benchmarks_without_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / 'cuda/bin/nvcc'
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text(COMPILER)
    nvcc.chmod(0o755)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path / 'cuda'))
    monkeypatch.setenv('CXX', str(nvcc))
    library = mmcv_cuda.build(tmp_path / 'out', 90)
    assert library.read_text() == 'compiled\n'
    path = f'{tmp_path / "out"}:{ROOT}'
    printed = run_python('-c', USE, PYTHONPATH=path, MMGATE_TORCH_ALONE='1').stdout
    assert str(library) in printed


def test_a_compiler_that_fails_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvcc = tmp_path / 'bin/nvcc'
    nvcc.parent.mkdir()
    nvcc.write_text('#!/bin/sh\necho no such header >&2\nexit 1\n')
    nvcc.chmod(0o755)
    monkeypatch.setenv('CUDA_HOME', str(tmp_path))
    with pytest.raises(RuntimeError, match=r'nvcc fails:\nno such header'):
        mmcv_cuda.build(tmp_path / 'out', 90)


def nvcc_is_here() -> bool:
    try:
        return bool(mmcv_cuda.compiler())
    except RuntimeError:
        return False


@pytest.mark.slow
@pytest.mark.skipif(not nvcc_is_here(), reason='needs nvcc')
def test_the_operator_compiles_for_hopper(tmp_path: Path) -> None:
    content = mmcv_cuda.build(tmp_path, 90).read_bytes()
    assert b'sm_90' in content
    for name in (b'ms_deformable_im2col', b'ms_deformable_col2im', b'libtorch_cuda.so'):
        assert name in content


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or not nvcc_is_here(), reason='needs a CUDA device and nvcc')
def test_the_operator_runs(tmp_path: Path) -> None:
    major, minor = torch.cuda.get_device_capability()
    mmcv_cuda.build(tmp_path, 10 * major + minor)
    code = (
        'import torch\nfrom mmgate.benchmarks import ops\n'
        "inputs, points = ops.sampler_inputs([(8, 8), (4, 4)], 2, None, 2, 'cuda')\n"
        'found, expected = (run(*inputs, reference=points) for run in (ops._mmcv, ops._grid_sample))\n'
        'torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)\n'
    )
    run_python('-c', code, PYTHONPATH=f'{tmp_path}:{ROOT}', MMGATE_TORCH_ALONE='1')

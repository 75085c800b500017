"""Compile mmcv's CUDA operator of deformable sampling alone, without a GPU, for a GPU machine without mmcv.

    python tools/dev/kernels/mmcv_cuda.py --capability 90 --out mmcv-sm90
    PYTHONPATH=mmcv-sm90:. python tools/dev/gpu.py --out DIR        # there: the benchmarks find mmcv's operator

Only benchmarks need it, to compare with the operator. The folder ``mmcv-sm90`` has the operator in half a package
``mmcv``, for machines without another one. It needs nvcc and a C++ compiler here. It takes the sources of the installed
mmcv, or of an unpacked source distribution (``pip download --no-deps --no-binary :all: mmcv``), and torch's headers.
These have to be of the torch release of the GPU machine: ``--torch`` names the folder ``torch`` of an unpacked wheel. A
CPU build's headers serve as well.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

ALONE = Path(__file__).parent / 'mmcv_alone'
SOURCE = 'pytorch/cuda/ms_deform_attn_cuda.cu'
OPERATORS = 'mmcv/ops/csrc'  # in a source distribution and in an installed package's parent
# Newer torch lacks the first header, which mmcv includes. The others belong to libraries of which torch's headers name
# types, and the operator calls nothing; a compiler of CUDA alone comes without them.
SHIMS = {
    'THC/THCAtomics.cuh': '#include <ATen/cuda/Atomic.cuh>',
    'cublas_v2.h': 'typedef struct cublasContext *cublasHandle_t; typedef int cublasStatus_t;',
    'cublasLt.h': 'typedef struct cublasLtContext *cublasLtHandle_t;',
    'cusolver_common.h': 'typedef int cusolverStatus_t;',
    'cusolverDn.h': 'typedef struct cusolverDnContext *cusolverDnHandle_t;',
    'cusparse.h': 'typedef struct cusparseContext *cusparseHandle_t; typedef int cusparseStatus_t;',
}
# Libraries that a torch for CUDA has loaded before it loads the operator, which finds its symbols in them.
LOADED = ('c10', 'c10_cuda', 'torch', 'torch_cpu', 'torch_cuda')


def sources_of(folder: Path | None) -> Path:
    """Return the folder ``csrc`` of mmcv's operators, in an unpacked source distribution or in the installed mmcv.

    Raises:
        RuntimeError: The operator's source is not there.
    """
    if folder is not None:
        root = folder / OPERATORS
    else:
        found = importlib.util.find_spec('mmcv')
        if found is None or found.origin is None:
            raise RuntimeError('mmcv is not installed; --source names an unpacked source distribution of it.')
        root = Path(found.origin).parents[1] / OPERATORS
    if not (root / SOURCE).exists():
        raise RuntimeError(
            f'{root / SOURCE} does not exist: this mmcv comes without its sources. '
            '--source names an unpacked source distribution of it.'
        )
    return root


def shims(folder: Path, includes: Sequence[Path]) -> None:
    """Write those of :data:`SHIMS` into ``folder`` that none of the folders ``includes`` has."""
    for name, text in SHIMS.items():
        if not any((path / name).exists() for path in includes):
            header = folder / name
            header.parent.mkdir(parents=True, exist_ok=True)
            header.write_text(f'#pragma once\n{text}\n')


def compiler() -> tuple[str, Path]:
    """Return nvcc and the folder of CUDA, which ``CUDA_HOME`` may name.

    Raises:
        RuntimeError: There is no nvcc.
    """
    home = os.environ.get('CUDA_HOME')
    nvcc = shutil.which('nvcc', path=f'{home}/bin' if home else None)
    nvcc = nvcc or shutil.which('/usr/local/cuda/bin/nvcc')
    if nvcc is None:
        raise RuntimeError("mmcv's CUDA operator cannot be compiled: nvcc was not found; set CUDA_HOME.")
    listed = subprocess.run([nvcc, '--dryrun', 'x.cu'], capture_output=True, text=True, check=False).stderr
    top = next((line.partition('=')[2] for line in listed.splitlines() if line.startswith('#$ TOP=')), '')
    return nvcc, Path(top or Path(nvcc).resolve().parents[1])


def build(out: Path, capability: int, source: Path | None = None, torch_folder: Path | None = None) -> Path:
    """Compile the operator into a package ``mmcv`` in ``out`` and return the library.

    Args:
        out: Folder for ``PYTHONPATH``.
        capability: Compute capability of the GPU, 90 for sm_90.
        source: Unpacked source distribution of mmcv; the installed one by default.
        torch_folder: Folder of the torch package with the headers to compile for; the installed one by default.

    Raises:
        RuntimeError: A source, nvcc or a header is missing, or a compiler fails; the message says which.
    """
    csrc = sources_of(source)
    nvcc, home = compiler()
    if torch_folder is None:
        torch_folder = Path(importlib.util.find_spec('torch').origin).parent  # type: ignore[union-attr, arg-type]
    headers = torch_folder / 'include'
    includes = [csrc / 'common/cuda', csrc / 'common', csrc / 'pytorch', headers]
    includes += [headers / 'torch/csrc/api/include', home / 'include']
    package = out / 'mmcv/ops'
    package.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        shims(work / 'shims', includes)
        options = ['-std=c++20', '-O3', '-DMMCV_WITH_CUDA', *(f'-I{path}' for path in (work / 'shims', *includes))]
        if not (headers / 'c10/cuda/impl/cuda_cmake_macros.h').exists():
            options.append('-DC10_CUDA_NO_CMAKE_CONFIGURE_FILE')
        target = f'arch=compute_{capability},code=sm_{capability}'
        nvcc_options = ['-gencode', target, '--expt-relaxed-constexpr', '-Xcompiler', '-fPIC', '-w']
        _run([nvcc, *options, *nvcc_options, '-c', str(csrc / SOURCE), '-o', str(work / 'operator.o')])
        compiled = [os.environ.get('CXX', 'g++'), *options, '-fPIC', '-w']
        _run([*compiled, '-c', str(ALONE / 'binding.cpp'), '-o', str(work / 'binding.o')])
        # Empty libraries of the names that are loaded there: this torch may be built without CUDA.
        for library in LOADED:
            _run([compiled[0], '-shared', f'-Wl,-soname,lib{library}.so', '-o', str(work / f'lib{library}.so')])
        linked = [nvcc, '-shared', '--cudart', 'shared', str(work / 'operator.o'), str(work / 'binding.o')]
        linked += ['-Xlinker', '--no-as-needed', f'-L{work}', *(f'-l{library}' for library in LOADED)]
        _run([*linked, '-o', str(package / 'operator.so')])
    version = subprocess.run([nvcc, '--version'], capture_output=True, text=True, check=True).stdout
    version = version.partition('release ')[2].partition(',')[0]
    (out / 'mmcv/__init__.py').write_text('"""Half of mmcv: its operator of deformable sampling."""\n')
    names = 'from . import multi_scale_deform_attn\n\n__all__ = ["multi_scale_deform_attn"]\n'
    (package / '__init__.py').write_text(f'{names}\n\ndef get_compiling_cuda_version():\n    return {version!r}\n')
    shutil.copy(ALONE / 'multi_scale_deform_attn.py', package)
    return package / 'operator.so'


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f'{command[0]} fails:\n{done.stderr[-3000:]}')


def main() -> None:
    """Compile and tell the size."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='folder for PYTHONPATH on the GPU machine')
    parser.add_argument('--capability', type=int, default=90, help='of the GPU: 90 = sm_90')
    parser.add_argument('--source', type=Path, help='unpacked source distribution of mmcv; default: the installed mmcv')
    parser.add_argument('--torch', type=Path, help='folder of the torch package to compile for; default: this one')
    args = parser.parse_args()
    library = build(args.out, args.capability, args.source, args.torch)
    print(f'compiled {library}, {library.stat().st_size / 1000:.0f} kB')


if __name__ == '__main__':
    main()

"""Run a script with mmcv's CUDA operator of deformable sampling, which is compiled if mmcv was built without CUDA.

    python tools/dev/kernels/mmcv_cuda.py tools/analysis_tools/benchmark_ops.py --device cuda

Only benchmarks need it, to compare with the operator; only the two files of the operator are compiled.
"""

from __future__ import annotations

import os
import runpy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch

NAME = 'mmgate_mmcv_ms_deform_attn'
BINDING = """
#include <torch/extension.h>

at::Tensor ms_deform_attn_cuda_forward(
    const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, const int);
void ms_deform_attn_cuda_backward(
    const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &, const at::Tensor &,
    const at::Tensor &, at::Tensor &, at::Tensor &, at::Tensor &, const int);

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  namespace py = pybind11;
  m.def("ms_deform_attn_forward", &ms_deform_attn_cuda_forward, py::arg("value"), py::arg("value_spatial_shapes"),
        py::arg("value_level_start_index"), py::arg("sampling_locations"), py::arg("attention_weights"),
        py::arg("im2col_step"));
  m.def("ms_deform_attn_backward", &ms_deform_attn_cuda_backward, py::arg("value"), py::arg("value_spatial_shapes"),
        py::arg("value_level_start_index"), py::arg("sampling_locations"), py::arg("attention_weights"),
        py::arg("grad_output"), py::arg("grad_value"), py::arg("grad_sampling_loc"), py::arg("grad_attn_weight"),
        py::arg("im2col_step"));
}
"""


def sources() -> tuple[list[Path], list[Path]]:
    """Return mmcv's CUDA source of the operator and the folders of its headers.

    Raises:
        RuntimeError: The installed mmcv carries no sources.
    """
    import mmcv.ops

    root = Path(mmcv.ops.__file__).parent / 'csrc'
    source = root / 'pytorch/cuda/ms_deform_attn_cuda.cu'
    if not source.exists():
        raise RuntimeError(
            f'{source} does not exist: this mmcv was installed without its sources. '
            'Install it from its source distribution, or build it where torch.version.cuda is set and nvcc is found.'
        )
    return [source], [root / 'common/cuda', root / 'common', root / 'pytorch']


def shim(folder: Path, includes: list[str]) -> list[Path]:
    """Write a header under a name that mmcv includes and newer torch lacks; return the folder to search, if any."""
    if any((Path(path) / 'THC/THCAtomics.cuh').exists() for path in includes):
        return []
    header = folder / 'THC/THCAtomics.cuh'
    header.parent.mkdir(parents=True, exist_ok=True)
    if not header.exists():
        header.write_text('#include <ATen/cuda/Atomic.cuh>\n')
    return [folder]


def build_operator() -> Any:
    """Compile mmcv's operator for this GPU, half a minute once (it is kept in MMGATE_CACHE), and return the module.

    Raises:
        RuntimeError: There is no GPU, no nvcc, or the compilation failed; the message says which.
    """
    from torch.utils import cpp_extension

    if not torch.cuda.is_available():
        raise RuntimeError("mmcv's CUDA operator cannot be built: torch sees no CUDA device.")
    if cpp_extension.CUDA_HOME is None or shutil.which('nvcc', path=f'{cpp_extension.CUDA_HOME}/bin') is None:
        raise RuntimeError("mmcv's CUDA operator cannot be built: nvcc was not found; set CUDA_HOME.")
    files, headers = sources()
    cache = Path(os.environ.get('MMGATE_CACHE', Path.home() / '.cache/mmgate'))
    capability = '.'.join(map(str, torch.cuda.get_device_capability()))
    folder = cache / 'mmcv_cuda' / f'torch{torch.__version__}-sm{capability}'
    folder.mkdir(parents=True, exist_ok=True)
    binding = folder / 'binding.cpp'
    if not binding.exists() or binding.read_text() != BINDING:  # a new date would compile it again
        binding.write_text(BINDING)
    headers = headers + shim(folder / 'include', cpp_extension.include_paths(device_type='cuda'))
    return cpp_extension.load(
        NAME,
        [str(path) for path in (binding, *files)],
        extra_include_paths=[str(path) for path in headers],
        extra_cuda_cflags=['-O3', '-DMMCV_WITH_CUDA'],
        build_directory=str(folder),
    )


def provide_operator() -> None:
    """Make mmcv's deformable attention run on CUDA in this process.

    Raises:
        RuntimeError: See :func:`build_operator`.
    """
    from mmcv.ops import get_compiling_cuda_version, multi_scale_deform_attn

    from mmgate.ops.ms_deform_attn import mmcv as backend

    if get_compiling_cuda_version() == 'not available':
        multi_scale_deform_attn.ext_module = build_operator()
        backend.missing.cache_clear()


if __name__ == '__main__':
    provide_operator()
    sys.argv = sys.argv[1:]
    sys.path[0] = str(Path(sys.argv[0]).parent)
    runpy.run_path(sys.argv[0], run_name='__main__')

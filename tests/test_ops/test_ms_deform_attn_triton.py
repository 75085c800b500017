"""The Triton sampler: in the interpreter on small shapes, on a GPU at real ones, against the float64 reference."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_same, values_and_gradients
from torch import Tensor

from mmgate.ops import ms_deform_attn
from mmgate.ops import ms_deform_attn_triton as fused
from mmgate.ops.triton_backend import interpreted

pytest.importorskip('triton')
ON_GPU = pytest.mark.gpu
DEVICES = [pytest.param('cpu', id='interpreter'), pytest.param('cuda', id='gpu', marks=ON_GPU)]
SMALL = [(3, 5), (1, 1), (2, 1)]
REAL = [(100, 134), (50, 67), (25, 34), (13, 17)]
CASES: dict[str, dict[str, Any]] = {  # name: what differs from the default
    'default': {},
    'ungated': dict(gate=None),
    'no_residual': dict(residual=False),
    'post_softmax': dict(position='post_softmax'),
    'post_softmax_no_residual': dict(position='post_softmax', residual=False),
    'gate_per_point': dict(gate=(1, 1, 1)),
    'gate_per_level': dict(gate=(0, 1, 0)),
    'offsets_from_points': dict(reference=2),
    'offsets_from_boxes': dict(reference=4),
    'one_level': dict(levels=[(4, 3)], points=3),
    'dim_20': dict(dim=20),
    'huge_logits': dict(logit_scale=1e4),
}


@pytest.fixture(autouse=True)
def _device(request: pytest.FixtureRequest) -> None:
    on_gpu = request.node.get_closest_marker('gpu') is not None
    if on_gpu and not torch.cuda.is_available():
        pytest.skip('needs a CUDA device')
    if not on_gpu and not interpreted():
        pytest.skip('the kernels are compiled in this process, not interpreted')


def make(
    device: str = 'cpu',
    levels: list[tuple[int, int]] = SMALL,
    points: int = 2,
    dim: int = 16,
    queries: int = 5,
    heads: int = 2,
    batch: int = 2,
    gate: tuple[int, int, int] | None = (1, 1, 0),
    reference: int = 0,
    logit_scale: float = 1.0,
    dtype: torch.dtype = torch.float32,
) -> list[Tensor | None]:
    """Value, shapes, starts, points, logits, gate and reference points; a third of the samples miss the map."""
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator, dtype=torch.float64)

    shapes = torch.tensor(levels)
    areas = shapes.prod(1)
    count = len(levels)
    locations = rand(batch, queries, heads, count, points, 2) * 2.2 - 0.6
    anchors = None
    if reference:
        anchors = rand(batch, queries, count, reference) * 0.8 + 0.1
        locations = (locations - 0.5) * 6
    logits = (rand(batch, queries, heads, count, points) - 0.5) * 4 * logit_scale
    gates = None if gate is None else rand(
        batch, queries, *(n if own else 1 for n, own in zip((heads, count, points), gate, strict=True))
    ) - 0.5  # fmt: skip
    value = rand(batch, int(areas.sum()), heads, dim) - 0.5
    tensors = [value, shapes, areas.cumsum(0) - areas, locations, logits, gates, anchors]
    return [
        None if t is None else t.to(device) if not t.is_floating_point() else t.to(device, dtype) for t in tensors
    ]  # fmt: skip


def run(backend: str, **options: Any):
    def call(value, shapes, starts, points, logits, gate, reference):
        return ms_deform_attn(
            value, shapes, starts, points, logits, gate, reference_points=reference, backend=backend, **options
        )

    return call


def compare(inputs: list[Tensor | None], tolerance: float, **options: Any) -> None:
    present = [i for i in (0, 3, 4, 5, 6) if inputs[i] is not None]
    used = [i for i, t in enumerate(inputs) if t is not None]

    def partial(function):
        def call(*tensors):
            full = [None] * 7
            for i, t in zip(used, tensors, strict=True):
                full[i] = t
            return function(*full)

        return call

    differentiable = [used.index(i) for i in present]
    exact = [inputs[i].double() if inputs[i].is_floating_point() else inputs[i] for i in used]
    expected = values_and_gradients(partial(run('torch', **options)), exact, differentiable)
    actual = values_and_gradients(partial(run('triton', **options)), [inputs[i] for i in used], differentiable)
    for name, value in expected.items():
        scale = value.abs().max().clamp(min=1e-3).item()
        assert_same({name: actual[name]}, {name: value}, rtol=tolerance, atol=tolerance * scale)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('name', CASES)
def test_equals_the_reference(name: str, device: str) -> None:
    case = dict(CASES[name])
    options = {key: case.pop(key) for key in ('residual', 'position') if key in case}
    if device == 'cuda':
        case = dict(dict(levels=REAL, points=4, dim=32, queries=2000, heads=8), **case)
    compare(make(device, **case), 1e-3 if name == 'huge_logits' else 2e-5, **options)


@pytest.mark.parametrize('device', DEVICES)
@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize('reference', [0, 2], ids=['locations', 'offsets'])
def test_half_precision(dtype: torch.dtype, reference: int, device: str) -> None:
    """Values and outputs are rounded to 16 bits, nothing between."""
    inputs = make(device, reference=reference)
    inputs = [t.to(dtype).to(torch.float32) if t is not None and t.is_floating_point() else t for t in inputs]
    rounded = [t.to(dtype) if t is not None and t.is_floating_point() else t for t in inputs]
    actual, expected = run('triton')(*rounded), run('torch')(*inputs)
    assert actual.dtype is dtype
    step = 2.0**-10 if dtype is torch.float16 else 2.0**-7
    torch.testing.assert_close(actual.float(), expected, rtol=step, atol=step * 0.05)


@pytest.mark.parametrize('device', DEVICES)
def test_registered_op(device: str) -> None:
    value, shapes, starts, points, logits, gate, reference = make(device, reference=2)
    leaves = [t.requires_grad_() for t in (value, points, reference, logits, gate)]
    inputs = (value, shapes, starts, points, reference, logits, gate, True, False)
    torch.library.opcheck(torch.ops.mmgate.ms_deform_attn_fused.default, inputs)
    assert all(leaf.requires_grad for leaf in leaves)


@pytest.mark.parametrize('device', DEVICES)
def test_compiles_without_a_graph_break(device: str) -> None:
    inputs = make(device)
    backend = 'aot_eager' if device == 'cpu' else 'inductor'
    compiled = torch.compile(run('triton'), fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(*inputs), run('triton')(*inputs))


@pytest.mark.parametrize('device', DEVICES)
def test_deterministic_backward(device: str) -> None:
    inputs = make(device, reference=4)
    value = inputs[0].requires_grad_()
    gradients = []
    for deterministic in (False, True, True):
        torch.use_deterministic_algorithms(deterministic)
        try:
            (grad,) = torch.autograd.grad(run('triton')(*inputs).square().sum(), value)
        finally:
            torch.use_deterministic_algorithms(False)
        gradients.append(grad)
    torch.testing.assert_close(gradients[1], gradients[0])
    assert torch.equal(gradients[1], gradients[2])


@pytest.mark.parametrize('device', DEVICES)
def test_recomputation_and_autocast(device: str) -> None:
    inputs = make(device)
    value = inputs[0].requires_grad_()
    plain = torch.autograd.grad(run('triton')(*inputs).square().sum(), value)
    output = torch.utils.checkpoint.checkpoint(run('triton'), *inputs, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(output.square().sum(), value), plain)
    with torch.autocast(device, torch.bfloat16):
        assert run('triton')(*inputs).dtype is torch.float32  # the inputs' type, as every backend


@pytest.mark.gpu
def test_cuda_graph() -> None:
    inputs = make('cuda', levels=REAL, points=4, dim=32, queries=300, heads=8)
    expected = run('triton')(*inputs)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run('triton')(*inputs)
    output.fill_(float('nan'))
    graph.replay()
    torch.testing.assert_close(output, expected)


def test_no_queries_and_refusals() -> None:
    inputs = make(queries=0)
    assert run('triton')(*inputs).shape == (2, 0, 32)
    with pytest.raises(ValueError, match='float64'):
        run('triton')(*make(dtype=torch.float64))
    with pytest.raises(ValueError, match='128 channels or fewer'):
        run('triton')(*make(dim=160))
    with pytest.raises(ValueError, match=r'reference_points must have 2 or 4 columns, got 3'):
        inputs = make()
        run('triton')(*inputs[:6], torch.rand(2, 5, 3, 3))


def test_auto_keeps_to_what_was_measured() -> None:
    """No GPU has been measured, so no GPU is in the table; on the CPU the interpreter is never chosen."""
    assert fused.AHEAD_OF_MMCV == ()
    value = make()[0]
    assert not fused.preferred(value)


COMPILE = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from mmgate.ops import ms_deform_attn_kernels as kernels
kernel, dtype, dim, queries = getattr(kernels, sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
constants = dict(LEVELS=4, POINTS=4, PADDED=16, D=dim, BLOCK_D=dim, REFERENCE=2, GATED=True, RESIDUAL=True, POST=False)
constants.update(BLOCK_Q=queries, **({'SCATTER': True} if 'backward' in sys.argv[1] else {}))
types = {}
for name in kernel.arg_names:
    if name in constants:
        types[name] = 'constexpr'
    elif name in ('shapes_ptr', 'starts_ptr'):
        types[name] = '*i64'
    elif name.startswith('grad_') and name.endswith('_ptr') and name != 'grad_ptr':
        types[name] = '*fp32'
    else:
        types[name] = '*' + dtype if name.endswith('_ptr') else 'i32'
source = triton.compiler.ASTSource(kernel, types, constants)
compiled = triton.compile(source, target=GPUTarget('cuda', 90, 32), options=dict(num_warps=4))
open(sys.argv[5], 'wb').write(compiled.asm['cubin'])
"""


@pytest.mark.parametrize('dtype', ['fp32', 'bf16', 'fp16'])
@pytest.mark.parametrize('kernel', ['forward_kernel', 'backward_kernel'])
def test_compiles_for_hopper_without_spills(tmp_path: Path, kernel: str, dtype: str) -> None:
    """No device is needed: Triton brings its own assembler. What spills lies on the stack or in local memory."""
    import triton

    tool = Path(triton.__file__).parent / 'backends/nvidia/bin/cuobjdump'
    if not tool.exists():
        pytest.skip('this Triton brings no cuobjdump')
    cubin = tmp_path / 'kernel.cubin'
    environment = {k: v for k, v in os.environ.items() if k != 'TRITON_INTERPRET'}
    arguments = [kernel, dtype, '32', str(fused.BLOCK_Q[kernel][32]), str(cubin)]
    command = [sys.executable, '-c', COMPILE, *arguments]
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr[-2000:]
    usage = subprocess.run([tool, '-res-usage', cubin], capture_output=True, text=True).stdout
    assert f'Function {kernel}' in usage and 'STACK:0' in usage and 'LOCAL:0' in usage, usage

"""Compare the backends of the operators with the float64 reference on this machine, and time them."""

from __future__ import annotations

import importlib.metadata
import logging
import platform
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from mmgate import mmcv_ext
from mmgate.benchmarks.measure import MODES, describe_machine, environment, measure
from mmgate.benchmarks.ops import LEVELS, sampler_inputs
from mmgate.errors import first_line
from mmgate.gates.plug import GatingModulation
from mmgate.ops import backend as choice
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops import native as library
from mmgate.ops.native import why_not_native

PACKAGES = ('torch', 'triton', 'mmgate', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'numpy')
DTYPES = {name: getattr(torch, name) for name in ('float32', 'float16', 'bfloat16')}
TOLERANCE = {'float32': 5e-3, 'float16': 2e-2, 'bfloat16': 6e-2}  # relative to the largest value
REFERENCE = 'torch'  # a backend, whose maps of the sizes that are timed would not fit into memory
SECONDS = 1.0  # for timing a mode
REPETITIONS = 10


class Example(NamedTuple):
    """A call of an operator: a function of the inputs and ``backend``, the inputs, and the gate's parameters."""

    call: Callable[..., Tensor]
    inputs: list[Tensor]
    parameters: list[Tensor]


def examine(device: str | None, dtypes: Sequence[str] | None, *, timed: bool) -> bool:
    """Print packages and backends, and compare each backend with the reference; return True if all agree.

    Args:
        device: Name of the device; None takes a GPU if torch sees one.
        dtypes: Names of dtypes; None takes float32, on a GPU all.
        timed: True prints times, too.
    """
    place = torch.device(device or ('cuda' if torch.cuda.is_available() else 'cpu'))
    dtypes = dtypes or (list(DTYPES) if place.type == 'cuda' else ['float32'])
    operators = [f'mmcv has no compiled operators: {mmcv_ext.IN_TORCH}'] if mmcv_ext.provided() else []
    print(_packages(), describe_machine(place), *operators, *_backends(place), sep='\n')
    logging.disable(logging.INFO)
    try:
        # A user's variables would have the last word.
        with environment(**{f'MMGATE_{op.upper()}': '' for op in choice.OPERATORS}):
            right = print_comparison(place, dtypes)
            if timed:
                print_times(place, dtypes)
    finally:
        logging.disable(logging.NOTSET)
    return right


def build_native() -> int:
    """Compile the CPU kernel of deformable attention and return the exit status."""
    try:
        print(f'compiled {library.build.build()}')
    except RuntimeError as error:
        print(f'The CPU kernel is not compiled: {error}')
        return 1
    library.load.cache_clear()
    why_not = why_not_native(torch.empty(0))
    print(why_not or "'native' runs from now on")
    return int(why_not is not None)


def _packages() -> str:
    """Return a text with the versions of the installed packages, and their distribution if it has another name."""
    found = [f'python {platform.python_version()}']
    distributions = importlib.metadata.packages_distributions()
    for name in PACKAGES:
        distribution = distributions.get(name, [name])[0]
        try:
            version = importlib.metadata.version(distribution)
        except importlib.metadata.PackageNotFoundError:
            version = '-'
        found.append(f'{name} {version}' + f' ({distribution})' * (distribution != name))
    return ', '.join([*found, f'cuda {torch.version.cuda or torch.version.hip or "-"}'])


def _backends(device: torch.device) -> list[str]:
    """Return the lines of all backends, in the order of ``'auto'``, with the reason why one cannot run."""
    lines = ['', "Backends; 'auto' takes the first of an operator that can run"]
    heads = torch.empty(1, 1, 1, 1, device=device)
    for op, backends in choice.OPERATORS.items():
        order = choice.in_order(backends, heads)
        for backend in [*order, *(x for x in backends if x not in order)]:
            by_name = '' if backend in order else ', by its name alone'
            lines.append(f'  {op:16} {backend.name:12} {backend.why_not(heads) or f"can run{by_name}"}')
    return lines


def _runnable(device: torch.device, dtypes: Sequence[str]) -> list[tuple[str, str, str]]:
    """Return operator, dtype and name of the backends that can run on the device."""
    heads = {dtype: torch.empty(1, 1, 1, 1, device=device, dtype=DTYPES[dtype]) for dtype in dtypes}
    return [
        (op, dtype, backend.name)
        for op, backends in choice.OPERATORS.items()
        for dtype in dtypes
        for backend in backends
        if backend.why_not(heads[dtype]) is None
    ]


def small_example(op: str, dtype: str, device: torch.device) -> Example:
    """Return a call of an operator that takes a moment: sampling from boxes, or tokens of which some are padding."""
    if op == 'ms_deform_attn':
        return _sampler([(6, 5), (3, 2)], 7, 4, dtype, device, batch=1)
    return _plug(2, 37, dtype, device, padded=7)


def large_examples(op: str, dtype: str, device: torch.device) -> dict[str, Example]:
    """Return calls of an operator as encoders and decoders make them, by the name of their size."""
    if op == 'ms_deform_attn':
        sizes: dict[str, tuple[int | None, int]] = {'encoder': (None, 2), 'decoder900': (900, 4)}
        return {name: _sampler(LEVELS, *size, dtype, device, batch=2) for name, size in sizes.items()}
    return {f'N{tokens}': _plug(8, tokens, dtype, device) for tokens in (1024, 4096)}


def _sampler(
    levels: list[tuple[int, int]], queries: int | None, columns: int, dtype: str, device: torch.device, *, batch: int
) -> Example:
    inputs, reference = sampler_inputs(levels, batch, queries, columns, str(device))

    def call(value: Tensor, *rest: Tensor, backend: str) -> Tensor:
        reference_points = reference.to(torch.promote_types(value.dtype, reference.dtype))
        return ms_deform_attn(value, *rest, reference_points=reference_points, backend=backend)

    return Example(call, [x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in inputs], [])


def _plug(heads: int, tokens: int, dtype: str, device: torch.device, *, padded: int = 0) -> Example:
    generator = torch.Generator().manual_seed(0)
    inputs = [torch.randn(2, h, tokens, 32, generator=generator) for h in (heads, heads, heads, 1, 1)]
    padding = torch.arange(tokens, device=device) >= tokens - padded
    bias = torch.zeros(2, 1, 1, tokens, device=device).masked_fill(padding, -torch.inf) if padded else None
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)

    def call(q: Tensor, k: Tensor, v: Tensor, gate_q: Tensor, gate_k: Tensor, backend: str) -> Tensor:
        return plug_attention(q, k, v, gate_q, gate_k, gml, bias, backend=backend)

    return Example(call, [x.to(device, DTYPES[dtype]) for x in inputs], list(gml.parameters()))


def print_comparison(device: torch.device, dtypes: Sequence[str]) -> bool:
    """Print for each backend whether it agrees with the reference; return True if all do."""
    print(
        f'\nBeside the {"float64" if _has_float64(device) else "float32"} reference, output and every gradient',
        flush=True,
    )
    right = True
    for op, dtype, backend in _runnable(device, dtypes):
        # A backend that crashes is the last one that is named.
        print(f'  {op:16} {dtype:9} {backend:12}', end=' ', flush=True)
        wrong = disagreement(op, dtype, backend, device)
        right = right and wrong is None
        print(wrong or 'agrees', flush=True)
    return right


def _has_float64(device: torch.device) -> bool:
    """Return False for Apple's GPUs."""
    return device.type != 'mps'


def disagreement(op: str, dtype: str, backend: str, device: torch.device) -> str | None:
    """Compare a backend's output and gradients with the reference's in float64; return what is wrong, or None.

    A difference of :data:`TOLERANCE` times the largest right value is allowed.
    """
    example = small_example(op, dtype, device)
    try:
        found = outcome(example, backend)
        expected = outcome(example, REFERENCE, wide=_has_float64(device))
    except Exception as error:  # of any package
        return first_line(error)[:200]
    for name, right in expected.items():
        off = (found[name] - right).abs().max().item()
        scale = max(right.abs().max().item(), 1e-3)
        # This form is true for NaN, too.
        if not off <= TOLERANCE[dtype] * scale:
            return f'{name} is off by {off:.1e} where the reference has up to {scale:.1e}'
    return None


def outcome(example: Example, backend: str, wide: bool = False) -> dict[str, Tensor]:
    """Run an example forward and backward; return its output and all gradients, computed in float64 if ``wide``.

    The output's gradient is random and always the same.
    """
    inputs = [x.double() if wide and x.is_floating_point() else x.detach() for x in example.inputs]
    leaves = {f'argument {i}': x.requires_grad_() for i, x in enumerate(inputs) if x.is_floating_point()}
    leaves |= {f'parameter {i}': x for i, x in enumerate(example.parameters)}
    output = example.call(*inputs, backend=backend)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1)).to(output)
    gradients = torch.autograd.grad(output, list(leaves.values()), noise)
    found = {f'the gradient of {name}': x for name, x in zip(leaves, gradients, strict=True)}
    return {name: x.detach().float().cpu() for name, x in {'the output': output, **found}.items()}


def print_times(device: torch.device, dtypes: Sequence[str]) -> None:
    """Print the least time of each backend, as other work on the machine only adds time."""
    print('\nms ' + ', '.join(MODES))
    for op, dtype, backend in _runnable(device, dtypes):
        if backend == REFERENCE:
            continue
        for size, example in large_examples(op, dtype, device).items():
            print(f'  {op:16} {dtype:9} {size:10} {backend:12}', end=' ', flush=True)
            call = partial(example.call, backend=backend)
            try:
                print(' '.join(f'{_milliseconds(call, example.inputs, mode):10.4g}' for mode in MODES), flush=True)
            except Exception as error:  # of any package, or memory runs out
                print(first_line(error)[:200], flush=True)


def _milliseconds(call: Callable[..., Tensor], inputs: list[Tensor], mode: str) -> float:
    """Return the least time of up to ten runs, after one that warms up."""
    measure(call, inputs, mode)
    times: list[float] = []
    end = time.perf_counter() + SECONDS
    while not times or (len(times) < REPETITIONS and time.perf_counter() < end):
        times.append(1e3 * measure(call, inputs, mode)[0])
    return min(times)

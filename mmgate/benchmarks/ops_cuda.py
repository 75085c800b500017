"""Kernels beside their peers: deformable attention on a GPU, PLuG attention on a CPU, too.

Not run on a GPU by us yet; the plumbing is tried on the CPU in Triton's interpreter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from mmgate.analysis.probes.measures import pixel_centres
from mmgate.layers.gml import GatingModulation
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops.ms_deform_attn import attention_weights, grid_sample, offset_locations

from .ops import MODES, Row, deformable_inputs, interleaved, measure, row_of, saved_bytes

LEVELS = [(100, 167), (50, 84), (25, 42), (13, 21)]  # of an image of 800 x 1333
# name: (queries, None for one a pixel; columns of the reference points: 2 for points, 4 for boxes)
QUERIES: dict[str, tuple[int | None, int]] = {
    'encoder_b2': (None, 2),
    'decoder300_b2': (300, 2),
    'decoder900_b2': (900, 4),
}
TOKENS = {'cpu': (1024, 4096), 'cuda': (256, 1024, 4096, 16384)}
Providers = Mapping[str, Callable[..., Tensor]]
EAGER_UP_TO = 4096  # tokens; its maps fill a GPU beyond
COPY = {'cpu': 1 << 20, 'cuda': 1 << 28}  # numbers copied to measure the bandwidth


def _glue(inputs: tuple[Tensor, ...], reference: Tensor) -> tuple[Tensor, ...]:
    """What precedes another's sampler: gate, softmax and locations, each a pass over memory."""
    value, shapes, start, offsets, logits, gate = inputs
    return value, shapes, start, offset_locations(offsets, reference, shapes), attention_weights(logits, gate)


def _mmcv(*inputs: Tensor, reference: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

    return MultiScaleDeformableAttnFunction.apply(*_glue(inputs, reference), 64)


def _mmcv_half(value: Tensor, *inputs: Tensor, reference: Tensor) -> Tensor:
    return _mmcv(value.half(), *inputs, reference=reference).float()  # it takes locations and weights to half, too


def _grid_sample(*inputs: Tensor, reference: Tensor) -> Tensor:
    return grid_sample.sample(*_glue(inputs, reference))


def _attend(*inputs: Tensor, reference: Tensor, backend: str = 'triton') -> Tensor:
    return ms_deform_attn(*inputs, reference_points=reference, backend=backend)


def _ungated(*inputs: Tensor, reference: Tensor) -> Tensor:
    return _attend(*inputs[:-1], reference=reference)


def _in_bfloat16(*inputs: Tensor, reference: Tensor) -> Tensor:
    """All in bfloat16 that linear layers give under autocast: values, offsets, logits and gate."""
    rounded = [x.bfloat16() if x.is_floating_point() else x for x in inputs]
    return _attend(*rounded, reference=reference).float()


def sampler_inputs(
    levels: list[tuple[int, int]], batch: int, queries: int | None, columns: int, device: str, **sizes: int
) -> tuple[list[Tensor], Tensor]:
    """Return value, shapes, starts, offsets, logits and gate of an encoder's or a decoder's layer, and its reference.

    The reference points need no gradient, as in an encoder and in a decoder that refines boxes.
    Offsets spread over two pixels of their level from points, over the boxes' size from boxes a tenth of the image.
    The ``sizes`` are those of :func:`deformable_inputs`.
    """
    value, shapes, start, _, logits = deformable_inputs(levels, batch, **sizes)
    generator = torch.Generator().manual_seed(1)
    count = min(queries or value.shape[1], value.shape[1])
    logits = logits[:, :count].contiguous()
    if queries is None:
        points = pixel_centres(levels).expand(batch, -1, -1)
    else:
        points = torch.rand(batch, count, 2, generator=generator)
    if columns == 4:
        points = torch.cat([points, torch.full_like(points, 0.1)], -1)
    offsets = 2 * torch.randn(*logits.shape, 2, generator=generator)
    gate = 0.3 * torch.randn(*logits.shape[:4], 1, generator=generator)
    reference = points[:, :, None].expand(-1, -1, len(levels), -1).contiguous()
    return [x.to(device) for x in (value, shapes, start, offsets, logits, gate)], reference.to(device)


def benchmark_ms_deform_attn(
    repetitions: int = 20,
    *,
    device: str = 'cuda',
    levels: list[tuple[int, int]] = LEVELS,
    queries: dict[str, tuple[int | None, int]] = QUERIES,
    batch: int = 2,
    **sizes: int,
) -> Iterator[Row]:
    """Measure the Triton kernel beside mmcv's operator (the peer, where there is one) and grid_sample.

    All start from offsets, logits and gate. Yields time, peak memory, the bytes kept for the backward pass, the share
    of the measured bandwidth at which what must be read and written once would pass, and the error of the output.
    """
    runs: dict[str, Callable[..., Tensor]] = {'mmcv': _mmcv, 'mmcv, half': _mmcv_half, 'grid_sample': _grid_sample}
    runs |= {'triton': _attend, 'triton, ungated': _ungated, 'triton, bfloat16': _in_bfloat16}
    bandwidth = measured_bandwidth(device)
    for x, (count, columns) in queries.items():
        inputs, reference = sampler_inputs(levels, batch, count, columns, device, **sizes)
        providers = {name: partial(run, reference=reference) for name, run in runs.items()}
        names: dict[str, None] = {}
        for row in _measured('ms_deform_attn', providers, x, inputs, repetitions):
            yield row
            names[row.provider] = None
            if row.metric == 'time':
                compulsory = _compulsory_bytes(inputs, row.provider, row.mode) + reference.nbytes
                share = 100 * compulsory / (row.y_50 / 1e3) / bandwidth
                yield row_of(row.op, row.provider, row.mode, 'of bandwidth', '%', x, [share], [share], reference.device)
        exact = partial(_attend, reference=reference.double(), backend='torch')
        yield from _errors({name: providers[name] for name in names}, x, inputs, exact)


def measured_bandwidth(device: str) -> float:
    """Return bytes a second that a copy reads and writes."""
    source = torch.empty(COPY[torch.device(device).type], device=device)
    seconds = min(measure(torch.Tensor.clone, [source], 'forward')[0] for _ in range(5))
    return 2 * source.nbytes / seconds


def _compulsory_bytes(inputs: list[Tensor], provider: str, mode: str) -> int:
    """Return what any kernel from offsets has to move once: inputs and output, and backward their gradients as well."""
    value, *rest = inputs
    itemsize = 2 if provider.endswith(('bfloat16', 'half')) else value.element_size()
    output = rest[3].shape[:2].numel() * value.shape[2:].numel() * itemsize
    given = sum(x.nbytes // (2 if provider.endswith('bfloat16') and x.is_floating_point() else 1) for x in rest)
    once = value.numel() * itemsize + given + output
    return once if mode == 'forward' else 3 * once  # backward reads all again and writes as many gradients


def _errors(providers: Providers, x: str, inputs: list[Tensor], reference: Callable[..., Tensor]) -> Iterator[Row]:
    """Yield the root mean square error over the reference's root mean square, in millionths."""
    with torch.no_grad():
        exact = reference(*(t.double() if t.is_floating_point() else t for t in inputs))
        for name, run in providers.items():
            if name.endswith('ungated'):
                continue
            error = 1e6 * ((run(*inputs) - exact).square().mean() / exact.square().mean()).sqrt().item()
            yield row_of('ms_deform_attn', name, 'forward', 'error', 'ppm', x, [error], [error], exact.device)


def _flex(gml: GatingModulation) -> Callable[..., Tensor]:
    """FlexAttention with the gate's map formed beforehand, which is what its score_mod can take."""
    compiled: Any = None

    def run(q: Tensor, k: Tensor, v: Tensor, gate_q: Tensor, gate_k: Tensor) -> Tensor:
        nonlocal compiled
        if compiled is None:
            from torch.nn.attention.flex_attention import flex_attention

            torch.compiler.reset()  # beyond eight sizes it would not be compiled, and slow
            compiled = torch.compile(flex_attention, dynamic=False)
        gate = gml(gate_q @ gate_k.transpose(-1, -2) / gate_q.shape[-1] ** 0.5)[:, 0]  # (B, N, M)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * (1 + gate[b, i, j])

        return compiled(q, k, v, score_mod=score_mod)

    return run


def benchmark_plug_attention(
    repetitions: int = 20,
    *,
    device: str = 'cuda',
    tokens: Sequence[int] | None = None,
    dtype: torch.dtype | None = None,
) -> Iterator[Row]:
    """Measure PLuG's backends beside the eager formulation (the peer), FlexAttention and ungated fused attention.

    The eager formulation holds the N x N maps, FlexAttention that of the gate; on a CPU it has no backward pass. Heads
    are 8 of 32 channels that share a gate, of an image in float32 on a CPU, of two in bfloat16 on a GPU.
    """
    on_cpu = torch.device(device).type == 'cpu'
    batch, dtype = 1 if on_cpu else 2, dtype or (torch.float32 if on_cpu else torch.bfloat16)
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)

    def run(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v, gate_q, gate_k: plug_attention(q, k, v, gate_q, gate_k, gml, backend=backend)

    for count in tokens or TOKENS['cpu' if on_cpu else 'cuda']:
        providers = {'eager': run('torch')} if count <= EAGER_UP_TO else {}
        providers |= {'chunked': run('chunked'), 'triton': run('triton'), 'FlexAttention and a map': _flex(gml)}
        providers['ungated SDPA'] = lambda q, k, v, *_: torch.nn.functional.scaled_dot_product_attention(q, k, v)
        inputs = [torch.randn(batch, heads, count, 32, device=device, dtype=dtype) for heads in (8, 8, 8, 1, 1)]
        yield from _measured('plug_attention', providers, f'N{count}', inputs, repetitions)


def _measured(op: str, providers: Providers, x: str, inputs: list[Tensor], repetitions: int) -> Iterator[Row]:
    """Yield time and peak memory of what runs in a mode, and the bytes that are kept for the backward pass."""
    names: dict[str, None] = {}
    for mode in MODES:
        names = {}
        for row in interleaved(op, providers, x, inputs, mode, repetitions):
            names[row.provider] = None
            yield row
    kept = {name: saved_bytes(providers[name], inputs) / 2**20 for name in names}
    for name, megabytes in kept.items():
        yield row_of(op, name, MODES[1], 'saved', 'MiB', x, [megabytes], [next(iter(kept.values()))], inputs[0].device)

"""Benchmark mmgate's operators and gated layers beside other packages' implementations (peers).

Tests run them on the CPU in Triton's interpreter.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gates.plug import GatingModulation
from mmgate.ops import ms_deform_attn, plug_attention
from mmgate.ops.deformable import attention_weights, offset_locations

from .measure import MODES, Row, interleaved

LEVELS_800 = [(100, 134), (50, 67), (25, 34), (13, 17)]
LEVELS_480 = [(60, 80), (30, 40), (15, 20), (8, 10)]
LEVELS = [(100, 167), (50, 84), (25, 42), (13, 21)]  # of an image of 800 x 1333


def _case(
    levels: list[tuple[int, int]], batch: int = 1, queries: int | None = None, columns: int = 2, **options: Any
) -> dict[str, Any]:
    return dict(levels=levels, batch=batch, queries=queries, columns=columns, **options)


CASES = {  # arguments of sampler_inputs, by device and name
    'cpu': {
        '800x1072': _case(LEVELS_800),
        '480x640': _case(LEVELS_480),
        'decoder300': _case(LEVELS_800, queries=300),
        'decoder900': _case(LEVELS_800, queries=900),
        'decoder900_d16': _case(LEVELS_800, queries=900, dim=16),
        '480x640_d16': _case(LEVELS_480, dim=16),
        '128x128_b8': _case([(16, 16), (8, 8), (4, 4), (2, 2)], 8),
        '480x640_spread': _case(LEVELS_480, distribution='spread'),
        '480x640_clustered': _case(LEVELS_480, distribution='clustered'),
    },
    'cuda': {
        'encoder_b2': _case(LEVELS, 2),
        'encoder_b2 grid': _case(LEVELS, 2, distribution='grid'),
        'encoder_b2 spread': _case(LEVELS, 2, distribution='spread'),
        'encoder_b2 clustered': _case(LEVELS, 2, distribution='clustered'),
        'decoder300_b2': _case(LEVELS, 2, 300),
        'decoder900_b2': _case(LEVELS, 2, 900, 4),
    },
}
# Where samples lie. 'near': around their reference points, two pixels apart at random. 'grid': in a line for each head,
# as Deformable DETR starts. 'spread': anywhere in the image. 'clustered': around eight places, where gradients collide.
DISTRIBUTIONS = ('near', 'grid', 'spread', 'clustered')
CLUSTERS = 8
# Tokens and dtype of dense attention; the most important come first on a GPU.
DENSE_CASES: dict[str, Sequence[tuple[int, torch.dtype]]] = {
    'cpu': ((1024, torch.float32), (4096, torch.float32)),
    'cuda': ((4096, torch.bfloat16), (4096, torch.float32), (1024, torch.bfloat16), (16384, torch.bfloat16)),
}
EAGER_UP_TO = 4096  # tokens; with more the eager maps fill a GPU


def pixel_centres(levels: Sequence[tuple[int, int]]) -> Tensor:
    """Return the centres of all pixels of all levels as (x, y) from 0 to 1, ``(S, 2)``."""
    grids = [torch.meshgrid((torch.arange(h) + 0.5) / h, (torch.arange(w) + 0.5) / w, indexing='ij') for h, w in levels]
    return torch.cat([torch.stack([x, y], -1).view(-1, 2) for y, x in grids])


def sampler_inputs(
    levels: list[tuple[int, int]],
    batch: int,
    queries: int | None,
    columns: int,
    device: str,
    *,
    heads: int = 8,
    dim: int = 32,
    points: int = 4,
    distribution: str = 'near',
) -> tuple[list[Tensor], Tensor]:
    """Return random inputs for deformable attention as in an encoder's or a decoder's layer, and reference points.

    The inputs are value, shapes, starts, offsets, logits and gate.

    An encoder (``queries`` None) has a query at every pixel of every level, a decoder ``queries`` at random places. The
    reference points need no gradient, as in an encoder and in a decoder that refines boxes. With 2 ``columns`` they are
    points, with 4 boxes of a tenth of the image. Offsets are one of :data:`DISTRIBUTIONS`, with noise in pixels of the
    level or in half boxes over P, whose deviation is 2 of ``'near'`` and 0.05 of others.
    """
    generator = torch.Generator().manual_seed(0)
    shapes = torch.tensor(levels)
    areas = shapes.prod(1)
    tokens = int(areas.sum())
    samples = (batch, min(queries or tokens, tokens), heads, len(levels), points)
    if queries is None:
        centres = pixel_centres(levels).expand(batch, -1, -1)
    else:
        centres = torch.rand(*samples[:2], 2, generator=generator)
    if columns == 4:
        centres = torch.cat([centres, torch.full_like(centres, 0.1)], -1)
    inputs = [
        torch.randn(batch, tokens, heads, dim, generator=generator),
        shapes,
        areas.cumsum(0) - areas,
        torch.randn(*samples, 2, generator=generator),
        torch.randn(samples, generator=generator),
        0.3 * torch.randn(*samples[:4], 1, generator=generator),
    ]
    reference = centres[:, :, None].expand(-1, -1, len(shapes), -1).contiguous()
    noise = 2 if distribution == 'near' else 0.05
    inputs[3] = noise * inputs[3] + _offsets(distribution, inputs[3], reference, shapes, generator)
    return [x.to(device) for x in inputs], reference.to(device)


def _offsets(
    distribution: str, like: Tensor, reference: Tensor, shapes: Tensor, generator: torch.Generator
) -> Tensor | float:
    """Return sampling offsets that place the points as a distribution says, such as near the query, without noise.

    The distribution is one of :data:`DISTRIBUTIONS`; the offsets broadcast to ``like``, (B, Q, H, L, P, 2).
    """
    batch, _, heads, _, points, _ = like.shape
    if distribution == 'near':
        return 0.0
    if distribution == 'grid':
        angles = torch.arange(heads) * (2 * torch.pi / heads)
        directions = torch.stack([angles.cos(), angles.sin()], -1)
        directions = directions / directions.abs().amax(-1, keepdim=True)  # to the edge of a square
        steps = torch.arange(1, points + 1)
        return directions[:, None, None] * steps[:, None]
    if distribution == 'spread':
        targets = torch.rand(like.shape, generator=generator)
    elif distribution == 'clustered':
        places = torch.rand(batch, CLUSTERS, 2, generator=generator)
        chosen = torch.randint(CLUSTERS, like.shape[:-1], generator=generator).flatten(1)
        targets = places.gather(1, chosen[..., None].expand(-1, -1, 2)).view(like.shape)
        targets = targets + 0.005 * torch.randn(like.shape, generator=generator)
    else:
        raise ConfigError(f'distribution={distribution!r} is unknown; choose one of {", ".join(DISTRIBUTIONS)}.')
    from_centres = targets - reference[:, :, None, :, None, :2]
    if reference.shape[-1] == 4:  # in half boxes over P
        return from_centres / reference[:, :, None, :, None, 2:] * 2 * points
    return from_centres * shapes.flip(-1)[:, None]  # in pixels


def benchmark_gated_layers(repetitions: int = 7) -> Iterator[Row]:
    """Measure layers with the SDPA gate and with M-DGSA beside a layer of plain fused attention.

    They have 256 channels and 8 heads.
    """
    from mmgate.gates import DGSAGate, SDPAGate
    from mmgate.gates.base.dense import make_gated

    def run(layer: nn.Module) -> Callable[[Tensor], Tensor]:
        return lambda x: layer(x, x, x, need_weights=False)[0]

    providers = {
        'plain SDPA': run(nn.MultiheadAttention(256, 8, batch_first=True)),
        'SDPA gate': run(make_gated(nn.MultiheadAttention(256, 8, batch_first=True), SDPAGate)),
        'M-DGSA': run(make_gated(nn.MultiheadAttention(256, 8, batch_first=True), DGSAGate)),
    }
    for tokens, _ in DENSE_CASES['cpu']:
        x = torch.randn(2, tokens, 256)
        for mode in MODES:
            yield from interleaved('gated_layers', providers, f'N{tokens}', [x], mode, repetitions)


def _glue(inputs: tuple[Tensor, ...], reference: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Compute the inputs of another package's sampler, locations and gated attention weights, from ours."""
    value, shapes, start, offsets, logits, gate = inputs
    return value, shapes, start, offset_locations(offsets, reference, shapes), attention_weights(logits, gate)


def _mmcv(*inputs: Tensor, reference: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction

    return MultiScaleDeformableAttnFunction.apply(*_glue(inputs, reference), 64)


def _mmcv_fallback(*inputs: Tensor, reference: Tensor) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    value, shapes, _, locations, weights = _glue(inputs, reference)
    return multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)


def _torch_ms_deform_attn(*inputs: Tensor, reference: Tensor) -> Tensor:
    from torch_ms_deform_attn import ms_deform_attn as peer

    return peer(*_glue(inputs, reference))


def _deformops(*inputs: Tensor, reference: Tensor) -> Tensor:
    from deformops.registry import msda

    value, shapes, start, locations, weights = _glue(inputs, reference)
    # Its kernels read weights in the dtype of the values.
    return msda(value, shapes, start, locations, weights.to(value.dtype), method='linear', fp32acc=True)


def _attend(*inputs: Tensor, reference: Tensor, backend: str = 'triton') -> Tensor:
    return ms_deform_attn(*inputs, reference_points=reference, backend=backend)


def _ungated(*inputs: Tensor, reference: Tensor) -> Tensor:
    return _attend(*inputs[:-1], reference=reference)


def benchmark_ms_deform_attn(repetitions: int = 20, *, device: str = 'cuda') -> Iterator[Row]:
    """Measure deformable attention: mmgate's kernel for the device, and other packages' (peers).

    All start from offsets, logits and gate. A peer that is not installed is left out with a warning; the first that
    runs is the one to compare with. With one thread on a CPU, time is the processor's, which others do not add to.
    """
    providers: dict[str, Callable[..., Tensor]] = {
        'torch-ms-deform-attn': _torch_ms_deform_attn,
        'mmcv': _mmcv_fallback,
        'native': partial(_attend, backend='native'),
    }
    if device != 'cpu':
        providers = {
            'mmcv': _mmcv,
            'mmcv, half': _mmcv,  # which casts locations and weights, too
            'torch_ms_deform_attn': _torch_ms_deform_attn,
            'deformops': _deformops,
            'deformops, bfloat16': _deformops,
            'grid_sample': partial(_attend, backend='grid_sample'),
            'triton': _attend,
            'triton, ungated': _ungated,
            'triton, bfloat16': _attend,
        }
    # As the linear layers before it give them under autocast.
    dtypes = {'mmcv, half': torch.float16, 'deformops, bfloat16': torch.bfloat16, 'triton, bfloat16': torch.bfloat16}
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    for x, case in CASES['cpu' if device == 'cpu' else 'cuda'].items():
        inputs, reference = sampler_inputs(**case, device=device)
        runs = {provider: partial(run, reference=reference) for provider, run in providers.items()}
        for mode in MODES:
            yield from interleaved('ms_deform_attn', runs, x, inputs, mode, repetitions, clock=clock, dtypes=dtypes)


def _flex(gml: GatingModulation) -> Callable[..., Tensor]:
    """Return PLuG attention by torch's FlexAttention; its score_mod reads the gates from a map computed beforehand."""
    compiled: Any = None

    def run(q: Tensor, k: Tensor, v: Tensor, gate_q: Tensor, gate_k: Tensor) -> Tensor:
        nonlocal compiled
        if compiled is None:
            from torch.nn.attention.flex_attention import flex_attention

            # After eight sizes torch would run it uncompiled, and slowly.
            torch.compiler.reset()
            compiled = torch.compile(flex_attention, dynamic=False)
        gate = gml(gate_q @ gate_k.transpose(-1, -2) / gate_q.shape[-1] ** 0.5)[:, 0]  # (B, N, M)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * (1 + gate[b, i, j])

        return compiled(q, k, v, score_mod=score_mod)

    return run


def benchmark_plug_attention(repetitions: int = 10, *, device: str = 'cuda') -> Iterator[Row]:
    """Measure the backends of PLuG attention beside plain torch code (the peer), FlexAttention and no gate at all.

    The eager formulation holds all maps ``(N, N)``, FlexAttention the gate's; on a CPU FlexAttention has no backward
    pass. Eight heads of 32 channels share a gate, for one image on a CPU and two on a GPU.
    """
    on_cpu = torch.device(device).type == 'cpu'
    batch = 1 if on_cpu else 2
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)

    def run(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v, gate_q, gate_k: plug_attention(q, k, v, gate_q, gate_k, gml, backend=backend)

    for count, dtype in DENSE_CASES['cpu' if on_cpu else 'cuda']:
        providers = {'eager': run('torch')} if count <= EAGER_UP_TO else {}
        providers |= {name: run(name) for name in ('native', 'chunked', 'triton') if on_cpu or name != 'native'}
        providers['FlexAttention and a map'] = _flex(gml)
        providers['ungated SDPA'] = lambda q, k, v, *_: torch.nn.functional.scaled_dot_product_attention(q, k, v)
        inputs = [torch.randn(batch, heads, count, 32, device=device, dtype=dtype) for heads in (8, 8, 8, 1, 1)]
        for mode in MODES:
            yield from interleaved('plug_attention', providers, f'N{count} {str(dtype)[6:]}', inputs, mode, repetitions)

"""Kernels beside the peer's on a GPU. Not run by us yet, but for the plumbing, on the CPU in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from mmgate.layers import GatingModulation
from mmgate.ops import ms_deform_attn, ms_deform_attn_mmcv, plug_attention
from mmgate.ops.ms_deform_attn import attention_weights

from .benchmark import MODES, Row, deformable_inputs, interleaved, row_of, saved_bytes

LEVELS = [(100, 167), (50, 84), (25, 42), (13, 21)]  # of an image of 800 x 1333
QUERIES = {'encoder_b2': None, 'decoder300_b2': 300, 'decoder900_b2': 900}
TOKENS = (256, 1024, 4096, 16384)
EAGER_UP_TO = 4096  # tokens; its maps fill a GPU beyond


def _mmcv(*inputs: Tensor) -> Tensor:
    return ms_deform_attn(*inputs, backend='mmcv')


def _grid_sample(
    value: Tensor, shapes: Tensor, start: Tensor, locations: Tensor, logits: Tensor, gate: Tensor
) -> Tensor:
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch

    weights = attention_weights(logits, gate)
    return multi_scale_deformable_attn_pytorch(value, shapes, locations, weights)


def _triton(*inputs: Tensor) -> Tensor:
    return ms_deform_attn(*inputs, backend='triton')


def _ungated(value: Tensor, shapes: Tensor, start: Tensor, locations: Tensor, logits: Tensor, _: Tensor) -> Tensor:
    return ms_deform_attn(value, shapes, start, locations, logits, backend='triton')


def _in_bfloat16(*inputs: Tensor) -> Tensor:
    """Values in bfloat16, as under autocast; coordinates and logits stay float32."""
    return ms_deform_attn(inputs[0].bfloat16(), *inputs[1:], backend='triton').float()


def benchmark_ms_deform_attn(
    repetitions: int = 20,
    *,
    device: str = 'cuda',
    levels: list[tuple[int, int]] = LEVELS,
    queries: dict[str, int | None] = QUERIES,
) -> Iterator[Row]:
    """Measure the Triton kernel beside mmcv's operator (the peer, where it has CUDA) and grid_sample, all gated.

    Time and peak memory of both passes, and the bytes kept for the backward pass.
    """
    providers: dict[str, Callable[..., Tensor]] = {'grid_sample': _grid_sample, 'triton': _triton}
    providers |= {'triton, ungated': _ungated, 'triton, bfloat16': _in_bfloat16}
    full = [x.to(device) for x in deformable_inputs(levels, 2)]
    if ms_deform_attn_mmcv.why_not(full[0]) is None:
        providers = {'mmcv': _mmcv, **providers}
    for x, count in queries.items():
        value, shapes, start, locations, logits = full
        locations, logits = (t[:, :count].contiguous() for t in (locations, logits))
        inputs = [value, shapes, start, locations, logits, 0.1 * logits[..., :1].detach()]
        yield from _measured('ms_deform_attn', providers, x, inputs, repetitions)


def _flex(gml: GatingModulation) -> Callable[..., Tensor]:
    """FlexAttention with a map formed beforehand, which is what its score_mod can take."""
    compiled: Any = None

    def run(q: Tensor, k: Tensor, v: Tensor, gate_q: Tensor, gate_k: Tensor) -> Tensor:
        nonlocal compiled
        if compiled is None:
            from torch.nn.attention.flex_attention import flex_attention

            compiled = torch.compile(flex_attention)
        gate = gml(gate_q @ gate_k.transpose(-1, -2) / gate_q.shape[-1] ** 0.5)[:, 0]  # (B, N, M)

        def score_mod(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            return score * (1 + gate[b, i, j])

        return compiled(q, k, v, score_mod=score_mod)

    return run


def benchmark_plug_attention(
    repetitions: int = 20,
    *,
    device: str = 'cuda',
    tokens: tuple[int, ...] = TOKENS,
    dtype: torch.dtype = torch.bfloat16,
    flex: bool = True,
) -> Iterator[Row]:
    """Measure the Triton kernel beside the eager formulation (the peer), FlexAttention and ungated fused attention."""
    gml = GatingModulation('product', activation='tanh', init='paper').to(device)

    def run(backend: str) -> Callable[..., Tensor]:
        return lambda q, k, v, gate_q, gate_k: plug_attention(q, k, v, gate_q, gate_k, gml, backend=backend)

    for count in tokens:
        providers = {'eager': run('torch')} if count <= EAGER_UP_TO else {}
        providers |= {'chunked': run('chunked'), 'triton': run('triton')}
        if flex:
            providers['FlexAttention and a map'] = _flex(gml)
        providers['ungated SDPA'] = lambda q, k, v, *_: torch.nn.functional.scaled_dot_product_attention(q, k, v)
        inputs = [torch.randn(2, heads, count, 32, device=device, dtype=dtype) for heads in (8, 8, 8, 1, 1)]
        yield from _measured('plug_attention', providers, f'N{count}', inputs, repetitions)


def _measured(
    op: str, providers: dict[str, Callable[..., Tensor]], x: str, inputs: list[Tensor], repetitions: int
) -> Iterator[Row]:
    for mode in MODES:
        yield from interleaved(op, providers, x, inputs, mode, repetitions)
    kept = {name: saved_bytes(run, inputs) / 2**20 for name, run in providers.items()}
    peer = next(iter(kept.values()))
    for name, megabytes in kept.items():
        yield row_of(op, name, MODES[1], 'saved', 'MiB', x, [megabytes], [peer], inputs[0].device)

"""Problems of PLuG attention for its backends: usual and random ones, and a program to compare with."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from mmgate.gates.plug import GatingModulation
from mmgate.ops import plug_attention
from mmgate.ops.dense.reference import Pairs

FIXED_BIAS = ('native', 'triton')  # backends without a gradient of the bias


def normal(
    generator: torch.Generator, batch: int, heads: int, rows: int, columns: int, dim: int, gates: int, width: int
) -> list[Tensor]:
    """Return random queries, keys, values, and queries and keys of the gate."""
    shapes = [(heads, rows, dim), (heads, columns, dim), (heads, columns, dim), (gates, rows, width)]
    return [torch.randn(batch, *shape, generator=generator) for shape in [*shapes, (gates, columns, width)]]


def fused_gate(**parameters: Tensor) -> GatingModulation:
    """Return the gate that every backend has, with these parameters."""
    gate = GatingModulation('product', activation='tanh', init='paper')
    gate.load_state_dict(parameters)
    return gate


def make(
    device: str = 'cpu',
    batch: int = 2,
    heads: int = 2,
    rows: int = 19,
    columns: int = 21,
    dim: int = 16,
    width: int = 16,
    gates: int = 1,
    bias: str | None = None,
    masks: bool = False,
    height: float = 0.0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> Pairs:
    """Return the operator's arguments; the gate is the one that every backend has, and has ``width`` channels.

    ``bias`` names the axes of one, b(atch), h(eads), n (rows), m (columns), or 1 for one of all; it lies around
    ``height``, or masks keys, also whole blocks of them.
    """
    generator = torch.Generator().manual_seed(0)
    tensors = normal(generator, batch, heads, rows, columns, dim, gates, width)
    added = None
    if bias is not None:
        sizes = dict(b=batch, h=heads, n=rows, m=columns)
        added = torch.randn([sizes.get(axis, 1) for axis in bias], generator=generator) + height
        if masks:
            added = torch.where(added > 0.3, -torch.inf, 0.0)
            added[..., 0] = 0.0  # no row without a key
            added[:1, ..., 1 : 17 if columns < 100 else 129] = -torch.inf
        added = added.to(device)
    gate = fused_gate(weight=torch.tensor([0.7, -0.4]), bias=torch.tensor([0.3, 0.9]))
    return Pairs(*(x.to(device, dtype) for x in tensors), gate.to(device), added, **options)


def attend(given: Pairs, backend: str = 'auto') -> Tensor:
    return plug_attention(**given._asdict(), backend=backend)


def solved(given: Pairs, run: str | Callable[[Pairs], Tensor], dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return the output and every gradient by a backend's name, or another program, of the tensors in ``dtype``."""
    wide = torch.promote_types(dtype, torch.float32)
    leaves = {name: x.detach().to(dtype).requires_grad_() for name, x in zip(Pairs._fields, given[:5], strict=False)}
    gate: Any = copy.deepcopy(given.modulation)
    bias = None if given.bias is None else given.bias.detach().to(wide)
    sought = leaves | {f'gate.{name}': x for name, x in gate.to(wide).named_parameters()}
    if bias is not None and run not in FIXED_BIAS:
        sought['bias'] = bias.requires_grad_()
    wanted = given._replace(**leaves, modulation=gate, bias=bias)
    output = attend(wanted, run) if isinstance(run, str) else run(wanted)
    noise = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(output.device)
    gradients = torch.autograd.grad((output.double() * noise).sum(), list(sought.values()))
    return {'output': output.detach(), **dict(zip(sought, gradients, strict=True))}


def drawn(seed: int) -> tuple[random.Random, Pairs]:
    """Return a problem that every backend takes, and the generator for more of its kind."""
    draw, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch, heads = draw.randint(1, 2), draw.choice([1, 2, 2, 3, 4])
    rows, columns = draw.randint(1, 70), draw.choice([draw.randint(1, 70), 64])
    dim, width, gates = draw.choice([1, 12, 16, 32, 40]), draw.choice([1, 16, 20]), draw.choice([1, heads])
    tensors = normal(generator, batch, heads, rows, columns, dim, gates, width)
    bias = None
    if draw.random() < 0.7:
        axes = [n if draw.random() < 0.5 else 1 for n in (batch, heads, rows, columns)]
        bias = torch.randn(axes, generator=generator) + draw.choice([0.0, 0.0, 10.0])
        masked = bias.masked_fill(torch.arange(axes[3]) % 40 < 17, -torch.inf)  # whole blocks of keys
        bias = draw.choice([bias, bias.mT.contiguous().mT, torch.where(bias > 0.3, -torch.inf, bias), masked])
        bias = bias.where(bias.amax(-1, keepdim=True) > -torch.inf, 0.0)  # no row without a key
    gate = fused_gate(**{name: torch.randn(2, generator=generator) for name in ('weight', 'bias')})
    return draw, Pairs(*tensors, gate, bias)


@cache
def problems() -> list[tuple[str, Pairs, dict[str, Tensor]]]:
    """Return random problems of every gate with their outputs and gradients in float64."""
    found = []
    for seed in range(80):
        draw, given = drawn(seed)
        options = dict(residual=draw.random() < 0.5, position=draw.choice(['pre_softmax', 'post_softmax']))
        if draw.random() < 0.5:
            kind, activation = draw.choice(['sum', 'mlp', 'single', 'none']), draw.choice(['none', 'softsign'])
            torch.manual_seed(seed)
            options['modulation'] = GatingModulation(kind, activation=activation, init='paper')
        if draw.random() < 0.3:
            options['value'] = torch.cat([given.value, given.value.square()], -1)
        given = given._replace(**options)
        found.append((f'problem {seed}:', given, solved(given, by_maps, torch.float64)))
    return found


def by_maps(given: Pairs) -> Tensor:
    """Return ``(B, H, N, e)`` by a program that shares nothing with mmgate's operator."""
    query, key, value, gate_query, gate_key, modulation, bias, residual, position, _ = given
    logits, raw = (
        torch.einsum('bhnd,bhmd->bhnm', x, y) / x.shape[-1] ** 0.5 for x, y in ((query, key), (gate_query, gate_key))
    )
    factor = modulation(raw) + residual
    logits = logits * factor if position == 'pre_softmax' else logits
    logits = logits if bias is None else logits + bias
    weights = (logits - logits.logsumexp(-1, keepdim=True)).exp()
    return torch.einsum('bhnm,bhme->bhne', weights if position == 'pre_softmax' else weights * factor, value)

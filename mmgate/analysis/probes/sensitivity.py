"""Measure a trained model's attention to find where a gate may matter: spread, sinks, reaction to scaled logits."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.analysis.probes.attention import bind
from mmgate.analysis.probes.layers import effective_rank
from mmgate.analysis.probes.measures import row_shares
from mmgate.analysis.probes.recording import predict, record
from mmgate.analysis.probes.statistics import Kept
from mmgate.hosts.readings import without_dropout
from mmgate.hosts.table import adapter_for
from mmgate.layers.base.deformable import DeformableGate
from mmgate.layers.base.dense import DenseGate, Inputs
from mmgate.layers.base.gated import gated_modules
from mmgate.swap import swap_attention

NAN = float('nan')
SCALES = (0.9, 1.1)


class ScaledLogits(DenseGate):
    """Probe, shaped like a gate, that multiplies all logits of dense attention by ``scale`` before a bias is added."""

    identity_start = True
    scale = 1.0

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute attention with logits multiplied by ``scale``; return the heads ``(B, H, N, d)``."""
        return F.scaled_dot_product_attention(query * self.scale, key, value, attn_mask=bias)

    def attention_map(self, query: Tensor, key: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute the attention weights ``(B, H, N, M)`` for logits multiplied by ``scale``."""
        logits = query @ key.transpose(-1, -2) * self.scale / math.sqrt(query.shape[-1])
        return (logits if bias is None else logits + bias).softmax(-1)


class ScaledPointLogits(DeformableGate):
    """Probe, shaped like a gate, that multiplies all logits of deformable attention by ``scale``."""

    scale = 1.0

    def modulate(self, query: Tensor) -> dict[str, Any]:
        """Return the arguments that make :func:`.ms_deform_attn` multiply all logits by ``scale``."""
        gate = query.new_full((1,), self.scale - 1)
        return dict(gate=gate, residual=True, position='pre_softmax')


def measure_attention(model: nn.Module, batches: Iterable[dict[str, Any]]) -> dict[str, dict[str, float]]:
    """Run a trained model over images; return numbers that describe each attention (entropy, sink, rank), by path.

    Args:
        model: A trained model in evaluation. It is used up: its attention is replaced by one that can scale its logits.
        batches: Batches of one image, as :meth:`.loading.LoadedModel.inputs` yields them.

    Returns:
        For each attention that ran, in the mean over queries, heads and images: ``entropy`` of the weights as a share
        of the largest possible, 1 for uniform attention and 0 for a single key; ``sink``, the share of the most
        attended key; ``uniform``, the share of a key in uniform attention; ``at_0.9`` and ``at_1.1``, the distance by
        which the attention's own output moves when its logits are multiplied by that, over the output's norm;
        ``rank``, of linear attention, the effective rank of ``K^T V`` as a share of its channels. Sampled points of
        deformable attention count as keys, those of one level and place as the same key. What an attention does not
        have is NaN.
    """
    for probe in (ScaledLogits, ScaledPointLogits):
        if any(adapter_for(probe, module) for module in model.modules()):
            swap_attention(model, dict(path='**', type=probe))
    moved: dict[str, list[Tensor]] = {}
    with ExitStack() as hooks:
        for path, module in gated_modules(model):
            if all(isinstance(gate, (ScaledLogits, ScaledPointLogits)) for gate in module.gates()):
                take = partial(_scale, moved.setdefault(path, []))
                hooks.enter_context(module.register_forward_hook(take, with_kwargs=True))
        recording = hooks.enter_context(record(model, tuple(_REDUCED), accumulate=_accumulate))
        for batch in batches:
            predict(model, batch)
    found: dict[str, dict[str, float]] = {}
    for path in dict.fromkeys([*recording, *(path for path, distances in moved.items() if distances)]):
        row = dict.fromkeys(('entropy', 'sink', 'uniform', 'at_0.9', 'at_1.1', 'rank'), NAN)
        readings = recording.get(path, {})
        for name in ('attention', 'weights'):
            if name in readings:
                row['entropy'], row['sink'], row['uniform'] = _mean(readings[name].tensors)
        if 'kv' in readings:
            (row['rank'],) = _mean(readings['kv'].tensors)
        if moved.get(path):
            row['at_0.9'], row['at_1.1'] = _mean(moved[path])
        found[path] = row
    return found


def sensitivity(row: dict[str, float]) -> float:
    """Return how far an attention's output moves when its logits are scaled: the mean over both scales, or -1.

    Attention is sorted by this number; -1 means that it is unknown.
    """
    distances = [row['at_0.9'], row['at_1.1']]
    return -1.0 if np.isnan(distances).any() else float(np.mean(distances))


def _mean(tensors: list[Tensor]) -> list[float]:
    return torch.stack(tensors).double().mean(0).tolist()


def _spread(weights: Tensor) -> Tensor:
    """Return entropy, share of the most attended key, and share under uniform attention of weights ``(B, H, N, M)``."""
    shares = row_shares(weights.float().nan_to_num())
    alive = shares.sum(-1) > 0
    keys = shares.shape[-1]
    entropy = torch.special.entr(shares).sum(-1) / max(math.log(keys), 1e-9)
    most = shares.mean((1, 2)).amax(-1).mean()
    return torch.stack([entropy[alive].mean(), most, shares.new_tensor(1 / keys)])


def _spread_of_points(weights: Tensor) -> Tensor:
    """Return entropy and shares as :func:`_spread` does, of deformable attention's weights.

    They are ``(B, Q, H, L, P)`` or, with different numbers of points on the levels, ``(B, Q, H, N)``.
    """
    return _spread(weights.flatten(3).transpose(1, 2))


def _share_of_rank(maps: Tensor) -> Tensor:
    return (effective_rank(maps) / min(maps.shape[-2:])).mean()[None]


_REDUCED: dict[str, Callable[[Tensor], Tensor]] = {
    'attention': _spread,
    'weights': _spread_of_points,
    'kv': _share_of_rank,
}


def _accumulate(path: str, name: str) -> Kept:
    return Kept(_REDUCED[name])


def _scale(moved: list[Tensor], module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    """Run an attention with scaled logits after each call, and keep how far its output moves; a forward hook."""
    given = bind(module, args, kwargs)
    if 'identity' in given:  # else the distance would be over the size of what the host adds
        query = given['query'] if 'query' in given else args[0]
        given['identity'] = torch.zeros_like(query)

    def run(scale: float) -> Tensor:
        for gate in module.gates():
            gate.scale = scale
        found = module.forward(**given)
        return (found if isinstance(found, Tensor) else found[0]).float()

    with torch.no_grad(), without_dropout(module):
        plain = run(1.0)
        distances = [(run(scale) - plain).norm() / plain.norm().clamp(min=1e-12) for scale in SCALES]
    for gate in module.gates():
        gate.scale = 1.0
    moved.append(torch.stack(distances).cpu())

"""Attention sinks: how much one token draws, and how large hidden states become."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from mmgate.analysis.probes.attention import GATES
from mmgate.analysis.probes.measures import key_shares
from mmgate.analysis.probes.recording import ACTIVATION, class_tokens, nearest, predict, record
from mmgate.analysis.probes.statistics import RunningStatistics


@dataclass(frozen=True)
class LayerSink:
    """Of one layer, over images.

    Attributes:
        layer: Path of the attention.
        sink_share: Share of attention on its most attended key, mean over images; NaN without attention weights.
        largest_head_share: That of the head in which it is largest: a sink of one head fades in the mean over heads.
        first_token_share: Share of attention on the first token, the class token, mean over heads and images: the
            study's first-token score; NaN in a layer without one.
        uniform: What a share would be if attention were uniform.
        maximum_activation: Largest absolute value of the hidden states after the layer; NaN where it is not known.
        first_token_activation: Likewise, of the first token alone.
        gate_sparsity: Share of the gate's values near 0; NaN without a gate.

    Source: Gated attention for large language models, section 4.3.
    """

    layer: str
    sink_share: float
    largest_head_share: float
    first_token_share: float
    uniform: float
    maximum_activation: float
    first_token_activation: float
    gate_sparsity: float


class _Shares:
    """Of each forward pass the largest share of a key, that of its largest head, the first key's, and an even one."""

    def __init__(self) -> None:
        self.rows: list[tuple[float, ...]] = []
        self.keys = 0

    def add(self, weights: Tensor) -> None:
        shares, self.keys = key_shares(weights), weights.shape[-1]
        mean = shares.mean(0)
        self.rows.append((float(mean.max()), float(shares.max()), float(mean[0]), 1 / self.keys))


class _Activations:
    """Largest finite absolute value, of all tokens and of the first."""

    def __init__(self) -> None:
        self.largest = self.first = 0.0

    def add(self, states: Tensor) -> None:
        sizes = states.float().abs().nan_to_num(0.0, 0.0)
        self.largest, self.first = max(self.largest, float(sizes.max())), max(self.first, float(sizes[:, 0].max()))


def sinks(model: nn.Module, batches: Iterable[dict[str, Any]]) -> list[LayerSink]:
    """Run a model over batches and return a figure for every attention with weights or a gate, as they run."""
    kinds: dict[str, Any] = {**dict.fromkeys(GATES, RunningStatistics), 'attention': _Shares, ACTIVATION: _Activations}
    with record(model, kinds, accumulate=lambda path, name: kinds[name]()) as recording:
        for batch in batches:
            predict(model, batch)
    extra = class_tokens(model, {path: of['attention'].keys for path, of in recording.items() if 'attention' in of})
    nan, found = float('nan'), []
    for path, readings in recording.items():
        shares, gates = readings.get('attention'), [readings[name] for name in GATES if name in readings]
        if shares is None and not gates:
            continue
        share, head, first, uniform = np.mean(shares.rows, 0).tolist() if shares else (nan,) * 4
        states = nearest(recording, path, ACTIVATION)
        largest, of_first = (states.largest, states.first) if states else (nan, nan)
        if path not in extra:
            first = of_first = nan
        sparsity = float(np.mean([gate.sparsity for gate in gates])) if gates else nan
        found.append(LayerSink(path, share, head, first, uniform, largest, of_first, sparsity))
    return found

"""What agent tokens attend to."""

from __future__ import annotations

from typing import Any

import numpy as np
from torch import nn

from mmgate.analysis.probes.recording import predict, readable, record
from mmgate.errors import ConfigError


def agent_maps(model: nn.Module, batch: dict[str, Any], layer: int = 0) -> tuple[str, np.ndarray, Any]:
    """Return a layer's path, the attention of its agents ``(n, h, w)``, heads averaged, and the image's data sample.

    Raises:
        ConfigError: There is no such layer, of the agent attentions.

    Source: Agent attention, Fig. 9.
    """
    paths = readable(model)['agents']
    if not -len(paths) <= layer < len(paths):
        raise ConfigError(f'--layer {layer}: {type(model).__name__} has {len(paths)} agent attentions.')
    with record(model, ['agents'], paths=lambda path: path == paths[layer]) as recording:
        sample = predict(model, batch)
    return paths[layer], recording[paths[layer]]['agents'].last[0].mean(0).numpy(), sample


def agent_rows(path: str, maps: np.ndarray) -> list[dict[str, Any]]:
    """Return the row of the CSV of each agent: where it attends most, and how much."""
    peaks = [np.unravel_index(values.argmax(), values.shape) for values in maps]
    return [
        dict(layer=path, agent=agent, row=int(y), column=int(x), largest=float(maps[agent, y, x]))
        for agent, (y, x) in enumerate(peaks)
    ]

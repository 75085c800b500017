"""A captured network as an ONNX file of standard operators."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from .network import Network
from .operators import translations
from .tracing import plain_attention

OPSET = 18
NOTES = 'mmgate'  # the metadata's key


def write_onnx(program: Any, network: Network, path: Path, notes: Mapping[str, Any]) -> None:
    """Write a program of torch.export to ``path``.

    Args:
        program: What :func:`mmgate.deploy.capture.capture` returned.
        network: What it was captured from; its inputs and outputs name the graph's.
        path: The file.
        notes: Kept in the file's metadata as JSON.
    """
    silenced = logging.root.manager.disable
    logging.disable(logging.WARNING)  # exporter and optimiser tell what they do
    try:
        with plain_attention():
            written: Any = torch.onnx.export(
                program,
                dynamo=True,
                verbose=False,
                optimize=True,
                opset_version=OPSET,
                input_names=list(network.inputs),
                output_names=list(network.outputs),
                custom_translation_table=translations(),
            )
    finally:
        logging.disable(silenced)
    _keep_constants(written.model.graph)
    written.model.graph.sort()  # the optimiser may leave a shared constant behind its first use
    written.model.metadata_props[NOTES] = json.dumps(notes)
    written.save(path, external_data=False)


def _keep_constants(graph: Any) -> None:
    """Make initializers of the constants that the optimiser leaves without a node that they came from."""
    inputs = set(graph.inputs)
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value in inputs or value.name in graph.initializers:
                continue
            if value.producer() is None and value.const_value is not None:
                graph.register_initializer(value)

"""A captured network as an ONNX file of standard operators."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from mmgate.errors import ConfigError

from . import nms  # noqa: F401  (it registers what is translated)
from .network import Network
from .sampling import DOMAIN
from .tracing import plain_attention

OPSET = 18
BOOL, INT64 = 9, 7  # onnx.TensorProto's
NOTES = 'mmgate'  # the metadata's key


def write_onnx(program: Any, network: Network, path: Path, notes: Mapping[str, Any]) -> None:
    """Write a program of torch.export to ``path``.

    Args:
        program: What :func:`mmgate.deploy.capture.capture` returned.
        network: What it was captured from; its inputs and outputs name the graph's.
        path: The file.
        notes: Kept in the file's metadata as JSON.

    Raises:
        ConfigError: Something of the network has no standard operator.
    """
    with plain_attention(), _quiet('onnxscript', 'onnx_ir', 'torch.onnx'):
        written: Any = torch.onnx.export(
            program,
            dynamo=True,
            verbose=False,
            optimize=True,
            opset_version=OPSET,
            input_names=list(network.inputs),
            output_names=list(network.outputs),
            custom_translation_table=_translations(),
        )
    _keep_constants(written.model.graph)
    written.model.graph.sort()  # the optimiser may leave a shared constant behind its first use
    written.model.metadata_props[NOTES] = json.dumps(notes)
    written.save(path, external_data=False)
    _check(written.model, path)


def _translations() -> dict[Callable[..., Any], Callable[..., Any]]:
    """Return the translation table of ``torch.onnx.export``."""
    from onnxscript.onnx_opset import opset18
    from onnxscript.onnx_types import FLOAT

    op: Any = opset18  # its methods are typed for tensors alone, and take numbers

    def nms_keep(boxes: FLOAT, scores: FLOAT, iou_threshold: float) -> Any:
        every, threshold = op.Constant(value_int=2**31 - 1), op.Constant(value_float=iou_threshold)
        # (M, 3) as (image, class, box), of scores above the last argument
        chosen = op.NonMaxSuppression(boxes, op.Unsqueeze(scores, [1]), every, threshold, op.Constant(value_float=0.0))
        places = op.Gather(chosen, op.Constant(value_ints=[0, 2]), axis=1)  # (M, 2)
        ones = op.Squeeze(op.Add(op.Mul(op.Slice(places, [0], [1], [1]), 0), 1), [1])  # (M,)
        nothing = op.Cast(op.Mul(scores, 0.0), to=INT64)
        return op.Cast(op.ScatterND(nothing, places, ones), to=BOOL)

    return {torch.ops.mmgate.nms_keep.default: nms_keep}


@contextmanager
def _quiet(*names: str) -> Iterator[None]:
    """Let loggers say nothing but errors."""
    levels = {logging.getLogger(name): logging.getLogger(name).level for name in names}
    for logger in levels:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in levels.items():
            logger.setLevel(level)


def _keep_constants(graph: Any) -> None:
    """Make initializers of the constants that the optimiser leaves without a node that they came from."""
    inputs = set(graph.inputs)
    for node in graph.all_nodes():
        for value in node.inputs:
            if value is None or value in inputs or value.name in graph.initializers:
                continue
            if value.producer() is None and value.const_value is not None:
                graph.register_initializer(value)


def _check(model: Any, path: Path) -> None:
    """Refuse operators that are not ONNX's; TensorRT's plug-in is there only if it was asked for."""
    import onnx

    nodes = list(model.graph.all_nodes())
    foreign = sorted({f'{node.domain}::{node.op_type}' for node in nodes if node.domain not in ('', DOMAIN)})
    foreign += [f'{function.domain}::{function.name}' for function in model.functions.values()]
    if model.opset_imports[''] != OPSET or foreign:
        found = f'opset {model.opset_imports[""]}, {", ".join(foreign) or "no operator of others"}'
        raise ConfigError(
            f'the graph is to hold operators of opset {OPSET} alone and has: {found}. If MMGATE_MS_DEFORM_ATTN '
            'or MMGATE_PLUG_ATTENTION is set, unset it; else this is a fault of mmgate.'
        )
    if DOMAIN not in {node.domain for node in nodes}:
        onnx.checker.check_model(path)

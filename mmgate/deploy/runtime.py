"""Run ONNX files that mmgate has written as functions of tensors, by ONNX Runtime or OpenVINO."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmgate.errors import ConfigError

# Key of the notes in an ONNX file's metadata.
NOTES_KEY = 'mmgate'


class Exported:
    """An exported file that is called with tensors, in the order of its inputs, and returns a tuple of outputs.

    Args:
        path: An ``.onnx`` file.
        runtime: ``'onnxruntime'`` or ``'openvino'``, which runs the file on a CPU, in float32.

    Attributes:
        notes: Notes of the export: names of inputs and outputs, sizes, the model in words.

    Raises:
        ConfigError: The file is missing or not made by tools/deploy/export.py; or the runtime is unknown or missing.
    """

    def __init__(self, path: str | Path, runtime: str = 'onnxruntime') -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f'exported file {path} does not exist.')
        if runtime not in RUNTIMES:
            raise ConfigError(f'runtime={runtime!r} is unknown; choose one of {", ".join(RUNTIMES)}.')
        try:
            self._run, notes = RUNTIMES[runtime](self.path)
        except Exception as error:
            raise ConfigError(f'{runtime} cannot open {self.path}: {error}') from error
        if not notes:
            raise ConfigError(f'{path} was not written by tools/deploy/export.py; its inputs are unknown.')
        self.notes: dict[str, Any] = json.loads(notes)

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Run the file on input tensors and return its output tensors.

        Args:
            *inputs: The inputs that :attr:`notes` names: images ``(B, C, H, W)`` in float32, normalised and padded,
                and for some graphs ``sizes (B, 2)``, height and width of each image without its padding.

        Raises:
            ConfigError: The graph does not take images of this size.
        """
        height, width = inputs[0].shape[-2:]
        if not self.takes(height, width):
            raise ConfigError(
                f'{self.path} takes {self.notes["takes"]}, this batch has {height} x {width}. Resize or pad in the '
                'pipeline or the data_preprocessor (pad_size_divisor), or export with an image of this size.'
            )
        outputs = self._run([x.detach().cpu().contiguous().numpy() for x in inputs])
        return tuple(torch.from_numpy(output).to(inputs[0].device) for output in outputs)

    def takes(self, height: int, width: int) -> bool:
        """Return True if the file takes images of this height and width."""
        divisor = self.notes['divisor']
        if not divisor:
            return [height, width] == self.notes['size']
        return not (height % divisor or width % divisor) and min(height, width) >= self.notes['least']


# A function of arrays, and the notes in the file's metadata.
Opened = tuple[Callable[[Sequence[Any]], Sequence[Any]], str | None]


def _onnxruntime(path: Path) -> Opened:
    """Open a file by ONNX Runtime."""
    import onnxruntime

    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    options.log_severity_level = 3
    # Otherwise the session's threads spin on after each run and slow PyTorch's threads down.
    options.add_session_config_entry('session.force_spinning_stop', '1')
    session = onnxruntime.InferenceSession(path, options, providers=['CPUExecutionProvider'])
    names = [entry.name for entry in session.get_inputs()]
    notes = session.get_modelmeta().custom_metadata_map.get(NOTES_KEY)
    return lambda arrays: session.run(None, dict(zip(names, arrays, strict=True))), notes


def _openvino(path: Path) -> Opened:
    """Open a file by OpenVINO, which would otherwise compute in bfloat16 on processors that have it."""
    import openvino

    model = openvino.Core().read_model(path)
    place = ['framework', NOTES_KEY]
    notes = model.get_rt_info(place).astype(str) if model.has_rt_info(place) else None
    options = dict(INFERENCE_PRECISION_HINT='f32', INFERENCE_NUM_THREADS=torch.get_num_threads())
    compiled = openvino.compile_model(model, 'CPU', options)
    # The next run writes into the arrays of this one.
    return lambda arrays: [output.copy() for output in compiled(list(arrays)).values()], notes


RUNTIMES: dict[str, Callable[[Path], Opened]] = dict(onnxruntime=_onnxruntime, openvino=_openvino)

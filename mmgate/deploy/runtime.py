"""Run ONNX files that mmgate has written as functions of tensors."""

from __future__ import annotations

import json
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

    Attributes:
        notes: Notes of the export: names of inputs and outputs, sizes, the model in words.

    Raises:
        ConfigError: The file is missing, of another kind, or not made by tools/deploy/export.py.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f'exported file {path} does not exist.')
        if self.path.suffix != '.onnx':
            raise ConfigError(f'{path} is no exported file: give an .onnx file of tools/deploy/export.py.')
        notes = self._open()
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
        with torch.no_grad():
            # The file runs on a CPU.
            outputs = self._run(*(x.detach().cpu().contiguous() for x in inputs))
        return tuple(output.to(inputs[0].device) for output in outputs)

    def takes(self, height: int, width: int) -> bool:
        """Return True if the file takes images of this height and width."""
        divisor = self.notes['divisor']
        if not divisor:
            return [height, width] == self.notes['size']
        return not (height % divisor or width % divisor) and min(height, width) >= self.notes['least']

    def _open(self) -> str | None:
        """Open an ONNX file, and return the notes in its metadata on the inputs that it takes."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        options.log_severity_level = 3
        # Otherwise the session's threads spin on after each run and slow PyTorch's threads down.
        options.add_session_config_entry('session.force_spinning_stop', '1')
        try:
            session = onnxruntime.InferenceSession(self.path, options, providers=['CPUExecutionProvider'])
        except Exception as error:
            raise ConfigError(f'onnxruntime cannot read {self.path}: {error}') from error
        names = [entry.name for entry in session.get_inputs()]

        def run(*inputs: Tensor) -> list[Tensor]:
            arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
            return [torch.from_numpy(output) for output in session.run(None, arrays)]

        self._run: Any = run
        return session.get_modelmeta().custom_metadata_map.get(NOTES_KEY)

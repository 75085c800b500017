"""Run exported files as functions of tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmgate._environment import available
from mmgate.errors import ConfigError

if available('mmcv'):
    from . import operators  # noqa: F401  (programs call them)

# Key of the notes in an ONNX file's metadata, and their file beside a program of torch.export.
NOTES_KEY = 'mmgate'
NOTES_FILE = 'mmgate.json'


class Exported:
    """An exported file that is called with tensors, in the order of its inputs, and returns a tuple of outputs.

    Args:
        path: ``.onnx``, or ``.pt2`` of torch.export.
        trusted: True opens a ``.pt2`` file, which may hold code and pickles; so does MMGATE_TRUST_CHECKPOINT=1.

    Attributes:
        notes: Notes of the export: names of inputs and outputs, sizes, the model in words.

    Raises:
        ConfigError: The file is missing, of another kind, or not made by tools/deploy/export.py.
    """

    def __init__(self, path: str | Path, *, trusted: bool = False) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f'exported file {path} does not exist.')
        if self.path.suffix == '.onnx':
            notes = self._open_onnx()
        elif self.path.suffix != '.pt2':
            raise ConfigError(f'{path} is no exported file: give an .onnx or a .pt2 file of tools/deploy/export.py.')
        else:
            if not trusted:
                _refuse_untrusted(path)
            notes = self._open_program()
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

    def _open_onnx(self) -> str | None:
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

    def _open_program(self) -> str | None:
        """Open a ``.pt2`` file of torch.export, and return the notes in it on the inputs that it takes."""
        extra = {NOTES_FILE: ''}
        try:
            program = torch.export.load(self.path, extra_files=extra)
        # torch raises many kinds of errors.
        except Exception as error:
            raise ConfigError(f'{self.path} cannot be read as a program of torch: {error}') from error
        # The program was captured with a batch of two, and its guards would refuse a batch of one.
        self._run = program.module(check_guards=False)
        return extra[NOTES_FILE]


def _refuse_untrusted(path: str | Path) -> None:
    """Raise ConfigError for a file that may contain code, unless the environment says to trust all files."""
    # It needs mmengine, which an ONNX file does without.
    from mmgate.checkpoints.loading import HOW_TO_TRUST, is_trusted

    if not is_trusted():
        raise ConfigError(f'{path} may hold code, which opening it would run. {HOW_TO_TRUST}.')

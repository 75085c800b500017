"""Exported files as functions of tensors."""

from __future__ import annotations

import json
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from mmengine.logging import print_log
from torch import Tensor

from mmgate.checkpoints.loading import HOW_TO_TRUST, is_trusted
from mmgate.errors import ConfigError

from .sampling import DOMAIN, PLUGIN

NOTES_FILE = 'mmgate.json'


class Exported:
    """An exported file, called with tensors in the order of its inputs; it returns a tuple of its outputs.

    Args:
        path: ``.onnx``, or ``.pt2`` of torch.export or AOTInductor.
        threads: Of onnxruntime; as many as torch's by default.
        trusted: Whether to open a ``.pt2`` file, which may hold code and pickles; MMGATE_TRUST_CHECKPOINT=1 does, too.

    Attributes:
        notes: What the export wrote beside the graph: config, names, sizes.

    Raises:
        ConfigError: The file is missing, of another kind, not made by tools/deploy/export.py, or for TensorRT alone.
    """

    def __init__(self, path: str | Path, threads: int | None = None, *, trusted: bool = False) -> None:
        self.path = Path(path)
        if not self.path.is_file():
            raise ConfigError(f'exported file {path} does not exist (looked for {self.path.resolve()}).')
        openers = {'.onnx': self._open_onnx, '.pt2': self._open_program}
        if self.path.suffix not in openers:
            raise ConfigError(f'{path} is no exported file: give an .onnx or a .pt2 file of tools/deploy/export.py.')
        if self.path.suffix == '.pt2' and not (trusted or is_trusted()):
            raise ConfigError(f'{path} may hold code, which opening it would run. {HOW_TO_TRUST}.')
        self._run, notes = openers[self.path.suffix](threads or torch.get_num_threads())
        try:
            self.notes: dict[str, Any] = json.loads(notes or '{}')
        except ValueError:
            self.notes = {}
        if 'takes' not in self.notes:
            raise ConfigError(f'{path} was not written by tools/deploy/export.py; its inputs are unknown.')

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Return the outputs.

        Args:
            *inputs: Of :attr:`notes`' ``inputs``: images ``(B, C, H, W)`` in float32, normalised and padded, and where
                the graph asks for them ``sizes (B, 2)``, height and width of each image without its padding.

        Raises:
            ConfigError: Images of a size that the graph does not take.
        """
        height, width = inputs[0].shape[-2:]
        if not self.takes(height, width):
            raise ConfigError(
                f'{self.path} takes {self.notes["takes"]}, this batch has {height} x {width}. Resize or pad in the '
                'pipeline or the data_preprocessor (pad_size_divisor), or export with an image of this size.'
            )
        outputs = self._run(tuple(x.detach().cpu().contiguous() for x in inputs))  # the file is of a CPU
        return tuple(output.to(inputs[0].device) for output in outputs)

    def takes(self, height: int, width: int) -> bool:
        """Return whether the graph takes images of this size."""
        divisor = self.notes['divisor']
        if not divisor:
            return [height, width] == self.notes['size']
        return not (height % divisor or width % divisor) and min(height, width) >= self.notes['least']

    def _open_onnx(self, threads: int) -> tuple[Any, str | None]:
        try:
            import onnxruntime
        except ImportError as error:
            raise ConfigError('onnxruntime is missing: pip install "mmgate[deploy]".') from error
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        options.log_severity_level = 3
        # its threads would go on turning after each run, beside PyTorch's own that take the results
        options.add_session_config_entry('session.force_spinning_stop', '1')
        try:
            session = onnxruntime.InferenceSession(self.path, options, providers=['CPUExecutionProvider'])
        except Exception as error:
            if DOMAIN in str(error):
                raise ConfigError(f'{self.path} has nodes {PLUGIN}, which TensorRT alone can run.') from error
            raise ConfigError(f'onnxruntime cannot read {self.path}: {error}') from error
        names = [entry.name for entry in session.get_inputs()]

        def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            arrays = {name: x.numpy() for name, x in zip(names, inputs, strict=True)}
            return tuple(torch.from_numpy(output) for output in session.run(None, arrays))

        return run, session.get_modelmeta().custom_metadata_map.get('mmgate')

    def _open_program(self, threads: int) -> tuple[Any, str | None]:
        extra = {NOTES_FILE: ''}
        try:
            with zipfile.ZipFile(self.path) as archive:
                names = archive.namelist()
            if not any(name.endswith('archive_format') for name in names):
                raise KeyError('it is a zip file of another kind')  # of which torch would print a page
            compiled = any('/aotinductor/' in name for name in names)
            if compiled:
                package = torch._inductor.aoti_load_package(str(self.path))
                return lambda inputs: tuple(package(*inputs)), package.get_metadata().get('mmgate')
            # a batch of two stood for any while it was written: its guards would refuse a batch of one
            module = torch.export.load(self.path, extra_files=extra).module(check_guards=False)
        except (zipfile.BadZipFile, RuntimeError, KeyError) as error:
            raise ConfigError(f'{self.path} cannot be read as a program of torch: {error}') from error

        def run(inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            with torch.no_grad():
                return tuple(module(*inputs))

        return run, extra[NOTES_FILE]


def write_program(program: Any, path: Path, notes: dict[str, Any]) -> None:
    """Write a program as torch.export keeps it."""
    torch.export.save(program, path, extra_files={NOTES_FILE: json.dumps(notes)})


def write_package(program: Any, path: Path, notes: dict[str, Any]) -> None:
    """Compile a program by AOTInductor into a package that needs torch alone, or its C++ library."""
    options: dict[str, Any] = {'aot_inductor.metadata': {'mmgate': json.dumps(notes)}}
    if hasattr(torch._inductor.config.aot_inductor, 'compile_wrapper_opt_level'):
        options['aot_inductor.compile_wrapper_opt_level'] = 'O0'  # it calls kernels, and takes g++ many minutes
    print_log('AOTInductor compiles: minutes for one size, many more for any', logger='current')
    with torch.no_grad():
        torch._inductor.aoti_compile_and_package(program, package_path=os.fspath(path), inductor_configs=options)

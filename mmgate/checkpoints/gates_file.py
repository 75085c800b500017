"""Read and write gates files: the gates of a model in the safetensors format, with the rules that place them.

The metadata also has the vanilla model's shapes.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mmgate._environment import log
from mmgate.errors import ConfigError, listed

from .safetensors_file import check_safetensors, read_safetensors

KEY = 'mmgate.gates'
VERSION = 1


@dataclass(frozen=True)
class GatesFile:
    """Content of a gates file: the tensors of gates, the rules that place them, and facts about the vanilla model.

    Attributes:
        tensors: The gates' tensors by their names in the gated model, and tensors that were trained with them by their
            names in the vanilla model.
        gates: Names of the gates' tensors.
        host: Type of the vanilla model.
        rules: Rules of :func:`mmgate.swap_attention`, by the path of the module whose attention they gate; ``''`` is
            the model.
        shapes: Shape of every tensor of the vanilla model, by name.
        trained: ``'gates'``, ``'attention'`` or ``'all'``, see :func:`mmgate.train_only_gates`.
        values: Checksums of some of the vanilla model's tensors; empty in older files.
    """

    tensors: dict[str, Tensor]
    gates: list[str]
    host: str
    rules: dict[str, list[dict[str, Any]]]
    shapes: dict[str, list[int]]
    trained: str
    values: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def host_tensors(self) -> dict[str, Tensor]:
        """Tensors of the vanilla model that were trained together with the gates, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.gates}

    def refuse_other(self, path: str, host: str, shapes: Mapping[str, list[int]]) -> None:
        """Raise an error if a vanilla model has other tensors (names, shapes) than the one on which the gates trained.

        Raises:
            ConfigError: There are differences; the message has the first.
        """
        different = []
        for name, shape in self.shapes.items():
            if name not in shapes:
                different.append(f'{name} is missing instead of {tuple(shape)}')
            elif list(shapes[name]) != shape:
                different.append(f'{name} is {tuple(shapes[name])} instead of {tuple(shape)}')
        different += [f'{name} is not known there' for name in shapes if name not in self.shapes]
        if different:
            raise ConfigError(
                f'{path} holds gates of a {self.host} of other tensors than this {host}: '
                f'{listed(different, separator="; ")}. Give the config and the checkpoint that they were trained with.'
            )

    def warn_of_other_values(self, path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
        """Warn if a vanilla model's weights have other values than those with which the gates were trained.

        Tensors of another dtype are not compared.
        """
        found = {name: checksum(state[name]) for name in self.values if name in state and not state[name].is_meta}
        compared = [name for name, (dtype, _) in found.items() if dtype == self.values[name][0]]
        differ = [name for name in compared if found[name] != tuple(self.values[name])]
        if differ:
            log(
                f'{path} holds gates that were trained beside other values: {len(differ)} of {len(compared)} tensors '
                f'that were compared differ ({", ".join(differ[:3])}). Load the vanilla checkpoint that they were '
                'trained with; of a model that was fine-tuned since, test whether they still fit.',
                logging.WARNING,
            )


def checksum(tensor: Tensor) -> tuple[str, int]:
    """Return the dtype of a tensor and a checksum of its values, as text."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype), crc32(values.view(torch.uint8).numpy().data)


def write_gates(path: str | os.PathLike[str], content: GatesFile) -> None:
    """Write a gates file; an older file of that name is replaced only when the new one is complete.

    Raises:
        ConfigError: The file cannot be written, or safetensors is not installed.
    """
    check_safetensors()
    from safetensors.torch import save

    described = {key: value for key, value in vars(content).items() if key != 'tensors'}
    meta = {KEY: json.dumps(dict(described, version=VERSION))}
    target = Path(path)
    beside = target.with_name(f'.{target.name}.{os.getpid()}')
    tensors = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in content.tensors.items()}
    try:
        beside.write_bytes(save(tensors, metadata=meta))
        os.replace(beside, target)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise ConfigError(f'{path} cannot be written: {error}.') from error


def read_gates(path: str | os.PathLike[str]) -> GatesFile:
    """Read a gates file and return its content, with tensors on the CPU.

    Raises:
        ConfigError: There is no such file, or it is damaged, of another version, or no gates file; or safetensors is
            not installed.
    """
    if not os.path.isfile(path):
        raise ConfigError(f'{path}: there is no such file of gates.')
    check_safetensors()
    try:
        tensors, metadata = read_safetensors(path)
    except ValueError as error:
        if _is_of_torch(path):
            raise ConfigError(
                f'{path} is a whole checkpoint, no file of gates. Write its gates into one: python '
                f'tools/model_converters/gates.py extract CONFIG {path} gates.safetensors, with the config of its '
                'training.'
            ) from error
        raise ConfigError(f'{path} cannot be read as a file of gates ({error}); write or copy it again.') from error
    if KEY not in metadata:
        raise ConfigError(
            f'{path} is no file of gates: it has no {KEY!r} in its metadata. mmgate.save_gates and '
            'tools/model_converters/gates.py extract write such files.'
        )
    try:
        described = json.loads(metadata[KEY])
        version = described.pop('version')
        # Other versions have other fields.
        if version == VERSION:
            content = GatesFile(tensors=tensors, **described)
            missing = set(content.gates) - set(tensors)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f'{path} is damaged: its description cannot be read ({error}).') from error
    if version != VERSION:
        raise ConfigError(f'{path} is a file of gates of version {version}, not {VERSION}.')
    if missing:
        raise ConfigError(f'{path} is damaged: tensors are missing.')
    return content


def _is_of_torch(path: str | os.PathLike[str]) -> bool:
    """Return True if a file begins like a checkpoint of torch: a zip file or, in older versions, a pickle."""
    with open(path, 'rb') as file:
        head = file.read(2)
    return head == b'PK' or head == b'\x80\x02'

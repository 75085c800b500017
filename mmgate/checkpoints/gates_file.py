"""Files of gates: their tensors in the safetensors format, and in its metadata where they belong."""

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
from mmgate.errors import ConfigError

from .safetensors_file import read_safetensors

KEY, VERSION = 'mmgate.gates', 1


@dataclass(frozen=True)
class GatesFile:
    """What a file of gates holds.

    Attributes:
        tensors: The gates by their names in the gated model, and what was trained with them by its vanilla names.
        gates: Names of those that the gates add to the vanilla model.
        host: Type of the vanilla model.
        rules: By the module below the model in which attention was replaced ('' is the model), the rules of
            :func:`mmgate.swap_attention`.
        shapes: By name, the shape of every tensor of the vanilla model.
        trained: ``'gates'``, ``'attention'`` or ``'all'``, see :func:`mmgate.train_only_gates`.
        values: Checksums of some of the vanilla model's tensors; none in files that were written before there were any.
    """

    tensors: dict[str, Tensor]
    gates: list[str]
    host: str
    rules: dict[str, list[dict[str, Any]]]
    shapes: dict[str, list[int]]
    trained: str
    values: dict[str, Sequence[Any]] = field(default_factory=dict)

    @property
    def also(self) -> dict[str, Tensor]:
        """Return what was trained with the gates."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.gates}

    def refuse_other(self, path: str, host: str, shapes: Mapping[str, list[int]]) -> None:
        """Refuse a vanilla model of other tensors than those beside which the gates were trained.

        Raises:
            ConfigError: With the first differences.
        """
        different = [
            f'{name} is {tuple(shapes[name]) if name in shapes else "missing"} instead of {tuple(shape)}'
            for name, shape in self.shapes.items()
            if list(shapes.get(name, ())) != shape or name not in shapes
        ]
        different += [f'{name} is not known there' for name in shapes if name not in self.shapes]
        if different:
            more = f' and {len(different) - 3} more' if len(different) > 3 else ''
            raise ConfigError(
                f'{path} holds gates of a {self.host} of other tensors than this {host}: '
                f'{"; ".join(different[:3])}{more}. Give the config and the checkpoint that they were trained with.'
            )

    def warn_of_other_values(self, path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> None:
        """Warn if tensors of ``state`` are others than beside the gates; of another dtype they are not compared."""
        found = {name: checksum(state[name]) for name in self.values if name in state and not state[name].is_meta}
        alike = [name for name, (dtype, _) in found.items() if dtype == self.values[name][0]]
        other = [name for name in alike if found[name] != tuple(self.values[name])]
        if other:
            log(
                f'{path} holds gates that were trained beside other values: {len(other)} of {len(alike)} tensors that '
                f'were compared differ ({", ".join(other[:3])}). Load the vanilla checkpoint that they were trained '
                'with; of a model that was fine-tuned since, test whether they still fit.',
                logging.WARNING,
            )


def checksum(tensor: Tensor) -> tuple[str, int]:
    """Return the dtype of a tensor and a checksum of its values."""
    values = tensor.detach().cpu().contiguous().reshape(-1)
    return str(tensor.dtype), crc32(values.view(torch.uint8).numpy().data)


def write_gates(path: str | os.PathLike[str], content: GatesFile) -> None:
    """Write a file of gates; a file of that name is replaced when the new one is whole.

    Raises:
        ConfigError: The file cannot be written.
    """
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
    """Read a file of gates, its tensors on the CPU.

    Raises:
        ConfigError: There is no such file, it is damaged, of another version, or something else.
    """
    if not os.path.isfile(path):
        raise ConfigError(f'{path}: there is no such file of gates.')
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
        if version == VERSION:  # others have other fields
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
    """Return whether a file that is not in the safetensors format begins as torch's: a zip, or a pickle before it."""
    with open(path, 'rb') as file:
        head = file.read(2)
    return head == b'PK' or head == b'\x80\x02'

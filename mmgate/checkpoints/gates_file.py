"""Read and write gates files: the gates of a model in the safetensors format, with the place and options of each."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from mmgate._environment import log
from mmgate.errors import ConfigError, listed

from .safetensors_file import check_safetensors, read_safetensors

KEY = 'mmgate.gates'
VERSION = 2
# Between the path of an attention and the name of a tensor of its gate.
GATE = '.gate.'


@dataclass(frozen=True)
class GatesFile:
    """Content of a gates file.

    Attributes:
        tensors: The gates' tensors by their names in the gated model, and tensors that were trained with them by their
            names in the vanilla model.
        gates: Names of the gates' tensors.
        trained: ``'gates'``, ``'attention'`` or ``'all'``, see :func:`mmgate.train_only_gates`.
        places: Type and options of each gate that a rule has placed, by the path of the module that the rule chose.
        values: Checksums of some of the vanilla model's tensors, by name.
        patterns: In a file of version 1, which has no places, rules by the path of the model to which they were given.
            ``**`` in their patterns is any text.
    """

    tensors: dict[str, Tensor]
    gates: list[str]
    trained: str
    places: dict[str, dict[str, Any]] = field(default_factory=dict)
    values: dict[str, Sequence[Any]] = field(default_factory=dict)
    patterns: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @property
    def host_tensors(self) -> dict[str, Tensor]:
        """Tensors of the vanilla model that were trained together with the gates, by name."""
        return {name: tensor for name, tensor in self.tensors.items() if name not in self.gates}

    @property
    def attention(self) -> list[str]:
        """Paths of the gated attention; where there are no places, the gates' tensors tell them."""
        return [*(self.places or dict.fromkeys(f'.{name}'.partition(GATE)[0][1:] for name in self.gates))]

    def fitted(self, path: str | os.PathLike[str], state: Mapping[str, Tensor]) -> GatesFile:
        """Return the content as far as a model can hold it.

        Tensors outside of gated attention that the model does not have in this shape, as those of a head for other
        classes, are left out with a warning.

        Args:
            path: The file, for messages.
            state: The model's tensors, by vanilla names.

        Raises:
            ConfigError: The model lacks attention for which the file has gates, or has a tensor in it that was trained
                with them in another shape.
        """
        prefixes = [f'{place}.'.lstrip('.') for place in self.attention]
        lost = [prefix[:-1] for prefix in prefixes if not any(name.startswith(prefix) for name in state)]
        if lost:
            raise ConfigError(
                f'{path} holds gates of {listed(lost)}, where this model has no attention. Give the config and the '
                'checkpoint that they were trained with. If layers were cut: load the file before that, and save the '
                'gates that are left into another.'
            )
        unfit = {
            name: f'{name} is {tuple(state[name].shape) if name in state else "missing"} instead of {tuple(one.shape)}'
            for name, one in self.host_tensors.items()
            if name not in state or state[name].shape != one.shape
        }
        inside = [said for name, said in unfit.items() if name.startswith(tuple(prefixes))]
        if inside:
            raise ConfigError(
                f'{path} holds attention of other sizes than this model: {listed(inside, separator="; ")}. Give the '
                'config and the checkpoint that it was trained with.'
            )
        if unfit:
            log(
                f'{path} holds tensors outside of gated attention that do not fit and are left out: '
                f'{listed([*unfit.values()], separator="; ")}.',
                logging.WARNING,
            )
        return replace(self, tensors={name: one for name, one in self.tensors.items() if name not in unfit})

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

    described = {key: value for key, value in vars(content).items() if key not in ('tensors', 'patterns')}
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
        if version == 1:
            described['patterns'] = described.pop('rules')
            for unused in ('host', 'shapes'):
                del described[unused]
        # Later versions have other fields.
        if version in (1, VERSION):
            content = GatesFile(tensors=tensors, **described)
            rules = [*content.places.values(), *(rule for rules in content.patterns.values() for rule in rules)]
            whole = set(content.gates) <= tensors.keys() and all('type' in rule for rule in rules)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(f'{path} is damaged: its description cannot be read ({error}).') from error
    if version not in (1, VERSION):
        raise ConfigError(f'{path} is a file of gates of version {version}; this mmgate reads 1 and {VERSION}.')
    if not whole:
        raise ConfigError(f'{path} is damaged: tensors or types of gates are missing.')
    return content


def _is_of_torch(path: str | os.PathLike[str]) -> bool:
    """Return True if a file begins like a checkpoint of torch: a zip file or, in older versions, a pickle."""
    with open(path, 'rb') as file:
        head = file.read(2)
    return head == b'PK' or head == b'\x80\x02'

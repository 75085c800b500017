"""Read the tensors, and nothing else, of a local or published checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from mmgate.errors import ConfigError

from .download import download
from .loading import load_checkpoint_file

State = dict[str, Tensor]
# Averaged weights come first, because the authors of CSwin and of its agent variant start from them and evaluate them.
PLACES = ('state_dict_ema', 'state_dict', 'model')


def read_checkpoint(source: str) -> Any:
    """Read the checkpoint at a path or URL and return its content, with tensors on the CPU.

    Some training scripts pickle their configuration beside the weights; agent attention's authors pickled a class of a
    package that may not be installed. Only tensors, numbers, strings and plain containers are loaded; any
    other object is left empty, and no code of the file runs. A web address is downloaded once into torch's cache;
    mmengine's loaders read other schemes (``torchvision://``, ``s3://``, ...).

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It cannot be downloaded, is no checkpoint, is cut short, or may run code.
    """
    scheme = urlparse(source).scheme if '://' in source else ''
    if scheme not in ('', 'http', 'https'):
        return CheckpointLoader.load_checkpoint(source, map_location='cpu', logger='current')
    return load_checkpoint_file(str(download(source)) if scheme else source, 'cpu', tensors_alone=True)


def tensors(checkpoint: object, prefix: str | None = None) -> State:
    """Return the model's tensors of a checkpoint, which lie at its top or below a key such as ``'state_dict'``.

    If keys begin with ``prefix`` (``backbone.`` if None), only their tensors are returned, by names without the prefix.

    Raises:
        ConfigError: There are no tensors where they are expected, or none with the ``prefix``.
    """
    top: Mapping[str, Any] = checkpoint if isinstance(checkpoint, Mapping) else {}
    places = [place for place in PLACES if top.get(place)]
    if len(places) > 1:
        print_log(f'The checkpoint holds {", ".join(places)}: reading {places[0]}', logger='current')
    state = top[places[0]] if places else top
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ConfigError(
            f'The checkpoint holds no tensors under {", ".join(PLACES)} or at its top; '
            f'its keys are {", ".join(map(str, list(top)[:8])) or "none"}.'
        )
    state = {key.removeprefix('module.'): value for key, value in state.items()}
    # mmengine adds a missing dot, too.
    start = (prefix or 'backbone.').removeprefix('module.').rstrip('.') + '.'
    part = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    if prefix and not part:
        raise ConfigError(f'No key of the checkpoint begins with prefix={prefix!r}: {", ".join(list(state)[:8])}.')
    return part or state

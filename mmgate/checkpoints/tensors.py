"""The tensors in a checkpoint file, local or published, and nothing else of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any
from urllib.parse import urlparse

from mmengine.logging import print_log
from mmengine.runner.checkpoint import CheckpointLoader
from torch import Tensor

from .download import download
from .loading import load_checkpoint_file

State = dict[str, Tensor]
# the averaged weights first: those are what CSwin's authors, with agents and without, start from and evaluate
PLACES = ('state_dict_ema', 'state_dict', 'model')


def read_checkpoint(source: str) -> Any:
    """Return what the checkpoint at a path or URL holds, with its tensors on the CPU.

    Training scripts pickle their whole configuration beside the weights (the published agent attention does, as a class
    of a package that need not be installed). Only tensors, numbers, strings and plain containers are loaded; any other
    object is left empty, and no code of the file runs. A web address is downloaded once into torch's cache; mmengine
    reads other schemes (``torchvision://``, ``s3://``, ...) in its own way.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It cannot be downloaded, is no checkpoint, cut short, or made to run code or to fill the memory.
    """
    scheme = urlparse(source).scheme if '://' in source else ''
    if scheme not in ('', 'http', 'https'):
        return CheckpointLoader.load_checkpoint(source, map_location='cpu', logger='current')
    return load_checkpoint_file(str(download(source)) if scheme else source, 'cpu', tensors_alone=True)


def tensors(checkpoint: Any, prefix: str | None = None) -> State:
    """Return the tensors of a checkpoint, under one of ``PLACES`` or at its top.

    Where keys begin with ``prefix``, or without one with ``backbone.``, those alone are returned, less the prefix.

    Raises:
        ValueError: There are no tensors where they are expected, or none with the ``prefix``.
    """
    top: Mapping[str, Any] = checkpoint if isinstance(checkpoint, Mapping) else {}
    places = [place for place in PLACES if top.get(place)]
    if len(places) > 1:
        print_log(f'The checkpoint holds {", ".join(places)}: reading {places[0]}', logger='current')
    state = top[places[0]] if places else top
    if not isinstance(state, Mapping) or not any(isinstance(value, Tensor) for value in state.values()):
        raise ValueError(
            f'The checkpoint holds no tensors under {", ".join(PLACES)} or at its top; '
            f'its keys are {", ".join(map(str, list(top)[:8])) or "none"}.'
        )
    state = {key.removeprefix('module.'): value for key, value in state.items()}
    start = (prefix or 'backbone.').removeprefix('module.').rstrip('.') + '.'  # mmengine adds the dot, too
    part = {key.removeprefix(start): value for key, value in state.items() if key.startswith(start)}
    if prefix and not part:
        raise ValueError(f'No key of the checkpoint begins with prefix={prefix!r}: {", ".join(list(state)[:8])}.')
    return part or state

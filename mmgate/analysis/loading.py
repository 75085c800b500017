"""Load models and images for the tools that draw attention and export models."""

from __future__ import annotations

import argparse
import csv
import glob
import logging
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.logging import print_log
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.utils import track_iter_progress
from torch import nn

from mmgate.analysis.arguments import UNTRAINED
from mmgate.analysis.probes.recording import require
from mmgate.errors import ConfigError
from mmgate.mm.config_file import (
    check_checkpoint,
    innermost,
    merge_options,
    package_of,
    read_config,
    type_name,
)
from mmgate.mm.gate_options import configured
from mmgate.mm.load_report import load_weights

IMAGES = ('.jpg', '.jpeg', '.png', '.ppm', '.bmp', '.pgm', '.tif', '.tiff', '.webp')


@dataclass(frozen=True)
class LoadedModel:
    """A model in eval mode with the weights of its checkpoint, and the config from which it was built.

    The name labels pictures: it is the config's file name without its ending, followed by the checkpoint where models
    share the config.

    Attributes:
        needs: Names of notes of which the model has to have one, see :func:`.probes.recording.require`.
        purpose: The tool's purpose, for the message where it has none.
    """

    name: str
    cfg: Config
    model: nn.Module
    needs: tuple[str, ...] = ()
    purpose: str = ''

    def inputs(self, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Yield each image of the command line as a batch for ``model.test_step``, and show a progress bar.

        Raises:
            ConfigError: An image or the data set is missing, or the model, on the first image, notes nothing that the
                tool needs.
        """
        init_default_scope(package_of(self.cfg) or 'mmdet')
        for number, sample in enumerate(track_iter_progress(self._samples(args))):
            batch = pseudo_collate([sample()])
            if self.needs and not number:
                require(self.model, batch, self.needs, f'{self.name}: {self.purpose}')
            yield batch

    def _samples(self, args: argparse.Namespace) -> list[Callable[[], Any]]:
        loader = self.cfg.get(f'{args.split}_dataloader') or self.cfg.get('test_dataloader')
        if loader is None:
            raise ConfigError(f'{self.cfg.filename} has no {args.split}_dataloader.')
        tests = innermost((self.cfg.get('test_dataloader') or loader).dataset)
        if args.images:
            steps = _still(tests.pipeline)
            loads = [step for step in steps if type_name(step).endswith('LoadImageFromFile')]
            others = [step for step in steps if not type_name(step).startswith('Load')]
            loads = loads or [dict(type='LoadImageFromFile')]
            in_memory = len(others) == len(steps)
            run = Compose([*loads, *([_to_rgb] if in_memory else []), *others])
            paths = [path for given in args.images for path in find_images(given)]
            return [partial(run, dict(img_path=path, img_id=number)) for number, path in enumerate(paths)]
        data = deepcopy(loader.dataset)
        own = innermost(data)
        # Pictures of training images go through the test pipeline, which crops nothing at random.
        own.pipeline = _still((tests if args.split == 'train' else own).pipeline)
        dataset = DATASETS.build(data)
        return [partial(_item, dataset, number, args.split) for number in range(min(args.max_images, len(dataset)))]


def _to_rgb(results: dict[str, Any]) -> dict[str, Any]:
    """Turn the BGR of a file into the RGB that data sets of images in memory hold."""
    return {**results, 'img': np.ascontiguousarray(results['img'][..., ::-1])}


def _item(dataset: Any, number: int, split: str) -> Any:
    """Return an item of a data set; an image in memory gets a name, and comes along to be drawn."""
    item = dataset[number]
    image = dataset.get_data_info(number).get('img')
    if image is not None:
        seen = tuple(item['inputs'].shape[-2:])
        named = dict(img_path=f'{split}_{number}', ori_shape=image.shape[:2], img_shape=seen, image=image)
        item['data_samples'].set_metainfo(named)
    return item


def _still(pipeline: Sequence[Any]) -> list[Any]:
    """Return a test pipeline without random flips, which leaves true boxes in pixels of the image on disk."""
    steps = [deepcopy(step) for step in pipeline if type_name(step) != 'RandomFlip']
    # Annotations that are loaded after a resize keep the pixels of the image on disk.
    return sorted(steps, key=lambda step: (type_name(step).startswith('Pack'), type_name(step) == 'LoadAnnotations'))


def load_models(args: argparse.Namespace, needs: Sequence[str], purpose: str) -> list[LoadedModel]:
    """Build and return the models that a drawing tool's arguments name, set to test on whole images.

    Args:
        args: The parsed command line.
        needs: Names of notes of which every model has to have one, see
            :func:`mmgate.analysis.probes.recording.require`.
        purpose: The tool's purpose, for the message.

    Raises:
        ConfigError: A config, a checkpoint or the folder for pictures cannot be used.
    """
    check_folder(Path(args.out))
    models = []
    pairs = [(args.config, args.checkpoint), *args.against]
    for number, (config, checkpoint) in enumerate(pairs):
        cfg = read_config(config) if number else configured(args)
        if number:
            merge_options(cfg, args.cfg_options or {})
        loaded = load_model(cfg, checkpoint, args.device)
        if not number and (args.gate or args.gates):
            loaded = replace(loaded, name=f'{loaded.name}, gated')
        loaded = replace(loaded, needs=tuple(needs), purpose=purpose)
        settings: Any = getattr(loaded.model, 'test_cfg', None)
        # Of several windows only the last would be recorded.
        if isinstance(settings, dict) and settings.get('mode') == 'slide':
            settings['mode'] = 'whole'
            words = 'is tested by windows that slide over an image; it is drawn on the whole image at once.'
            print_log(f'{loaded.name} {words}', logger='current', level=logging.WARNING)
        models.append(loaded)
    if len({model.name for model in models}) < len(models):
        given = [checkpoint for _, checkpoint in pairs]
        numbers = [str(number) for number in range(1, len(given) + 1)]
        labels = given if len(set(given)) == len(given) else numbers
        models = [replace(model, name=f'{model.name} ({label})') for model, label in zip(models, labels, strict=True)]
    return models


def load_model(cfg: Config, checkpoint: str, device: str = 'cpu', *, whole: bool = False) -> LoadedModel:
    """Build a config's model, load its checkpoint (a file, a URL or ``'untrained'``) and return it in eval mode.

    Raises:
        ConfigError: The checkpoint cannot be read, is not the model's, or does not fill all of it (``whole``).
    """
    init_default_scope(package_of(cfg) or 'mmdet')
    if checkpoint != UNTRAINED:
        check_checkpoint(checkpoint)
    torch.manual_seed(0)
    # Hosts write into the config that they are built from.
    model = MODELS.build(deepcopy(cfg.model))
    if checkpoint == UNTRAINED:
        model.init_weights()
    else:
        load_weights(model, checkpoint, whole=whole)
    # Some models return None from ``eval``.
    model.to(device).eval()
    return LoadedModel(Path(cfg.filename).stem, cfg, model)


def class_names(cfg: Config) -> tuple[str, ...]:
    """Return the object classes' names that a config's test data set has, an empty tuple if there are none."""
    loader = cfg.get('test_dataloader')
    if loader is None:
        return ()
    dataset = innermost(loader.dataset)
    with DATASETS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        cls = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    return tuple((dataset.get('metainfo') or {}).get('classes') or getattr(cls, 'METAINFO', {}).get('classes', ()))


def picture_names(images: Iterable[str]) -> dict[str, str]:
    """Return for each image the name of the picture that is drawn of it: its path below the images' common folder."""
    listed = {image: Path(os.path.abspath(image)) for image in images}
    shared = os.path.commonpath([path.parent for path in listed.values()])
    names = {image: '_'.join(path.relative_to(shared).with_suffix('').parts) for image, path in listed.items()}
    # Two images may differ in their suffix alone (1.jpg and 1.png).
    taken = list(names.values())
    return {image: name if taken.count(name) == 1 else name + listed[image].suffix for image, name in names.items()}


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write rows, dicts of the same keys, into a CSV file with numbers rounded to six places; return the path."""
    remaining = iter(rows)
    first = next(remaining, None)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, list(first or ()))
        writer.writeheader()
        for row in chain(() if first is None else (first,), remaining):  # one at a time, of millions of samples
            writer.writerow({k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()})
    return path


def check_folder(folder: Path) -> None:
    """Make an output folder, and raise ConfigError if nothing can be written into it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f'nothing can be written to {folder}: {error}. Give another --out.') from error


def find_images(inputs: str) -> list[str]:
    """Return the paths of the images that a file, URL, folder or glob pattern names; none is a ConfigError."""
    if os.path.isfile(inputs) or '://' in inputs:
        return [inputs]
    found = glob.glob(os.path.join(inputs, '*') if os.path.isdir(inputs) else inputs)
    images = sorted(path for path in found if path.lower().endswith(IMAGES))
    if not images:
        raise ConfigError(f'{inputs} is no image, no folder with images ({" ".join(IMAGES)}) and no pattern of any.')
    return images

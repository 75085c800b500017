"""The models and images that a tool looks at: one command line for all tools that draw what attention does."""

from __future__ import annotations

import argparse
import csv
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.logging import print_log
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.utils import track_iter_progress
from torch import nn

from mmgate.analysis.probes.recording import require
from mmgate.checkpoints.loading import add_trust_option
from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import merge_options, read_config, type_name
from mmgate.train.inputs import check_checkpoint, check_data, check_device, check_folder, find_images
from mmgate.train.load_report import load_weights

UNTRAINED = 'untrained'


@dataclass(frozen=True)
class Subject:
    """A model to look at.

    Attributes:
        name: The config's file name without its ending, and what tells its checkpoint from another's; labels pictures.
        cfg: The config.
        model: The model in eval mode with its weights.
    """

    name: str
    cfg: Config
    model: nn.Module

    def inputs(self, args: argparse.Namespace) -> Iterator[dict[str, Any]]:
        """Yield batches of one image each for ``model.test_step``, with a progress bar.

        Raises:
            ConfigError: An image or the data set is missing.
        """
        init_default_scope(self.cfg.get('default_scope') or 'mmdet')
        for sample in track_iter_progress(list(self._samples(args))):
            yield pseudo_collate([sample() if callable(sample) else sample])

    def _samples(self, args: argparse.Namespace) -> Iterator[Any]:
        loader = self.cfg.get(f'{args.split}_dataloader') or self.cfg.get('test_dataloader')
        if loader is None:
            raise ConfigError(f'{self.cfg.filename} has no {args.split}_dataloader.')
        if args.images:
            paths = [path for given in args.images for path in find_images(given)]
            steps = _still(_dataset(self.cfg.get('test_dataloader') or loader).pipeline)
            loads = [step for step in steps if type_name(step).endswith('LoadImageFromFile')]
            others = [step for step in steps if not type_name(step).startswith('Load')]
            read, pipeline = Compose(loads or [dict(type='LoadImageFromFile')]), Compose(others)
            for number, path in enumerate(paths):
                yield lambda path=path, number=number: pipeline(_read(read, path, number))
            return
        check_data(self.cfg, [args.split])
        data = deepcopy(loader.dataset)
        own = _dataset(loader, data)
        # no random crops in a picture
        own.pipeline = _still((_dataset(self.cfg.test_dataloader) if args.split == 'train' else own).pipeline)
        dataset = DATASETS.build(data)
        for number in range(min(args.max_images, len(dataset))):
            yield lambda number=number: dataset[number]


def _read(read: Compose, path: str, number: int) -> dict[str, Any]:
    try:
        return read(dict(img_path=path, img_id=number))
    except Exception as error:  # whatever a backend says of what is no image
        raise ConfigError(f'--images: {path} cannot be read as an image: {error}') from error


def parser(description: str | None) -> argparse.ArgumentParser:
    """Return the command line that all of these tools share; a tool adds its own options."""
    shared = argparse.ArgumentParser(description=description)
    shared.add_argument('config', help="config file, or 'package::path'")
    shared.add_argument('checkpoint', help=f"checkpoint file or URL; '{UNTRAINED}' for the model as it is initialised")
    shared.add_argument('--against', nargs=2, metavar=('CONFIG', 'CHECKPOINT'), help='a second model, drawn beside')
    where = shared.add_mutually_exclusive_group()
    where.add_argument('--images', nargs='+', help='image files, folders of some, or patterns')
    where.add_argument('--split', default='val', choices=['train', 'val', 'test'], help='images of the data set')
    shared.add_argument('--max-images', type=positive, default=8, help='of the split (default 8)')
    changed = "override settings of the config, and of the second model's: key=value"
    shared.add_argument('--cfg-options', nargs='+', action=cli.Options, help=changed)
    shared.add_argument('--device', default='cpu', help='cpu (default) or cuda')
    shared.add_argument('--out', required=True, help='folder for pictures and CSV files')
    add_trust_option(shared)
    return shared


def positive(text: str) -> int:
    """Return a number of 1 or more, for a command line."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f'{text}: give 1 or more.')
    return number


def subjects(args: argparse.Namespace, readings: Sequence[str], purpose: str, *, whole: bool = False) -> list[Subject]:
    """Return the models that a command line names, one or two.

    Args:
        args: Of :func:`parser`.
        readings: What there has to be in every model, see :func:`mmgate.analysis.probes.recording.require`.
        purpose: What for, likewise.
        whole: Whether the picture is of one forward pass over the whole image: models that slide a window over it are
            told not to.

    Raises:
        ConfigError: A config, a checkpoint, the device or the folder for pictures cannot be used, or a model has none
            of the readings.
    """
    check_folder(Path(args.out))
    check_device(args.device)
    loaded = []
    for config, checkpoint in [(args.config, args.checkpoint), *([args.against] if args.against else [])]:
        cfg = read_config(config)
        if args.cfg_options:
            merge_options(cfg, args.cfg_options)
        subject = build_subject(cfg, checkpoint, args.device)
        require(subject.model, readings, f'{subject.name}: {purpose}')
        if whole:
            _see_whole_images(subject)
        loaded.append((subject, checkpoint))
    models = [subject for subject, _ in loaded]
    if len(models) == 2 and models[0].name == models[1].name:
        labels = apart(*(checkpoint for _, checkpoint in loaded))
        models = [
            replace(subject, name=f'{subject.name} ({label})') for subject, label in zip(models, labels, strict=True)
        ]
    return models


def apart(one: str, other: str) -> tuple[str, str]:
    """Return what tells two checkpoints apart: the parts of their paths that differ; their numbers if none does."""
    stems = [Path(path).with_suffix('').parts for path in (one, other)]
    length = max(map(len, stems))
    padded = [('',) * (length - len(parts)) + parts for parts in stems]
    differ = [number for number, (a, b) in enumerate(zip(*padded, strict=True)) if a != b]
    first, second = ('/'.join(parts[number] for number in differ) for parts in padded)
    return (first, second) if differ and first and second else ('first', 'second')


def _see_whole_images(subject: Subject) -> None:
    settings = getattr(subject.model, 'test_cfg', None)
    if isinstance(settings, Mapping) and settings.get('mode') == 'slide':
        settings['mode'] = 'whole'  # type: ignore[index]
        print_log(
            f'{subject.name} is tested by windows that slide over an image; it is drawn on the whole image at once.',
            logger='current',
            level=logging.WARNING,
        )


def build_subject(cfg: Config, checkpoint: str, device: str = 'cpu', *, whole: bool = False) -> Subject:
    """Return a config's model with a checkpoint's weights, on ``device``, in eval mode.

    Args:
        cfg: Of the model.
        checkpoint: File, address, or ``'untrained'``.
        device: Such as ``'cpu'``.
        whole: Whether the checkpoint has to fill every parameter.

    Raises:
        ConfigError: The checkpoint cannot be read, or is not the model's.
    """
    init_default_scope(cfg.get('default_scope') or 'mmdet')
    if checkpoint != UNTRAINED:
        check_checkpoint(checkpoint, sharded=False)
    torch.manual_seed(0)
    model = MODELS.build(deepcopy(cfg.model))  # hosts write into the config they build from
    if checkpoint == UNTRAINED:
        try:
            model.init_weights()
        except OSError as error:
            raise ConfigError(
                f'the weights that {cfg.filename} starts from cannot be read: {error}. Give a checkpoint, or '
                'leave them out by --cfg-options model.backbone.init_cfg=None.'
            ) from error
    else:
        load_weights(model, checkpoint, whole=whole)
    model.to(device).eval()  # some hosts return None from it
    return Subject(Path(cfg.filename).stem, cfg, model)


def predict(model: nn.Module, batch: dict[str, Any]) -> Any:
    """Return the model's result for a batch of one image, without gradients; None from what returns nothing."""
    with torch.no_grad():
        found = model.test_step(batch)  # type: ignore[operator]
    return found[0] if found else None


def class_names(cfg: Config) -> tuple[str, ...]:
    """Return the names of the classes of a config's test data; none if it says nothing."""
    loader = cfg.get('test_dataloader')
    if loader is None:
        return ()
    dataset = _dataset(loader)
    with DATASETS.switch_scope_and_registry(cfg.get('default_scope')) as registry:
        kind = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    return tuple((dataset.get('metainfo') or {}).get('classes') or getattr(kind, 'METAINFO', {}).get('classes', ()))


def image_name(path: str) -> str:
    """Return the one name under which an image is known however its path is written."""
    return str(Path(path).resolve()) if '://' not in path else path


def picture_names(images: Iterable[str]) -> dict[str, str]:
    """Return a name for the picture of each image: the file's, with folders before it as far as two need them."""
    listed = list(dict.fromkeys(images))
    parts = {image: Path(image).with_suffix('').parts for image in listed}
    length = 1
    while len({found[-length:] for found in parts.values()}) < len({*parts.values()}):
        length += 1
    names = {image: '_'.join(part for part in found[-length:] if part != '/') for image, found in parts.items()}
    taken = list(names.values())  # 1.jpg and 1.png
    return {image: name if taken.count(name) == 1 else f'{name}{Path(image).suffix}' for image, name in names.items()}


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    """Write dicts of the same keys, numbers rounded to six places, and return the path."""
    listed: Sequence[Mapping[str, Any]] = list(rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open('w', newline='') as file:
        writer = csv.DictWriter(file, list(listed[0]) if listed else [])
        writer.writeheader()
        for row in listed:
            writer.writerow({k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()})
    return path


def _still(pipeline: Sequence[Any]) -> list[Any]:
    """Return a copy of a pipeline without random flips, which boxes and points would not follow.

    Raises:
        ConfigError: It makes several images of one.
    """
    kinds = [type_name(step) for step in pipeline]
    if 'TestTimeAug' in kinds:
        raise ConfigError('the test pipeline makes several images of each (TestTimeAug); give the config without it.')
    return [deepcopy(step) for step, kind in zip(pipeline, kinds, strict=True) if kind != 'RandomFlip']


def _dataset(loader: Any, dataset: Any = None) -> Any:
    """Return the innermost data set's config, past wrappers."""
    dataset = loader.dataset if dataset is None else dataset
    while 'pipeline' not in dataset and 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset

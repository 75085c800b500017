"""The models and images that a tool looks at: one command line for all tools that draw what attention does."""

from __future__ import annotations

import argparse
import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mmengine.config import Config
from mmengine.dataset import Compose, pseudo_collate
from mmengine.registry import DATASETS, MODELS, init_default_scope
from mmengine.utils import track_iter_progress
from torch import nn

from mmgate.engine import cli
from mmgate.engine.hooks import load_weights
from mmgate.engine.preflight import ConfigError, check_checkpoint, check_data
from mmgate.engine.safe_load import add_trust_option

UNTRAINED = 'untrained'


@dataclass(frozen=True)
class Subject:
    """A model to look at.

    Attributes:
        name: The config's file name without its ending; labels pictures.
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
            missing = [path for path in args.images if not Path(path).is_file()]
            if missing:
                raise ConfigError(f'--images: {", ".join(missing)} does not exist.')
            steps = _dataset(self.cfg.get('test_dataloader') or loader).pipeline
            loads = [step for step in steps if str(step['type']).endswith('LoadImageFromFile')]
            others = [step for step in steps if not str(step['type']).rpartition('.')[2].startswith('Load')]
            read, pipeline = Compose(loads or [dict(type='LoadImageFromFile')]), Compose(others)
            for number, path in enumerate(args.images):
                yield lambda path=path, number=number: pipeline(_read(read, path, number))
            return
        check_data(self.cfg, [args.split])
        data = deepcopy(loader.dataset)
        if args.split == 'train':  # no random crops and flips in a picture
            _dataset(loader, data).pipeline = deepcopy(_dataset(self.cfg.test_dataloader).pipeline)
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
    where.add_argument('--images', nargs='+', help='image files')
    where.add_argument('--split', default='val', choices=['train', 'val', 'test'], help='images of the data set')
    shared.add_argument('--max-images', type=int, default=8, help='of the split (default 8)')
    shared.add_argument('--device', default='cpu', help='cpu (default) or cuda')
    shared.add_argument('--out', required=True, help='folder for pictures and CSV files')
    add_trust_option(shared)
    return shared


def subjects(args: argparse.Namespace) -> list[Subject]:
    """Return the models that a command line names, one or two.

    Raises:
        ConfigError: A config, a checkpoint or the device cannot be used.
    """
    if args.max_images < 1:
        raise ConfigError(f'--max-images {args.max_images}: give 1 or more.')
    if args.device.startswith('cuda') and not torch.cuda.is_available():
        raise ConfigError('--device cuda: torch sees no GPU here.')
    pairs = [(args.config, args.checkpoint), *([args.against] if args.against else [])]
    loaded = [load_subject(config, checkpoint, args.device) for config, checkpoint in pairs]
    if len(loaded) == 2 and loaded[0].name == loaded[1].name:
        loaded = [Subject(f'{s.name} ({Path(p[1]).stem})', s.cfg, s.model) for s, p in zip(loaded, pairs, strict=True)]
    return loaded


def load_subject(config: str, checkpoint: str, device: str = 'cpu') -> Subject:
    """Return the model of a config file with a checkpoint's weights, on ``device``, in eval mode."""
    return build_subject(cli.read_config(config), checkpoint, device)


def build_subject(cfg: Config, checkpoint: str, device: str = 'cpu') -> Subject:
    """Return a config's model with a checkpoint's weights, on ``device``, in eval mode."""
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
                'leave them out by --cfg-options, as in model.backbone.init_cfg=None.'
            ) from error
    else:
        load_weights(model, checkpoint)
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
    kind = DATASETS.get(dataset.type)
    return tuple((dataset.get('metainfo') or {}).get('classes') or getattr(kind, 'METAINFO', {}).get('classes', ()))


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


def _dataset(loader: Any, dataset: Any = None) -> Any:
    """Return the innermost data set's config, past wrappers."""
    dataset = loader.dataset if dataset is None else dataset
    while 'pipeline' not in dataset and 'dataset' in dataset:
        dataset = dataset.dataset
    return dataset

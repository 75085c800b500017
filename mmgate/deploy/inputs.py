"""Command-line arguments that the tools in tools/deploy share: checkpoint, and images on which results are compared."""

from __future__ import annotations

import argparse
from typing import Any

from mmgate.analysis.loading import LoadedModel, add_inputs, load_model
from mmgate.errors import ConfigError
from mmgate.train.gate_options import configured

FOLDER = 'work_dirs/deploy'


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add arguments for the checkpoint, and for the images on which results are compared, to a parser."""
    add_inputs(parser, split='test', count=4)
    parser.add_argument('--score-thr', type=float, default=0.05, help='detections are compared above it (default 0.05)')


def load_with_images(args: argparse.Namespace, *, whole: bool = False) -> tuple[LoadedModel, list[dict[str, Any]]]:
    """Load the model that the arguments name; return it, and each image as a batch of one."""
    loaded = load_model(configured(args), args.checkpoint, whole=whole)
    batches = list(loaded.inputs(args))
    if not batches:
        raise ConfigError('there is no image to compare on: the data set is empty.')
    return loaded, batches

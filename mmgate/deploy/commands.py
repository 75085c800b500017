"""The command lines of tools/deploy: write a model as a file, evaluate a file."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mmengine.config import DictAction
from mmengine.logging import print_log

from mmgate.analysis.loading import LoadedModel, add_inputs, load_model
from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import add_trust_option, check_data, load_config, merge_options, read_config

from . import export as exporting
from .networks import serve
from .runtime import Exported
from .sampling import SAMPLERS

FOLDER = 'work_dirs/deploy'


def export(argv: list[str]) -> None:
    """Write a model as a file and compare what it finds with what PyTorch finds."""
    parser = config_parser(
        'Write a detector or a segmentor as a file, and compare the file with PyTorch on real images'
    )
    add_images(parser)
    parser.add_argument('--format', choices=sorted(exporting.SUFFIXES), default='onnx', help='(default onnx)')
    parser.add_argument('--out', help='file to write (default, in work_dirs/deploy: NAME.onnx, NAME.pt2, NAME-aot.pt2)')
    parser.add_argument(
        '--msda',
        choices=sorted(SAMPLERS),
        default='gather',
        help="deformable attention as gathered rows (default), as GridSample, or as a node of TensorRT's plug-in; "
        'TensorRT compiles GridSample in deformable attention wrongly without a word (NVIDIA/TensorRT issue 4813)',
    )
    parser.add_argument(
        '--fixed-size', action='store_true', help="take images of the first one's size alone, without trying others"
    )
    parser.add_argument(
        '--allow-mismatch', action='store_true', help='export although the checkpoint lacks some of the parameters'
    )
    args = parser.parse_args(argv)
    exporting.check_format(args.format, args.msda)
    suffix = exporting.SUFFIXES[args.format]
    name = Path(args.config).stem + ('-aot' if args.format == exporting.PACKAGE else '')
    path = Path(args.out or f'{FOLDER}/{name}{suffix}')
    if path.suffix != suffix:
        raise ConfigError(f'--out {path}: a file of --format {args.format} ends with {suffix}.')
    exporting.check_writable(path)
    loaded, batches = load_with_images(args, whole=not args.allow_mismatch)
    options = dict(format=args.format, msda=args.msda, fixed_size=args.fixed_size, threshold=args.score_thr)
    found = exporting.export(loaded.model, batches, path, **options)
    print_log(f'{path} is as PyTorch: {found}', logger='current')


def test(argv: list[str]) -> None:
    """Evaluate an exported file on the test data of a config, by its evaluator."""
    parser = config_parser('Evaluate an exported file on the test data of its config')
    parser.add_argument('file', help='.onnx or .pt2 file of tools/deploy/export.py')
    parser.add_argument('--work-dir', help='folder for logs and metrics (default: work_dirs/deploy/NAME)')
    add_trust_option(parser)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir or f'{FOLDER}/{Path(args.file).stem}'
    run = Exported(args.file)
    args.launcher = 'none'
    cfg = load_config(args)
    check_data(cfg, ('test',))
    runner = cli.build_runner(cfg)
    serve(runner.model, run)
    runner.test()


def config_parser(description: str) -> argparse.ArgumentParser:
    """Return a parser of a config and its overrides."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    parser.add_argument('--cfg-options', nargs='+', action=DictAction, help='override settings: key=value')
    return parser


def add_images(parser: argparse.ArgumentParser) -> None:
    """Add the checkpoint and the images to compare on."""
    add_inputs(parser, split='test', count=4)
    parser.add_argument('--score-thr', type=float, default=0.05, help='detections are compared above it (default 0.05)')


def load_with_images(args: argparse.Namespace, *, whole: bool = False) -> tuple[LoadedModel, list[dict[str, Any]]]:
    """Return the model, and its images as batches of one."""
    cfg = read_config(args.config)
    if args.cfg_options:
        merge_options(cfg, args.cfg_options)
    loaded = load_model(cfg, args.checkpoint, whole=whole)
    batches = list(loaded.inputs(args))
    if not batches:
        raise ConfigError('there is no image to compare on: the data set is empty.')
    return loaded, batches

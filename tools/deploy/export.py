"""Write a detector or a segmentor as a file that runs without it, and compare the file with PyTorch on real images."""

import signal
import sys
from pathlib import Path

from mmengine.logging import print_log

import mmgate  # noqa: F401
from mmgate.analysis.loading import check_folder
from mmgate.deploy.export import TIME_LIMIT, export
from mmgate.deploy.formats import SUFFIXES, check_format
from mmgate.deploy.inputs import FOLDER, add_images, load_with_images
from mmgate.deploy.sampling import SAMPLERS
from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import config_parser
from mmgate.train.gate_options import add_gate_options


def main(argv: list[str]) -> None:
    """Parse arguments, export and compare."""
    parser = config_parser(__doc__)
    add_gate_options(parser)
    add_images(parser)
    parser.add_argument('--format', choices=sorted(SUFFIXES), default='onnx', help='(default onnx)')
    parser.add_argument('--out', help='file to write (default, in work_dirs/deploy: NAME.onnx, NAME.pt2)')
    parser.add_argument(
        '--msda',
        choices=sorted(SAMPLERS),
        default='gather',
        help='deformable attention as gathered rows (default), or as GridSample, which TensorRT compiles wrongly there '
        'without a word (NVIDIA/TensorRT issue 4813)',
    )
    parser.add_argument(
        '--fixed-size', action='store_true', help="take images of the first one's size alone, without trying others"
    )
    parser.add_argument(
        '--time-limit',
        type=float,
        default=TIME_LIMIT,
        metavar='SECONDS',
        help=f'that writing a graph may take, before the next kind of sizes is tried (default {TIME_LIMIT:g}; 0: none)',
    )
    parser.add_argument(
        '--allow-mismatch', action='store_true', help='export although the checkpoint lacks some of the parameters'
    )
    args = parser.parse_args(argv)
    if not 0 <= args.time_limit < float('inf'):
        raise ConfigError(f'--time-limit {args.time_limit:g}: give seconds above 0, or 0 for no limit.')
    check_format(args.format)
    suffix = SUFFIXES[args.format]
    path = Path(args.out or f'{FOLDER}/{Path(args.config).stem}{suffix}')
    if path.suffix != suffix:
        raise ConfigError(f'--out {path}: a file of --format {args.format} ends with {suffix}.')
    check_folder(path.parent)
    loaded, batches = load_with_images(args, whole=not args.allow_mismatch)
    options = dict(format=args.format, msda=args.msda, fixed_size=args.fixed_size, threshold=args.score_thr)
    found = export(loaded.model, batches, path, seconds=args.time_limit, **options)
    print_log(f'{path} is as PyTorch: {found}', logger='current')


if __name__ == '__main__':
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # like Ctrl-C, after which no partial file is left
    sys.exit(cli.main(main))

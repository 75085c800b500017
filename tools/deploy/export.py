"""Write a detector or a segmentor as an ONNX file, and compare the file with PyTorch on real images."""

import argparse
import sys
from pathlib import Path

from mmgate.analysis.arguments import add_inputs, gated_parser, run
from mmgate.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = gated_parser(__doc__)
    add_inputs(parser, split='test', count=4)
    parser.add_argument('--score-thr', type=float, default=0.05, help='detections are compared above it (default 0.05)')
    parser.add_argument('--out', help='file to write (default: work_dirs/deploy/NAME.onnx)')
    parser.add_argument(
        '--fixed-size', action='store_true', help="take images of the largest one's size alone, without trying others"
    )
    parser.add_argument(
        '--allow-mismatch', action='store_true', help='export although the checkpoint lacks some of the parameters'
    )
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, export and compare."""
    args = parser().parse_args(argv)
    from mmengine.logging import print_log

    from mmgate.analysis.loading import check_folder, load_model
    from mmgate.deploy.export import check_environment, export
    from mmgate.mm.gate_options import configured

    check_environment()
    path = Path(args.out or f'work_dirs/deploy/{Path(args.config).stem}.onnx')
    if path.suffix != '.onnx':
        raise ConfigError(f'--out {path}: an ONNX file ends with .onnx.')
    check_folder(path.parent)
    loaded = load_model(configured(args), args.checkpoint, whole=not args.allow_mismatch)
    batches = list(loaded.inputs(args))
    if not batches:
        raise ConfigError('there is no image to compare on: the data set is empty.')
    found = export(loaded.model, batches, path, fixed_size=args.fixed_size, threshold=args.score_thr)
    print_log(f'{path} is as PyTorch: {found}', logger='current')


if __name__ == '__main__':
    sys.exit(run(parser, main))

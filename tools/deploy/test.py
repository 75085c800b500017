"""Evaluate an exported file on the test data of its config, by the config's evaluator."""

import argparse
import sys
from pathlib import Path

from mmgate.analysis.arguments import gated_parser, run
from mmgate.mm import cli
from mmgate.mm.config_file import add_trust_option


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = gated_parser(__doc__)
    parser.add_argument('file', help='ONNX file of tools/deploy/export.py')
    parser.add_argument('--runtime', default='onnxruntime', help='onnxruntime (default) or openvino, to run the file')
    parser.add_argument('--work-dir', help='folder for logs and metrics (default: work_dirs/deploy/NAME)')
    add_trust_option(parser)
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments and evaluate."""
    args = parser().parse_args(argv)
    from mmgate.deploy.build import serve
    from mmgate.deploy.runtime import Exported

    args.work_dir = args.work_dir or f'work_dirs/deploy/{Path(args.file).stem}'
    exported = Exported(args.file, args.runtime)
    args.launcher = 'none'
    runner = cli.build_runner(cli.load_config(args))
    serve(runner.model, exported)
    runner.test()


if __name__ == '__main__':
    sys.exit(run(parser, main))

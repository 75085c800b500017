"""Evaluate an exported file on the test data of its config, by the config's evaluator."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.deploy.build import serve
from mmgate.deploy.runtime import RUNTIMES, Exported
from mmgate.mm import cli
from mmgate.mm.config_file import add_trust_option, config_parser, load_config
from mmgate.mm.gate_options import add_gate_options, put_gates


def main(argv: list[str]) -> None:
    """Parse arguments and evaluate."""
    parser = config_parser(__doc__)
    parser.add_argument('file', help='ONNX file of tools/deploy/export.py')
    parser.add_argument(
        '--runtime', choices=RUNTIMES, default='onnxruntime', help='runtime that runs the file (default onnxruntime)'
    )
    parser.add_argument('--work-dir', help='folder for logs and metrics (default: work_dirs/deploy/NAME)')
    add_gate_options(parser)
    add_trust_option(parser)
    args = parser.parse_args(argv)
    args.work_dir = args.work_dir or f'work_dirs/deploy/{Path(args.file).stem}'
    run = Exported(args.file, args.runtime)
    args.launcher = 'none'
    cfg = load_config(args)
    put_gates(cfg, args.gate, gates=args.gates, train=args.train)
    runner = cli.build_runner(cfg)
    serve(runner.model, run)
    runner.test()


if __name__ == '__main__':
    sys.exit(cli.main(main))

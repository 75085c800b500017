"""Time a model in PyTorch, compiled and as exported files, on one real image."""

import sys
from pathlib import Path

import torch

import mmgate  # noqa: F401
from mmgate.analysis.loading import positive
from mmgate.benchmarks.deployment import PROVIDERS, benchmark_deployment
from mmgate.benchmarks.measure import told, write_csv
from mmgate.deploy.export import check_format
from mmgate.deploy.inputs import FOLDER, add_images, load_with_images
from mmgate.train import cli
from mmgate.train.config_file import config_parser


def main(argv: list[str]) -> None:
    """Parse arguments, measure and write."""
    parser = config_parser(__doc__)
    add_images(parser)
    parser.add_argument('--providers', nargs='+', choices=PROVIDERS, default=PROVIDERS, help='default: all')
    parser.add_argument('--repetitions', type=positive, default=5)
    parser.add_argument('--threads', type=positive, help="torch's and onnxruntime's threads (default: all)")
    parser.add_argument('--out', help='CSV to write (default: work_dirs/deploy/NAME.csv)')
    args = parser.parse_args(argv)
    check_format('onnx')
    if args.threads:
        torch.set_num_threads(args.threads)
    loaded, batches = load_with_images(args)
    options = dict(providers=args.providers, repetitions=args.repetitions, threshold=args.score_thr)
    rows = benchmark_deployment(loaded.name, loaded.model, batches[0], Path(FOLDER), **options)
    out = Path(args.out or f'{FOLDER}/{Path(args.config).stem}.csv')
    write_csv(told(rows), out)
    print(f'written to {out}')


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Time a model in PyTorch, compiled and as exported files, in one run: ``python tools/deploy/benchmark.py --help``."""

import sys

import mmgate  # noqa: F401
from mmgate.benchmarks.deployment import benchmark
from mmgate.train import cli

if __name__ == '__main__':
    sys.exit(cli.main(benchmark))

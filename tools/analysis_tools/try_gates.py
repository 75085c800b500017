"""Try gates in a config's model: for each seed train the vanilla model and each gate, and compare them.

Example:
try_gates.py CONFIG --checkpoint vanilla.pth --gate 'encoder.layers.*.self_attn=PLuGMultiheadAttention' --iters 500
"""

import argparse
import sys
from pathlib import Path

from mmgate.analysis.arguments import add_processes, positive, run
from mmgate.mm.config_file import add_trust_option, config_parser


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = config_parser(__doc__)
    parser.add_argument('--checkpoint', help='vanilla checkpoint that all runs go on from (default: from the start)')
    shown = 'a gate to try, by one rule, or by several with ; between them; give it again for another one'
    form = "'PATH=TYPE(option=value, ...)'"
    parser.add_argument('--gate', action='append', required=True, metavar=form, help=shown)
    trains = ('gates', 'attention', 'all')
    parser.add_argument('--train', choices=trains, help='what of the gated models trains (default: all)')
    parser.add_argument('--seeds', type=positive, default=3, help='runs of each model (default %(default)s)')
    length = parser.add_mutually_exclusive_group()
    length.add_argument('--iters', type=positive, help='length of a run in iterations (default 500)')
    length.add_argument('--epochs', type=positive, help='in epochs instead')
    parser.add_argument('--validations', type=positive, default=4, help='of a run, evenly spaced (default %(default)s)')
    shown = "learning rate of gates, times the model's (default 1; with --checkpoint 20 for PLuG's)"
    parser.add_argument('--gate-rate', type=float, help=shown)
    parser.add_argument('--metric', help="figure to compare, by its name in the test's log (default: the evaluator's)")
    parser.add_argument('--amp', action='store_true', help='automatic mixed precision (on a GPU)')
    add_processes(parser)
    parser.add_argument('--out', help='folder of the trial (default: work_dirs/try_NAME)')
    parser.add_argument('--plan-only', action='store_true', help='stop after the costs and the plan')
    parser.add_argument('--verbose', action='store_true', help='show the output of the runs, else in their folders')
    add_trust_option(parser)
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, measure what gates cost, train what is missing, compare."""
    args = parser().parse_args(argv)
    args.iters = args.iters or (None if args.epochs else 500)
    from mmgate.benchmarks.gate_trial import try_gates

    try_gates(args, Path(__file__).resolve().parent)


if __name__ == '__main__':
    sys.exit(run(parser, main))

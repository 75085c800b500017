"""Count parameters and multiply-accumulates of a config's model, as papers on attention count them."""

import argparse
import json
import sys
from dataclasses import asdict

from mmgate.analysis.arguments import gated_parser, run


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = gated_parser(__doc__)
    parser.add_argument('--shape', type=int, nargs='+', default=[800, 1280], help='height and width, or one side')
    parser.add_argument('--json', action='store_true', help='print numbers as JSON')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, count and print."""
    args = parser().parse_args(argv)
    if len(args.shape) > 2 or min(args.shape) < 32:
        parser().error('--shape takes a height and a width, or one side, of 32 pixels or more')
    from mmengine.logging import MMLogger

    from mmgate.analysis.complexity import count_config
    from mmgate.mm.gate_options import configured

    MMLogger.get_current_instance().setLevel('ERROR')
    height = args.shape[0]
    width = args.shape[-1]
    counted = count_config(configured(args), height, width)
    if args.json:
        print(json.dumps(dict(asdict(counted), shape=[height, width])))
        return
    print(f'{args.config}, {height} x {width}')
    print(f'  trainable parameters  {counted.parameters / 1e6:10.3f} M')
    if counted.unused:
        print(f'  unused, replaced by gates {counted.unused / 1e6:6.3f} M, frozen and not counted above')
    print(f'  multiply-accumulates  {counted.macs / 1e9:10.3f} G')
    for name, macs in counted.by_module.items():
        if macs:
            print(f'    {name:19} {macs / 1e9:10.3f} G')


if __name__ == '__main__':
    sys.exit(run(parser, main))

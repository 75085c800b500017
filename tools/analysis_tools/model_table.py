"""Write parameters and multiply-accumulates, the papers' and ours, as a Markdown table."""

import argparse
from pathlib import Path

from mmengine.logging import MMLogger

from mmgate.analysis.report.model_table import HEADER, ROWS, markdown

START, END = '<!-- model table -->', '<!-- end of the model table -->'


def main() -> None:
    """Parse arguments, count and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--method', choices=sorted({row.method for row in ROWS}), help='only the rows of this folder')
    parser.add_argument('--out', type=Path, help=f'file to write; of one that has {START} the table in it is replaced')
    args = parser.parse_args()
    MMLogger.get_current_instance().setLevel('ERROR')
    lines = [HEADER]
    print(HEADER)
    for row in ROWS:
        if args.method in (None, row.method):
            lines.append(markdown(row))
            print(lines[-1], flush=True)
    if args.out:
        table = '\n'.join([START, *lines, END])
        text = args.out.read_text() if args.out.exists() else ''
        before, start, rest = text.partition(START)
        args.out.write_text(before + table + rest.partition(END)[2] if start else table + '\n')


if __name__ == '__main__':
    main()

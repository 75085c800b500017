"""Write the table of which gate fits which attention of mmdet's and mmseg's zoos into configs/README.md."""

import argparse
import logging
import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.report.host_table import PACKAGES, hosts_in, markdown, zoo
from mmgate.errors import ConfigError
from mmgate.train import cli

README = Path(__file__).parents[2] / 'configs/README.md'
BEGIN, END = '<!-- host_table.py begins -->\n', '<!-- host_table.py ends -->\n'


def main(argv: list[str]) -> None:
    """Parse arguments, read the zoos and rewrite the file between its markers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--file', type=Path, default=README, help='file with the markers')
    parser.add_argument('--print', action='store_true', help='print the table and leave the file as it is')
    args = parser.parse_args(argv)
    text = args.file.read_text()
    if not args.print and not (BEGIN in text and END in text):
        raise ConfigError(f'{args.file} lacks the markers {BEGIN.strip()} and {END.strip()}.')
    logging.getLogger('mmengine').setLevel(logging.ERROR)
    hosts, unbuilt = [], []
    for package in PACKAGES:
        for config in zoo(package):
            print(f'{package}::{config}', file=sys.stderr)
            try:
                hosts += hosts_in(package, config)
            except ConfigError as error:
                unbuilt.append(str(error).splitlines()[0])
    table = markdown(hosts, unbuilt)
    if args.print:
        print(table, end='')
    else:
        args.file.write_text(text.split(BEGIN)[0] + BEGIN + table + END + text.split(END)[1])


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Build a release, the source archive and from it the wheel, out of a copy of the files that git tracks."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from trees import ROOT, copy_tree


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=ROOT / 'dist')
    args = parser.parse_args()
    if args.out.is_dir() and any(args.out.iterdir()):
        parser.error(f'{args.out} is not empty; remove what an earlier build has left there')
    committed = subprocess.run(
        ['git', 'log', '-1', '--format=%ct'], cwd=ROOT, check=True, capture_output=True, text=True
    )
    environment = {'SOURCE_DATE_EPOCH': committed.stdout.strip(), **os.environ}
    with tempfile.TemporaryDirectory(prefix='dist-') as folder:
        copy_tree(Path(folder))
        command = [sys.executable, '-W', 'ignore', '-m', 'build', '--no-isolation', '--outdir', str(args.out), folder]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
    print(*sorted(args.out.iterdir()), sep='\n')


if __name__ == '__main__':
    main()

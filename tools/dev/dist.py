"""Build the files of a release: source archive, wheel, bill of materials, checksums.

The same commit gives the same bytes. The build runs in a copy of the files that git tracks, with the commit's time (or
SOURCE_DATE_EPOCH) and the same rights on every file, and uses this environment's setuptools and wheel. The bill of
materials lists this environment, in which the tests run.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

from trees import ROOT, copy_tree

BOM = (
    'environment',
    '--mc-type',
    'library',
    '--pyproject',
    str(ROOT / 'pyproject.toml'),
    '--output-reproducible',
    '--output-format',
    'JSON',
)


def main() -> None:
    """Parse the command line and build."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--out', type=Path, default=ROOT / 'dist')
    parser.add_argument(
        '--no-bom', action='store_true', help='without the bill of materials, which needs cyclonedx-bom'
    )
    args = parser.parse_args()
    epoch = int(os.environ.get('SOURCE_DATE_EPOCH') or git('log', '-1', '--format=%ct'))
    if git('status', '--porcelain'):
        print(
            'dist: the tree has changes that are not committed, so that nobody else can build the same', file=sys.stderr
        )
    args.out.mkdir(parents=True, exist_ok=True)
    built = build(args.out, epoch)
    if not args.no_bom:
        built.append(args.out / f'{built[0].name.removesuffix(".tar.gz")}.cdx.json')
        subprocess.run([sys.executable, '-m', 'cyclonedx_py', *BOM, '--output-file', built[-1]], check=True)
    sums = ''.join(f'{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n' for path in built)
    (args.out / 'SHA256SUMS').write_text(sums)
    print(sums, end='')


def git(*arguments: str) -> str:
    """Return the output of a git command."""
    return subprocess.run(['git', *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()


def build(out: Path, epoch: int) -> list[Path]:
    """Build the source archive, and the wheel from it, into ``out``; return both."""
    os.umask(0o022)
    with tempfile.TemporaryDirectory(prefix='dist-') as folder:
        tree = Path(folder) / 'tree'
        raw = Path(folder) / 'raw'
        copy_tree(tree)
        for path in tree.rglob('*'):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        environment = {**os.environ, 'SOURCE_DATE_EPOCH': str(epoch), 'PYTHONHASHSEED': '0'}
        command = [sys.executable, '-W', 'ignore', '-m', 'build', '--no-isolation', '--outdir', str(raw), str(tree)]
        subprocess.run(command, env=environment, check=True, stdout=subprocess.DEVNULL)
        (archive,) = raw.glob('*.tar.gz')
        (wheel,) = raw.glob('*.whl')
        repack(archive, out / archive.name, epoch)
        (out / wheel.name).write_bytes(wheel.read_bytes())
        return [out / archive.name, out / wheel.name]


def repack(source: Path, target: Path, epoch: int) -> None:
    """Rewrite the archive, sorted, with one time and no owner, because setuptools writes the builder's."""
    with (
        tarfile.open(source) as old,
        target.open('wb') as file,
        gzip.GzipFile('', 'wb', fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode='w', format=tarfile.PAX_FORMAT) as new,
    ):
        for member in sorted(old.getmembers(), key=lambda member: member.name):
            member.mtime = epoch
            member.uid = 0
            member.gid = 0
            member.uname = ''
            member.gname = ''
            member.pax_headers = {}
            new.addfile(member, old.extractfile(member) if member.isfile() else None)


if __name__ == '__main__':
    main()

"""Convert a published PVT or Swin checkpoint, with agent attention or vanilla, into one of mmgate's backbones."""

import argparse
import sys
from pathlib import Path

import torch

from mmgate.models.convert import convert


def main() -> None:
    """Parse arguments, convert and save; nothing is written if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('src', help='checkpoint with its tensors under "model", "state_dict" or at its top')
    parser.add_argument('dst', help='file to write')
    parser.add_argument('--force', action='store_true', help='replace an existing file')
    parser.add_argument(
        '--trust', action='store_true', help='load with pickle what torch cannot load safely: code in the file runs'
    )
    args = parser.parse_args()
    src, dst = Path(args.src), Path(args.dst)
    if not src.is_file():
        sys.exit(f'{src} is no file.')
    if dst.exists() and not args.force:
        sys.exit(f'{dst} exists; choose another name or pass --force.')
    try:
        checkpoint = torch.load(src, map_location='cpu', weights_only=not args.trust)
    except Exception as error:
        hint = '' if args.trust else '\nIf you trust where it comes from, pass --trust: it may hold more than tensors.'
        sys.exit(f'{src} cannot be read: {str(error).splitlines()[0]}{hint}')
    try:
        state = convert(checkpoint)
    except ValueError as error:
        sys.exit(f'{src}: {error}')
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = dst.with_name(dst.name + '.part')
    torch.save({'state_dict': state, 'meta': {'converted_from': src.name}}, partial)
    partial.replace(dst)
    print(f'{dst}: {len(state)} tensors')


if __name__ == '__main__':
    main()

"""Convert a published PVT, Swin, CSwin or DeiT checkpoint, with agents or vanilla, to mmgate's parameter names.

The backbones read the published files directly (init_cfg); this tool writes a file with the backbones' names, and
without the training script's other objects. ``--to classifier`` keeps the head and the final norm for mmpretrain's
ImageClassifier, as configs/agent/classification builds it, so that tools/test.py takes the file. Only tensors are
read, and no code of the file runs.
"""

import argparse
import sys
from pathlib import Path

from mmgate.analysis.arguments import run
from mmgate.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('src', help='file or URL with its tensors under "model", "state_dict" or at its top')
    parser.add_argument('dst', help='file to write')
    parser.add_argument(
        '--to',
        choices=['backbone', 'classifier'],
        default='backbone',
        help='what the file is for: a detector or segmentor, or an ImageClassifier (default: %(default)s)',
    )
    parser.add_argument('--force', action='store_true', help='replace an existing file')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, convert and save; nothing is written if anything is wrong."""
    args = parser().parse_args(argv)
    import torch

    from mmgate.backbones.convert import convert, convert_classifier
    from mmgate.checkpoints.tensors import read_checkpoint

    dst = Path(args.dst)
    if dst.exists() and not args.force:
        raise ConfigError(f'{dst} exists; choose another name or pass --force.')
    try:
        state = (convert_classifier if args.to == 'classifier' else convert)(read_checkpoint(args.src))
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f'{args.src}: {error}') from error
    dst.parent.mkdir(parents=True, exist_ok=True)
    partial = dst.with_name(dst.name + '.part')
    torch.save({'state_dict': state, 'meta': {'converted_from': args.src}}, partial)
    partial.replace(dst)
    print(f'{dst}: {len(state)} tensors')


if __name__ == '__main__':
    sys.exit(run(parser, main))

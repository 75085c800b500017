"""Draw what a model sees in images: ``python -m mmgate.tools.image_demo IMAGES CONFIG CHECKPOINT --help``.

mmdet's DetInferencer or mmseg's MMSegInferencer does it, as the config's scope says; their own demos are not installed
with them.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mmgate.analysis.loading import find_images
from mmgate.checkpoints.loading import add_trust_option
from mmgate.train import cli
from mmgate.train.config_file import read_config
from mmgate.train.inputs import check_checkpoint
from mmgate.train.load_report import load_weights


def main() -> int:
    """Run the command line and return its exit status."""
    return cli.main(run)


def run(argv: list[str]) -> None:
    """Parse arguments, build the inferencer and call it."""
    args = _parser().parse_args(argv)
    images, cfg = find_images(args.inputs), read_config(args.config)
    check_checkpoint(args.checkpoint)
    shared: dict[str, Any] = dict(batch_size=args.batch_size, show=args.show, out_dir=args.out_dir)
    if cfg.get('default_scope') == 'mmseg':
        from mmseg.apis import MMSegInferencer as Inferencer

        options = dict(shared, opacity=args.opacity)
    else:
        from mmdet.apis import DetInferencer as Inferencer

        options = dict(shared, pred_score_thr=args.pred_score_thr, no_save_pred=False)
    inferencer = Inferencer(cfg, args.checkpoint, device=args.device)
    load_weights(inferencer.model, args.checkpoint)  # once more: the inferencers only log what did not fit
    inferencer(images, **options)
    print(f'{len(images)} images: see {args.out_dir}')


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description='Draw what a detector or a segmentor sees in images')
    parser.add_argument('inputs', help='an image, a folder of images, a quoted pattern or a URL')
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument('--out-dir', default='outputs', help='folder for painted images and predictions')
    parser.add_argument('--device', help='such as cuda:0 or cpu (default: what there is)')
    parser.add_argument('--batch-size', type=int, default=1, help='images at a time')
    parser.add_argument('--pred-score-thr', type=float, default=0.3, help='detectors: the least score that is drawn')
    parser.add_argument('--opacity', type=float, default=0.5, help='segmentors: of the painted labels, in (0, 1]')
    parser.add_argument('--show', action='store_true', help='show the images in a window')
    add_trust_option(parser)
    return parser


if __name__ == '__main__':
    sys.exit(main())

"""Draw what a model sees in images: ``python -m mmgate.tools.image_demo IMAGES CONFIG CHECKPOINT --help``.

mmdet's DetInferencer or mmseg's MMSegInferencer does it, as the config's scope says.
"""

from __future__ import annotations

import argparse
import os.path as osp
import sys
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmengine.config import Config
from mmengine.infer import BaseInferencer

from mmgate.engine import cli
from mmgate.engine.config_file import read_config
from mmgate.engine.data_errors import unreadable
from mmgate.engine.hooks import load_weights
from mmgate.engine.image_files import find_images
from mmgate.engine.model_index import find_model
from mmgate.engine.preflight import ConfigError, check_checkpoint, check_device
from mmgate.engine.safe_load import add_trust_option
from mmgate.engine.switches import is_segmentation


def main() -> int:
    """Run the command line and return its exit status."""
    return cli.main(run)


def run(argv: list[str]) -> None:
    """Parse arguments, build the inferencer and call it."""
    args = _parser().parse_args(argv)
    images = find_images(args.inputs)
    cfg, weights = read_model(args.model)
    weights = args.checkpoint or args.weights or weights
    if weights:
        check_checkpoint(weights)
    segments = is_segmentation(cfg)
    check_inputs(images, args, segments=segments)
    with named_images(images):
        (segment if segments else detect)(cfg, weights, images, args)
    if args.out_dir and not (args.no_save_vis and args.no_save_pred):
        print(f'{len(images)} images: see {args.out_dir}')


def detect(cfg: Config, weights: str | None, images: list[str], args: argparse.Namespace) -> None:
    """Let mmdet's DetInferencer draw boxes and masks, into ``vis`` and ``preds`` of the output folder."""
    from mmdet.apis import DetInferencer

    inferencer = DetInferencer(cfg, weights, device=args.device, palette=args.palette or 'none')
    if weights:
        load_weights(inferencer.model, weights)  # once more: the inferencers only log what did not fit
    inferencer(
        images,
        batch_size=args.batch_size,
        show=args.show,
        wait_time=args.wait_time,
        no_save_vis=args.no_save_vis,
        no_save_pred=args.no_save_pred,
        pred_score_thr=args.pred_score_thr,
        print_result=args.print_result,
        out_dir=args.out_dir,
    )


def segment(cfg: Config, weights: str | None, images: list[str], args: argparse.Namespace) -> None:
    """Let mmseg's MMSegInferencer paint label maps, into ``vis`` and ``pred`` of the output folder."""
    from mmseg.apis import MMSegInferencer
    from mmseg.utils import get_classes, get_palette

    inferencer = MMSegInferencer(cfg, weights, device=args.device)
    if weights:
        load_weights(inferencer.model, weights)  # once more: the inferencers only log what did not fit
    if args.palette:
        inferencer.model.dataset_meta = dict(classes=get_classes(args.palette), palette=get_palette(args.palette))
    # MMSegInferencer's own call saves both or none
    saved = {'img_out_dir': 'vis', 'pred_out_dir': 'pred'}
    skipped = {'img_out_dir': args.no_save_vis, 'pred_out_dir': args.no_save_pred}
    folders = {key: '' if skipped[key] else osp.join(args.out_dir, folder) for key, folder in saved.items()}
    options: dict[str, Any] = dict(show=args.show, wait_time=args.wait_time, opacity=args.opacity, **folders)
    results = BaseInferencer.__call__(inferencer, images, batch_size=args.batch_size, **options)
    if args.print_result:
        print(results['predictions'])


def check_inputs(images: list[str], args: argparse.Namespace, *, segments: bool) -> None:
    """Refuse a device that is not there and colours of no data set; warn of results that overwrite one another.

    Raises:
        ConfigError: With the argument.
    """
    if args.device:
        check_device(args.device)
    if args.palette and (segments or args.palette != 'none'):
        try:
            _colours(args.palette, segments)
        except (KeyError, ValueError, AssertionError, TypeError) as error:
            raise ConfigError(
                f'--palette {args.palette} is of no data set that {"mmseg" if segments else "mmdet"} knows; give one '
                'such as {"ade20k or cityscapes" if segments else "coco, voc or random"}, or leave it out.'
            ) from error
    stems = Counter(osp.splitext(osp.basename(image))[0] for image in images)
    twice = sorted(stem for stem, number in stems.items() if number > 1)
    if twice and not segments and not args.no_save_pred:
        warnings.warn(
            f'several images are called {", ".join(twice[:3])}: mmdet writes their predictions into one file, of which '
            'the last stays.',
            stacklevel=2,
        )


def _colours(palette: str, segments: bool) -> None:
    if segments:
        from mmseg.utils import get_palette

        get_palette(palette)
    else:
        from mmdet.visualization import get_palette

        get_palette(palette, 1)


@contextmanager
def named_images(images: list[str]) -> Iterator[None]:
    """Turn an error of an image that cannot be read into one message.

    Raises:
        ConfigError: With the file.
    """
    try:
        yield
    except Exception as error:
        for image in images if not isinstance(error, (RuntimeError, MemoryError, ConfigError)) else ():
            reason = unreadable(image, error)
            if reason:
                raise ConfigError(f'{image} {reason}. What was drawn before is kept.') from error
        raise


def read_model(model: str) -> tuple[Config, str | None]:
    """Return the config of a file, of ``package::path`` or of a metafile's name, with the metafile's weights if any."""
    if osp.isfile(model) or '::' in model or model.endswith('.py'):
        return read_config(model), None
    entry = find_model(model)
    return read_config(entry['Config']), entry['Weights']


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description='Draw what a detector or a segmentor sees in images')
    parser.add_argument('inputs', help='an image, a folder of images, a quoted pattern or a URL')
    parser.add_argument('model', help="config file, 'package::path', or name of a model in a metafile")
    parser.add_argument('checkpoint', nargs='?', help="checkpoint file or URL; without one, the metafile's, if any")
    parser.add_argument('--weights', help='the same, as the mm tools spell it')
    parser.add_argument('--out-dir', default='outputs', help='folder for painted images and predictions')
    parser.add_argument('--device', help='such as cuda:0 or cpu (default: what there is)')
    parser.add_argument('--batch-size', type=int, default=1, help='images at a time')
    parser.add_argument('--pred-score-thr', type=float, default=0.3, help='detectors: the least score that is drawn')
    parser.add_argument('--opacity', type=float, default=0.5, help='segmentors: of the painted labels, in (0, 1]')
    parser.add_argument('--palette', help='colours and, for segmentors, names of a data set such as coco or ade20k')
    parser.add_argument('--show', action='store_true', help='show the images in a window')
    parser.add_argument('--wait-time', type=float, default=0, help='seconds a shown image stays; 0: until a key')
    parser.add_argument('--no-save-vis', action='store_true', help='write no painted images')
    parser.add_argument('--no-save-pred', action='store_true', help='write no predictions')
    parser.add_argument('--print-result', action='store_true', help='print predictions')
    add_trust_option(parser)
    return parser


if __name__ == '__main__':
    sys.exit(main())

"""Draw where deformable attention samples: points on each image, or their density over all images."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.figures.sampling import THRESHOLD, draw_densities, draw_sampling
from mmgate.analysis.loading import image_name, parser, picture_names, positive, predict, subjects, write_csv
from mmgate.analysis.probes.sampling import (
    SamplingPoints,
    best_queries,
    decoder_layers,
    encoder_layers,
    mean_density,
    query_at,
    record_sampling,
    sampling_points,
)
from mmgate.errors import ConfigError
from mmgate.train import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture and a table for each image, or for all together."""
    options = parser(__doc__)
    options.add_argument('--part', choices=['decoder', 'encoder'], help='default: the decoder, if there is one')
    options.add_argument('--layer', type=int, default=-1, help='of that part (default: the last)')
    options.add_argument('--top-k', type=positive, default=3, help='queries with the best scores (decoder)')
    middle = 'encoder: pixel of the image (default: its middle)'
    options.add_argument('--pixel', type=float, nargs=2, metavar=('X', 'Y'), help=middle)
    level = 'decoder: the points of this level alone; encoder: level of the query (default 0); 0 is the finest'
    options.add_argument('--level', type=int, help=level)
    over_images = "one picture of the finest level's points over all images, in the place of one each"
    options.add_argument('--density', action='store_true', help=over_images)
    options.add_argument('--threshold', type=float, default=THRESHOLD, help='scores of the boxes drawn')
    args = options.parse_args(argv)
    if args.density and args.level is not None:
        raise ConfigError('--density is of the finest level; leave --level away.')
    shown: dict[str, list[tuple[str, SamplingPoints, Any]]] = {}
    for subject in subjects(args, ['locations'], 'A picture of sampling points', whole=True):
        for batch in subject.inputs(args):
            with record_sampling(subject.model) as found:
                sample = predict(subject.model, batch)
            points = _points(found, sample, args)
            shown.setdefault(image_name(sample.img_path), []).append((subject.name, points, sample))
    if args.density:
        _draw_density([model for drawn in shown.values() for model in drawn], Path(args.out), len(shown))
        return
    names = picture_names(shown)
    for image, drawn in shown.items():
        out = Path(args.out) / f'sampling_points_{names[image]}.png'
        draw_sampling(drawn, out, threshold=args.threshold)
        rows = [dict(model=title, **row) for title, points, _ in drawn for row in points.rows()]
        print(out, write_csv(out.with_suffix('.csv'), rows))


def _draw_density(drawn: list[tuple[str, SamplingPoints, Any]], out: Path, images: int) -> None:
    by_model: dict[str, list[tuple[SamplingPoints, Any]]] = {}
    for title, points, sample in drawn:
        by_model.setdefault(title, []).append((points, sample))
    found = [(title, mean_density(*zip(*of, strict=True))) for title, of in by_model.items()]
    picture = draw_densities(found, out / 'sampling_density.png', images=images)
    places = [(title, place, float(values[place])) for title, values in found for place in np.ndindex(*values.shape)]
    rows = [dict(model=title, row=row, column=column, density=value) for title, (row, column), value in places]
    print(picture, write_csv(picture.with_suffix('.csv'), rows))


def _points(found: dict[str, Any], sample: Any, args: argparse.Namespace) -> SamplingPoints:
    layers = found['layers']
    by_part = dict(decoder=decoder_layers(layers), encoder=encoder_layers(layers))
    part = args.part or ('encoder' if args.pixel or not by_part['decoder'] else 'decoder')
    if not by_part[part]:
        raise ConfigError(f'--part {part}: the model has deformable attention in {", ".join(layers)} only.')
    if not -len(by_part[part]) <= args.layer < len(by_part[part]):
        raise ConfigError(f'--layer {args.layer}: the {part} has {len(by_part[part])} layers.')
    path = by_part[part][args.layer]
    if part == 'encoder':
        return sampling_points(layers, path, sample, [query_at(layers, path, sample, args.pixel, args.level or 0)])
    if args.pixel:
        raise ConfigError('--pixel chooses a query of the encoder; give --part encoder.')
    return sampling_points(layers, path, sample, best_queries(found['head'], 0, args.top_k), level=args.level)


if __name__ == '__main__':
    sys.exit(cli.main(main))

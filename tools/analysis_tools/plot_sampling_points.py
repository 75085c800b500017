"""Draw sampling points of deformable attention on each image, or their density over all images."""

import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.figures.sampling import draw_densities, draw_sampling
from mmgate.analysis.loading import class_names, load_models, parser, picture_names, positive, write_csv
from mmgate.analysis.probes.recording import predict
from mmgate.analysis.probes.sampling import SamplingPoints, chosen_points, mean_density, record_sampling
from mmgate.errors import ConfigError
from mmgate.train import cli

Shown = dict[str, list[tuple[str, SamplingPoints, Any]]]  # by image: model, its points, the data sample


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture and a table for each image, or for all together."""
    options = parser(__doc__)
    options.add_argument('--part', choices=['decoder', 'encoder'], help='default: the decoder, if there is one')
    options.add_argument('--layer', type=int, default=-1, help='of that part (default: the last)')
    options.add_argument('--top-k', type=positive, default=3, help='queries with the best scores (decoder)')
    options.add_argument('--queries', type=int, nargs='+', help='their numbers, instead of the best (decoder)')
    middle = 'encoder: pixel of the image (default: its middle)'
    options.add_argument('--pixel', type=float, nargs=2, metavar=('X', 'Y'), help=middle)
    level = 'decoder: the points of this level alone; encoder: level of the query (default 0); 0 is the finest'
    options.add_argument('--level', type=int, help=level)
    over_images = "one picture of the finest level's points over all images, instead of one each"
    options.add_argument('--density', action='store_true', help=over_images)
    args = options.parse_args(argv)
    if args.density and args.level is not None:
        raise ConfigError('--density is of the finest level; leave --level away.')
    shown: Shown = {}
    classes = {}
    chosen = {name: getattr(args, name) for name in ('part', 'layer', 'top_k', 'queries', 'pixel', 'level')}
    for loaded in load_models(args, ['locations'], 'A picture of sampling points'):
        classes[loaded.name] = class_names(loaded.cfg)
        for batch in loaded.inputs(args):
            with record_sampling(loaded.model) as recording:
                sample = predict(loaded.model, batch)
            points = chosen_points(recording, sample, **chosen)
            shown.setdefault(os.path.realpath(sample.img_path), []).append((loaded.name, points, sample))
    if args.density:
        _draw_density(shown, Path(args.out))
        return
    names = picture_names(shown)
    for image, drawn in shown.items():
        out = Path(args.out) / f'sampling_points_{names[image]}.png'
        draw_sampling(drawn, out, classes=[classes[title] for title, *_ in drawn])
        rows = [dict(model=title, **row) for title, points, _ in drawn for row in points.rows()]
        print(out, write_csv(out.with_suffix('.csv'), rows))


def _draw_density(shown: Shown, out: Path) -> None:
    by_model: dict[str, list[tuple[SamplingPoints, Any]]] = {}
    for drawn in shown.values():
        for title, points, sample in drawn:
            by_model.setdefault(title, []).append((points, sample))
    found = [(title, mean_density(*zip(*of, strict=True))) for title, of in by_model.items()]
    picture = draw_densities(found, out / 'sampling_density.png', images=len(shown))
    rows = [
        dict(model=title, row=row, column=column, density=float(values[row, column]))
        for title, values in found
        for row, column in np.ndindex(*values.shape)
    ]
    print(picture, write_csv(picture.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(cli.main(main))

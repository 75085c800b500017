"""Draw sampling points of deformable attention on each image with their density, or a difference.

With --difference a picture shows which points gain weight and which lose some: by the gates of one model, which runs
with them and without, or between CONFIG and the model of --against. Queries of two models can be compared only if both
were trained from the same checkpoint.
"""

import argparse
import logging
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

from mmgate.analysis.arguments import drawing_parser, positive, run

FAR = 0.1  # of the image's longer side: reference points of one query that are further apart are of two objects
Drawn = list[tuple[str, Any, Any]]  # model, its points, the data sample


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = drawing_parser(__doc__)
    parser.add_argument('--part', choices=['decoder', 'encoder'], help='default: the decoder, if there is one')
    parser.add_argument('--layer', type=int, default=-1, help='of that part (default: the last)')
    parser.add_argument('--top-k', type=positive, default=3, help='queries with the best scores (decoder)')
    parser.add_argument('--queries', type=int, nargs='+', help='their numbers, instead of the best (decoder)')
    middle = 'encoder: pixel of the image (default: its middle)'
    parser.add_argument('--pixel', type=float, nargs=2, metavar=('X', 'Y'), help=middle)
    level = 'decoder: the points of this level alone; encoder: level of the query (default 0); 0 is the finest'
    parser.add_argument('--level', type=int, help=level)
    gain = 'weights that points gain and lose against the model of --against, or without it against the same model '
    parser.add_argument('--difference', action='store_true', help=gain + 'with its gates switched off')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture and write a table for each image."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.sampling import draw_sampling
    from mmgate.analysis.loading import class_names, load_models, picture_names, write_csv
    from mmgate.analysis.probes.recording import predict
    from mmgate.analysis.probes.sampling import chosen_points, record_sampling
    from mmgate.errors import ConfigError

    if args.difference and len(args.against) > 1:
        raise ConfigError('--difference is of two models; leave the third away.')
    if args.difference and args.level is not None and args.part != 'encoder':
        raise ConfigError('--difference is of a decoder on all levels; leave --level away, or give --part encoder.')
    shown: dict[str, Drawn] = {}
    classes = {}
    chosen = {name: getattr(args, name) for name in ('part', 'layer', 'top_k', 'queries', 'pixel', 'level')}
    models = load_models(args, ['locations'], 'A picture of sampling points')
    for title, loaded, setting in _runs(models, args.difference):
        classes[title] = class_names(loaded.cfg)
        for batch in loaded.inputs(args):
            with setting(), record_sampling(loaded.model) as recording:
                sample = predict(loaded.model, batch)
            drawn = shown.setdefault(os.path.realpath(sample.img_path), [])
            # A difference is of the queries that the first model chose.
            first = drawn[0][1] if args.difference and drawn else None
            same = {} if first is None or first.is_encoder else dict(queries=first.queries.tolist())
            drawn.append((title, chosen_points(recording, sample, **{**chosen, **same}), sample))
    names = picture_names(shown)
    for image, drawn in shown.items():
        if args.difference:
            _draw_difference(drawn, Path(args.out) / f'sampling_difference_{names[image]}.png', bool(args.against))
            continue
        out = Path(args.out) / f'sampling_points_{names[image]}.png'
        draw_sampling(drawn, out, classes=[classes[title] for title, *_ in drawn])
        rows = [dict(model=title, **row) for title, points, _ in drawn for row in points.rows()]
        print(out, write_csv(out.with_suffix('.csv'), rows))


def _runs(models: list[Any], difference: bool) -> Iterator[tuple[str, Any, Callable[[], AbstractContextManager[None]]]]:
    """Yield the title of each run over the images, its model, and a context to run it in.

    Raises:
        ConfigError: A difference is asked for of one model, which has no gates.
    """
    import mmgate
    from mmgate.adapter import gated_modules
    from mmgate.errors import ConfigError

    alone = difference and len(models) == 1
    if alone and not any(True for _ in gated_modules(models[0].model)):
        raise ConfigError(f'{models[0].name} has no gates to switch off; give --against CONFIG CHECKPOINT.')
    for loaded in models:
        yield loaded.name, loaded, nullcontext
        if alone:
            yield f'{loaded.name}, gates off', loaded, partial(mmgate.gates_disabled, loaded.model)


def _draw_difference(drawn: Drawn, out: Path, of_two: bool) -> None:
    from mmengine.logging import print_log

    from mmgate.analysis.figures.sampling import draw_difference
    from mmgate.analysis.loading import write_csv
    from mmgate.analysis.probes.sampling import compare_points

    (title, after, sample), (other, before, _) = drawn
    change = compare_points(before, after)
    if change.apart > FAR * max(sample.ori_shape[:2]):
        words = f'look at places up to {change.apart:.0f} pixels apart in the two models, and so at other objects.'
        print_log(f'{out.stem}: the same queries {words}', logger='current', level=logging.WARNING)
    titles = (
        (f'weights of {other}', 'their change')
        if of_two
        else ('weights with all gates off', 'their change by the gates')
    )
    draw_difference(change, sample.img_path, out, titles=titles, model=title)
    print(out, write_csv(out.with_suffix('.csv'), change.rows()))
    most = f'a point gained {change.weights.max():.3g} at most and lost {max(0, -change.weights.min()):.3g}'
    print(f'{change.moved:.2%} of the attention moved; {most}.')


if __name__ == '__main__':
    sys.exit(run(parser, main))

"""Draw attention rollout on images: which places the backbone's tokens, or each query of a decoder, depend on."""

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.map_figures import crop_to_image, draw_maps
from mmgate.analysis.query_figure import draw_queries
from mmgate.analysis.query_relevance import decoder_steps, query_relevance, record_queries
from mmgate.analysis.relevance import relevance_map
from mmgate.analysis.sampling import best_queries
from mmgate.analysis.subjects import (
    class_names,
    image_name,
    parser,
    picture_names,
    positive,
    predict,
    subjects,
    write_csv,
)
from mmgate.errors import ConfigError
from mmgate.train import cli

PARTS = ('image', 'queries')


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture for each image."""
    options = parser(__doc__)
    part = 'self-attention over the image (default, if there is any), or the queries of a dense decoder'
    options.add_argument('--part', choices=PARTS, help=part)
    options.add_argument('--top-k', type=positive, default=4, help='queries with the best scores (default 4)')
    options.add_argument('--queries', type=int, nargs='+', help='numbers of queries, in the place of the best')
    args = options.parse_args(argv)
    models, shown = subjects(args, ['attention'], 'A rollout', whole=True), {}
    for subject in models:
        for batch in subject.inputs(args):
            with record_queries(subject.model) as found:
                sample = predict(subject.model, batch)
            size = tuple(sample.get('batch_input_shape') or sample.img_shape[:2])
            args.part = args.part or _part(found, size)
            shown.setdefault(image_name(sample.img_path), []).append((subject, sample, _computed(found, size, args)))
    names = picture_names(shown)
    for image, drawn_by in shown.items():
        out = Path(args.out) / f'rollout_{names[image]}.png'
        drawn = [(subject.name, sample, computed) for subject, sample, computed in drawn_by]
        if args.part == 'queries':
            draw_queries(drawn, [class_names(subject.cfg) for subject, *_ in drawn_by], out)
        else:
            maps = [(name, crop_to_image(values, sample)) for name, sample, values in drawn]
            draw_maps(drawn[0][1].img_path, maps, out, columns=len(models) + 1, label='relevance')
        print(out, write_csv(out.with_suffix('.csv'), _rows(drawn)))


def _part(found: dict[str, Any], size: tuple[int, int]) -> str:
    """Return the first part that this model has."""
    try:
        relevance_map(found['layers'], size)
    except ConfigError:
        if not decoder_steps(found['layers']):
            raise
        return 'queries'
    return 'image'


def _computed(found: dict[str, Any], size: tuple[int, int], args: argparse.Namespace) -> Any:
    if args.part == 'image':
        return relevance_map(found['layers'], size).numpy()
    return query_relevance(found, size, args.queries or best_queries(found['head'], 0, args.top_k).tolist())


def _rows(drawn: Any) -> Any:
    for name, sample, computed in drawn:
        if isinstance(computed, np.ndarray):
            values = crop_to_image(computed, sample)
            for row, column in np.ndindex(*values.shape):
                yield dict(model=name, row=row, column=column, relevance=float(values[row, column]))
            continue
        for query in computed:
            of_query = dict(model=name, query=query.number, label=query.label, score=query.score)
            values = crop_to_image(query.relevance, sample)
            for row, column in np.ndindex(*values.shape):
                yield dict(of_query, row=row, column=column, relevance=float(values[row, column]))


if __name__ == '__main__':
    sys.exit(cli.main(main))

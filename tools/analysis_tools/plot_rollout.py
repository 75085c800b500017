"""Draw attention on images: rollout of the backbone's tokens or of a decoder's queries, or the heads of one layer."""

import argparse
import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

from mmgate.analysis.arguments import drawing_parser, positive, run

PARTS = ('image', 'queries', 'heads')
HEADS = 'how much attention each place gets, from the class token where there is one, or in the mean over all queries.'
ROLLOUT = (
    'How much the output takes from each place, by attention followed through all layers. The output is the class '
    'token where there is one, or the mean over all places.'
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = drawing_parser(__doc__)
    part = 'self-attention over the image (default, if there is any), queries of a dense decoder, heads of one layer'
    parser.add_argument('--part', choices=PARTS, help=part)
    parser.add_argument('--top-k', type=positive, default=4, help='queries with the best scores (default 4)')
    parser.add_argument('--queries', type=int, nargs='+', help='numbers of queries, instead of the best')
    parser.add_argument('--layer', type=int, default=-1, help='whose heads are drawn (default: the last)')
    sizes = 'let the sizes of signed weights (M-DGSA) count, so that heads that disagree do not cancel out'
    parser.add_argument('--absolute', action='store_true', help=sizes)
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture for each image."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.maps import draw_maps, draw_queries
    from mmgate.analysis.loading import class_names, load_models, picture_names, write_csv

    shown: dict[str, list[tuple[Any, Any, Any, str]]] = {}
    for loaded in load_models(args, ['attention'], 'A rollout'):
        for batch in loaded.inputs(args):
            sample, computed, layer = _computed(loaded.model, batch, args)
            shown.setdefault(os.path.realpath(sample.img_path), []).append((loaded, sample, computed, layer))
    names = picture_names(shown)
    for image, drawn_by in shown.items():
        out = Path(args.out) / f'{"heads" if args.part == "heads" else "rollout"}_{names[image]}.png'
        drawn = [(loaded.name, sample, computed) for loaded, sample, computed, _ in drawn_by]
        if args.part == 'queries':
            draw_queries(drawn, [class_names(loaded.cfg) for loaded, *_ in drawn_by], out)
        else:
            columns, maps = _panels(drawn)
            label = 'relevance'
            note = ROLLOUT
            if args.part == 'heads':
                label = 'attention'
                note = f'{", ".join(f"{loaded.name}, {layer}" for loaded, *_, layer in drawn_by)}: {HEADS}'
            draw_maps(drawn[0][1], maps, out, columns=columns, label=label, note=note)
        print(out, write_csv(out.with_suffix('.csv'), _rows(drawn)))


def _part(found: dict[str, Any], size: tuple[int, int]) -> str:
    """Return the first part that this model has."""
    from mmgate.analysis.probes.relevance import decoder_steps, relevance_map
    from mmgate.errors import ConfigError

    try:
        relevance_map(found, size)
    except ConfigError:
        if not decoder_steps(found):
            raise
        return 'queries'
    return 'image'


def _computed(model: Any, batch: dict[str, Any], args: argparse.Namespace) -> tuple[Any, Any, str]:
    """Return the image's data sample, a map ``(h, w)``, those of queries or of heads ``(H, h, w)``, and the layer."""
    from mmgate.analysis.probes.recording import best_queries, predict
    from mmgate.analysis.probes.relevance import (
        head_maps,
        head_mean,
        padded_size,
        query_relevance,
        record_maps,
        relevance_map,
    )

    if args.part == 'heads':
        layer, maps, sample = head_maps(model, batch, args.layer)
        return sample, maps, layer
    with record_maps(model, partial(head_mean, absolute=args.absolute)) as found:
        sample = predict(model, batch)
    size = padded_size(sample)
    args.part = args.part or _part(found, size)
    if args.part == 'image':
        return sample, relevance_map(found, size).numpy(), ''
    chosen = args.queries or best_queries(found, 0, args.top_k).tolist()
    return sample, query_relevance(found, size, chosen), ''


def _panels(drawn: Any) -> tuple[int, Any]:
    """Return the number of columns of a picture, and titles and maps; the heads of each model begin below the image."""
    from mmgate.analysis.figures.maps import crop_to_image

    if drawn[0][2].ndim == 2:
        return len(drawn) + 1, [(name, crop_to_image(values, sample)) for name, sample, values in drawn]
    most = max(len(maps) for *_, maps in drawn)
    columns = min(most, 2 if most <= 4 else 4) + 1
    panels: list[Any] = []
    for name, sample, maps in drawn:
        panels += [('', None)] * (-len(panels) % columns)
        for head, values in enumerate(maps):
            first = len(panels) % columns == columns - 1
            panels += [('', None)] * first  # the column of the image
            named = not head and len(drawn) > 1
            panels.append((f'{name}, head {head}' if named else f'head {head}', crop_to_image(values, sample)))
    return columns, panels


def _rows(drawn: Any) -> Any:
    import numpy as np

    from mmgate.analysis.figures.maps import crop_to_image

    for name, sample, computed in drawn:
        if not isinstance(computed, np.ndarray):
            parts = [(dict(query=x.number, label=x.label, score=x.score), 'relevance', x.relevance) for x in computed]
        elif computed.ndim == 3:
            parts = [(dict(head=head), 'attention', values) for head, values in enumerate(computed)]
        else:
            parts = [({}, 'relevance', computed)]
        for of, what, values in parts:
            values = crop_to_image(values, sample)
            for row, column in np.ndindex(*values.shape):
                yield {'model': name, **of, 'row': row, 'column': column, what: float(values[row, column])}


if __name__ == '__main__':
    sys.exit(run(parser, main))

"""Draw attention on images: rollout through all layers, or the heads of one layer."""

import argparse
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mmgate.analysis.arguments import drawing_parser, run

HEADS = 'how much attention each place gets, from the class token where there is one, or in the mean over all queries.'
ROLLOUT = (
    'How much the output takes from each place, by attention followed through all layers. The output is the class '
    'token where there is one, or the mean over all places.'
)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    options = drawing_parser(__doc__)
    part = 'self-attention over the image, through all layers (default), or the heads of one layer'
    options.add_argument('--part', choices=['image', 'heads'], default='image', help=part)
    options.add_argument('--layer', type=int, default=-1, help='whose heads are drawn (default: the last)')
    sizes = 'let the sizes of signed weights (M-DGSA) count, so that heads that disagree do not cancel out'
    options.add_argument('--absolute', action='store_true', help=sizes)
    return options


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture for each image."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.maps import draw_maps
    from mmgate.analysis.loading import load_models, picture_names, write_csv

    shown: dict[str, list[tuple[str, Any, Any, str]]] = {}
    for loaded in load_models(args, ['attention'], 'A rollout'):
        for batch in loaded.inputs(args):
            sample, computed, layer = _computed(loaded.model, batch, args)
            shown.setdefault(os.path.realpath(sample.img_path), []).append((loaded.name, sample, computed, layer))
    names = picture_names(shown)
    for image, drawn in shown.items():
        out = Path(args.out) / f'{"heads" if args.part == "heads" else "rollout"}_{names[image]}.png'
        columns, maps = _panels(drawn)
        label = 'relevance'
        note = ROLLOUT
        if args.part == 'heads':
            label = 'attention'
            note = f'{", ".join(f"{name}, {layer}" for name, *_, layer in drawn)}: {HEADS}'
        draw_maps(drawn[0][1], maps, out, columns=columns, label=label, note=note)
        print(out, write_csv(out.with_suffix('.csv'), _rows(drawn, label)))


def _computed(model: Any, batch: dict[str, Any], args: argparse.Namespace) -> tuple[Any, Any, str]:
    """Return the image's data sample, maps of heads ``(H, h, w)`` or a map ``(h, w)``, and the layer."""
    from mmgate.analysis.figures.maps import crop_to_image
    from mmgate.analysis.probes import relevance
    from mmgate.analysis.probes.recording import padded_size, predict

    if args.part == 'heads':
        layer, maps, sample = relevance.head_maps(model, batch, args.layer)
        return sample, [crop_to_image(values, sample) for values in maps], layer
    with relevance.record_maps(model, partial(relevance.head_mean, absolute=args.absolute)) as found:
        sample = predict(model, batch)
    values = relevance.relevance_map(model, found, padded_size(sample)).numpy()
    return sample, crop_to_image(values, sample), ''


def _panels(drawn: Any) -> tuple[int, Any]:
    """Return the number of columns of a picture, and titles and maps; the heads of each model begin below the image."""
    if not isinstance(drawn[0][2], list):
        return len(drawn) + 1, [(name, values) for name, _, values, _ in drawn]
    most = max(len(maps) for _, _, maps, _ in drawn)
    columns = min(most, 2 if most <= 4 else 4) + 1
    panels: list[Any] = []
    for name, _, maps, _ in drawn:
        panels += [('', None)] * (-len(panels) % columns)
        for head, values in enumerate(maps):
            first = len(panels) % columns == columns - 1
            panels += [('', None)] * first  # the column of the image
            named = not head and len(drawn) > 1
            panels.append((f'{name}, head {head}' if named else f'head {head}', values))
    return columns, panels


def _rows(drawn: Any, label: str) -> Iterator[dict[str, Any]]:
    for name, _, computed, _ in drawn:
        for head, values in enumerate(computed if isinstance(computed, list) else [computed]):
            of = dict(head=head) if isinstance(computed, list) else {}
            for row, line in enumerate(values.tolist()):
                for column, value in enumerate(line):
                    yield {'model': name, **of, 'row': row, 'column': column, label: value}


if __name__ == '__main__':
    sys.exit(run(parser, main))

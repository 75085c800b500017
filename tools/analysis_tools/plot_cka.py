"""Draw the similarity (CKA) of the layers' attention patterns over images, four or more of one size."""

import sys
from functools import partial
from pathlib import Path

from mmgate.analysis.arguments import drawing_parser, run

parser = partial(drawing_parser, __doc__)


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.layers import draw_matrices
    from mmgate.analysis.loading import load_models, write_csv
    from mmgate.analysis.probes.cka import attention_cka

    models = load_models(args, ['attention'], 'A picture of CKA')
    found = [(loaded.name, *attention_cka(loaded.model, loaded.inputs(args))) for loaded in models]
    out = draw_matrices(found, Path(args.out) / 'cka.png', label='CKA over images')
    rows = [
        dict(model=name, layer=a, other=b, cka=float(values[i, j]))
        for name, paths, values in found
        for i, a in enumerate(paths)
        for j, b in enumerate(paths)
    ]
    print(out, write_csv(out.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(run(parser, main))

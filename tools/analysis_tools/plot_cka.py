"""Draw the similarity (CKA) of the layers' attention patterns over images, four or more of one size."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.figures.layers import draw_matrices
from mmgate.analysis.loading import load_models, parser, write_csv
from mmgate.analysis.probes.cka import attention_cka
from mmgate.mm import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser(__doc__).parse_args(argv)
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
    sys.exit(cli.main(main))

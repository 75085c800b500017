"""Draw the similarity (CKA) of the layers' attention patterns."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.map_figures import draw_matrices
from mmgate.analysis.relevance import attention_cka
from mmgate.analysis.subjects import parser, subjects, write_csv
from mmgate.train import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser(__doc__).parse_args(argv)
    models = subjects(args, ['attention'], 'A picture of CKA', whole=True)
    found = [(subject.name, *attention_cka(subject.model, subject.inputs(args))) for subject in models]
    out = draw_matrices(found, Path(args.out) / 'cka.png', label='CKA')
    rows = [
        dict(model=name, layer=a, other=b, cka=float(values[i, j]))
        for name, paths, values in found
        for i, a in enumerate(paths)
        for j, b in enumerate(paths)
    ]
    print(out, write_csv(out.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Draw the similarity (CKA) of the layers' attention patterns."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.figures.layers import draw_matrices
from mmgate.analysis.loading import load_models, parser, write_csv
from mmgate.analysis.probes.cka import attention_cka, query_cka
from mmgate.analysis.probes.recording import class_token_owners
from mmgate.train import cli

SAMPLES = dict(images=attention_cka, queries=query_cka)


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    options = parser(__doc__)
    over = "images (default with a class token): PLuG's measure, of four images or more; queries: ours, within images"
    options.add_argument('--samples', choices=list(SAMPLES), help=over)
    args = options.parse_args(argv)
    models = load_models(args, ['attention'], 'A picture of CKA')
    alike = all(class_token_owners(loaded.model) for loaded in models)
    samples = args.samples or ('images' if alike else 'queries')
    found = [(loaded.name, *SAMPLES[samples](loaded.model, loaded.inputs(args))) for loaded in models]
    out = draw_matrices(found, Path(args.out) / 'cka.png', label=f'CKA over {samples}')
    rows = [
        dict(model=name, layer=a, other=b, cka=float(values[i, j]))
        for name, paths, values in found
        for i, a in enumerate(paths)
        for j, b in enumerate(paths)
    ]
    print(out, write_csv(out.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(cli.main(main))

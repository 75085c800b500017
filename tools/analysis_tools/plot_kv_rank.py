"""Draw the rank of the matrix K^T V of linear attentions by layer: mean and spread over heads and images."""

import sys
from functools import partial
from pathlib import Path

from mmgate.analysis.arguments import drawing_parser, run

parser = partial(drawing_parser, __doc__)


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.layers import draw_ranks
    from mmgate.analysis.loading import load_models, write_csv
    from mmgate.analysis.probes.layers import kv_ranks

    models = load_models(args, ['kv'], 'A picture of the rank of K^T V')
    found = [(loaded.name, kv_ranks(loaded.model, loaded.inputs(args))) for loaded in models]
    out = draw_ranks(found, Path(args.out) / 'kv_rank.png')
    print(out, write_csv(out.with_suffix('.csv'), [dict(model=name, **row) for name, rows in found for row in rows]))


if __name__ == '__main__':
    sys.exit(run(parser, main))

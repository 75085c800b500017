"""Draw attention sinks, largest activations and the gates' sparsity layer by layer."""

import sys
from functools import partial
from pathlib import Path

from mmgate.analysis.arguments import drawing_parser, run

parser = partial(drawing_parser, __doc__)


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.layers import draw_sinks
    from mmgate.analysis.loading import load_models, write_csv
    from mmgate.analysis.probes.layers import sinks

    models = load_models(args, ['attention'], 'A picture of attention sinks')
    found = [(loaded.name, sinks(loaded.model, loaded.inputs(args))) for loaded in models]
    out = draw_sinks(found, Path(args.out) / 'attention_sink.png')
    rows = [dict(model=name, **row) for name, layers in found for row in layers]
    print(out, write_csv(out.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(run(parser, main))

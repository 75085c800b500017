"""Draw attention sinks by layer and head, and name those that a gate can cure."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.figures.layers import draw_sinks
from mmgate.analysis.loading import load_models, parser, write_csv
from mmgate.analysis.probes.layers import sinks
from mmgate.analysis.probes.sinks import describe_sinks, sink_heads
from mmgate.train import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the tables."""
    args = parser(__doc__).parse_args(argv)
    models = load_models(args, ['attention'], 'A picture of attention sinks')
    found = [(model.name, sinks(model.model, model.inputs(args))) for model in models]
    heads = [(model.name, sink_heads(model.model, model.inputs(args))) for model in models]
    out = draw_sinks(found, Path(args.out) / 'attention_sink.png', heads)
    written = [write_csv(out.with_suffix('.csv'), [dict(model=name, **row) for name, rows in found for row in rows])]
    of_heads = [dict(model=name, **row) for name, rows in heads for row in rows]
    if of_heads:
        written.append(write_csv(out.with_name('attention_sink_heads.csv'), of_heads))
    for name, rows in heads:
        print(describe_sinks(name, rows))
    print(out, *written)


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Draw attention sinks by layer: share on the most attended token, maximum activation, share of closed gates."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.loading import parser, subjects, write_csv
from mmgate.analysis.probes.sinks import draw_sinks, sinks
from mmgate.train import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser(__doc__).parse_args(argv)
    models = subjects(args, ['attention'], 'A picture of attention sinks')
    found = [(subject.name, sinks(subject.model, subject.inputs(args))) for subject in models]
    out = draw_sinks(found, Path(args.out) / 'attention_sink.png')
    print(
        out, write_csv(out.with_suffix('.csv'), [dict(model=n, **sink.row()) for n, layers in found for sink in layers])
    )


if __name__ == '__main__':
    sys.exit(cli.main(main))

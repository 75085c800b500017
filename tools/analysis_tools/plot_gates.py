"""Draw a model's gates: mean maps (colours centred on the value that changes nothing), layers, histogram."""

import sys
from pathlib import Path

import mmgate  # noqa: F401
from mmgate.analysis.figures.gates import draw_gates
from mmgate.analysis.loading import load_models, parser, write_csv
from mmgate.analysis.probes.gates import gate_statistics, mean_maps
from mmgate.mm import cli
from mmgate.notes import GATES


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser(__doc__).parse_args(argv)
    models = load_models(args, [GATES], 'A picture of gates')
    found = [(loaded.name, gate_statistics(loaded.model, loaded.inputs(args))) for loaded in models]
    out = draw_gates(found, Path(args.out) / 'gates.png')
    rows = [dict(model=name, **gate.row()) for name, gates in found for gate in gates]
    maps = (dict(model=name, **row) for name, gates in found for of_kind in mean_maps(gates) for row in of_kind.rows())
    print(out, write_csv(out.with_suffix('.csv'), rows), write_csv(out.with_name('gates_map.csv'), maps))


if __name__ == '__main__':
    sys.exit(cli.main(main))

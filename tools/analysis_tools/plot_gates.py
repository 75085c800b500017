"""Draw a model's gates: mean maps (colours centred on the value that changes nothing), layers, histogram."""

import sys
from functools import partial
from pathlib import Path

from mmgate.analysis.arguments import drawing_parser, run

parser = partial(drawing_parser, __doc__)


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser().parse_args(argv)
    from mmgate.analysis.figures.gates import draw_gates
    from mmgate.analysis.loading import load_models, write_csv
    from mmgate.analysis.probes.gates import gate_statistics, mean_maps
    from mmgate.notes import GATES

    models = load_models(args, [GATES], 'A picture of gates')
    found = [(loaded.name, gate_statistics(loaded.model, loaded.inputs(args))) for loaded in models]
    out = draw_gates(found, Path(args.out) / 'gates.png')
    rows = [dict(model=name, **gate.row()) for name, gates in found for gate in gates]
    maps = (dict(model=name, **row) for name, gates in found for of_kind in mean_maps(gates) for row in of_kind.rows())
    print(out, write_csv(out.with_suffix('.csv'), rows), write_csv(out.with_name('gates_map.csv'), maps))


if __name__ == '__main__':
    sys.exit(run(parser, main))

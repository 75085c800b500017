"""Draw a table of study.py: means and ranges over seeds, by layer and while training."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from projects.gated_lm.study import BATCH, POINT, RATE, STEPS, WINDOW, read

ROWS = {'none': '0.2', 'wide-ffn': '0.6', 'g1-headwise': 'tab:blue', 'g1-elementwise': 'tab:red'}
PANELS = {  # by the table's column: label of x, label of y, x of a value
    'first_by_layer': ('layer', 'attention on the first token', 1),
    'peak_by_layer': ('layer', 'largest activation', 1),
    'curve': ('thousand tokens', 'training loss', POINT * BATCH * WINDOW / 1000),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Parse arguments and draw."""
    parser = argparse.ArgumentParser(description=__doc__)
    results = Path(__file__).with_name('results.csv')
    parser.add_argument('table', nargs='?', type=Path, default=results, help="default: the project's results.csv")
    parser.add_argument('--out', type=Path, default=Path('work_dirs/gated_lm.png'))
    args = parser.parse_args(argv)
    table = args.table
    if not table.is_file():
        parser.error(f'{table}: there is no such table; python -m projects.gated_lm.study run writes one.')
    same = dict(rate=str(RATE), steps=str(STEPS), rotated='0.25').items()
    rows = [row for row in read(table) if same <= row.items()]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout='constrained')
    for axis, (column, (x_label, y_label, unit)) in zip(axes, PANELS.items(), strict=True):
        for variant in (name for name in ROWS if any(row['variant'] == name for row in rows)):
            values = np.array([row[column].split() for row in rows if row['variant'] == variant], float)
            x, style = unit * np.arange(1, values.shape[1] + 1), dict(color=ROWS[variant])
            axis.plot(x, values.mean(0), label=f'{variant}, {len(values)} seeds', **style)
            axis.fill_between(x, values.min(0), values.max(0), alpha=0.2, lw=0, **style)
        axis.set(xlabel=x_label, ylabel=y_label)
        axis.xaxis.set_major_locator(plt.MaxNLocator(integer=True))
    axes[0].legend(frameon=False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=90)


if __name__ == '__main__':
    main()

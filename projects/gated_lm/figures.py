"""Draw study.png: first token's attention and largest activation by layer, and loss; means and ranges over seeds."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from projects.gated_lm.study import BATCH, POINT, RATE, STEPS, WINDOW, read

HERE = Path(__file__).parent
ROWS = {'none': '0.2', 'wide-ffn': '0.6', 'g1-headwise': 'tab:blue', 'g1-elementwise': 'tab:red'}
PANELS = {  # by the results' column: label of x, label of y, x of a value
    'first_by_layer': ('layer', 'attention on the first token', 1),
    'peak_by_layer': ('layer', 'largest activation', 1),
    'curve': ('thousand tokens', 'training loss', POINT * BATCH * WINDOW / 1000),
}

if __name__ == '__main__':
    same = dict(rate=str(RATE), steps=str(STEPS), rotated='0.25').items()
    rows = [row for row in read(HERE / 'results.csv') if same <= row.items()]
    figure, axes = plt.subplots(1, 3, figsize=(12, 3.6), layout='constrained')
    for axis, (column, (x_label, y_label, unit)) in zip(axes, PANELS.items(), strict=True):
        for variant, color in ROWS.items():
            values = np.array([row[column].split() for row in rows if row['variant'] == variant], float)
            x = unit * np.arange(1, values.shape[1] + 1)
            axis.plot(x, values.mean(0), color=color, label=f'{variant}, {len(values)} seeds')
            axis.fill_between(x, values.min(0), values.max(0), color=color, alpha=0.2, lw=0)
        axis.set(xlabel=x_label, ylabel=y_label)
    axes[0].legend(frameon=False)
    figure.savefig(HERE / 'study.png', dpi=90)

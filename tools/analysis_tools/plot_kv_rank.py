"""Draw the rank of the map K^T V of linear attentions by layer, mean and spread over heads and images."""

import sys
from pathlib import Path

import torch

import mmgate  # noqa: F401
from mmgate.analysis.map_figures import draw_over_layers
from mmgate.analysis.maps import effective_rank, numerical_rank
from mmgate.analysis.recording import record, require
from mmgate.analysis.subjects import parser, predict, subjects, write_csv
from mmgate.engine import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw and write the table."""
    args = parser(__doc__).parse_args(argv)
    models = subjects(args)
    for subject in models:
        require(subject.model, ['kv'], 'A picture of the rank of K^T V')
    found = []
    for subject in models:
        with record(subject.model, ['kv']) as recording:
            for batch in subject.inputs(args):
                predict(subject.model, batch)
        rows = []
        for path, readings in recording.items():
            maps = torch.cat(readings['kv'].tensors)  # (images, H, d, d)
            ranks = effective_rank(maps)
            figures = dict(effective_rank=float(ranks.mean()), std=float(ranks.std(correction=0)))
            share = float(numerical_rank(maps).double().mean())
            rows.append(dict(layer=path, **figures, rank_at_1_percent=share, channels=maps.shape[-1]))
        found.append((subject.name, rows))
    out = draw_over_layers(found, Path(args.out) / 'kv_rank.png', ceiling='channels')
    print(out, write_csv(out.with_suffix('.csv'), [dict(model=name, **row) for name, rows in found for row in rows]))


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Draw what each agent token attends to, on the image."""

import sys
from pathlib import Path

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.map_figures import crop_to_image, draw_maps
from mmgate.analysis.recording import readable, record, require
from mmgate.analysis.subjects import parser, predict, subjects, write_csv
from mmgate.engine import cli
from mmgate.engine.preflight import ConfigError


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture for each image and model."""
    options = parser(__doc__)
    options.add_argument('--layer', type=int, default=0, help='which of the agent attentions (default: the first)')
    options.add_argument('--agents', type=int, default=16, help='how many agents to draw, spread over the grid')
    args = options.parse_args(argv)
    for subject in subjects(args):
        require(subject.model, ['agents'], 'A picture of agents')
        paths = readable(subject.model)['agents']
        if not -len(paths) <= args.layer < len(paths):
            raise ConfigError(f'--layer {args.layer}: {subject.name} has {len(paths)} agent attentions.')
        path = paths[args.layer]
        for batch in subject.inputs(args):
            with record(subject.model, ['agents'], paths=lambda p, path=path: p == path) as recording:
                sample = predict(subject.model, batch)
            maps = recording[path]['agents'].tensors[-1][0].mean(0).numpy()  # (n, h, w)
            chosen = np.unique(np.linspace(0, len(maps) - 1, min(args.agents, len(maps))).round().astype(int))
            drawn = [(f'agent {i}', crop_to_image(maps[i], sample)) for i in chosen]
            out = Path(args.out) / f'agents_{subject.name}_{Path(sample.img_path).stem}.png'
            columns = min(4, len(drawn) + 1)
            draw_maps(sample.img_path, drawn, out, columns=columns, label='attention')
            peaks = [np.unravel_index(values.argmax(), values.shape) for values in maps]
            rows = [
                dict(layer=path, agent=i, row=int(y), column=int(x), largest=float(maps[i, y, x]))
                for i, (y, x) in enumerate(peaks)
            ]
            print(out, write_csv(out.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(cli.main(main))

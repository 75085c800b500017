"""Draw the attention of each agent token on the image."""

import argparse
import sys
from pathlib import Path

from mmgate.analysis.arguments import drawing_parser, positive, run


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = drawing_parser(__doc__)
    parser.add_argument('--layer', type=int, default=0, help='which of the agent attentions (default: the first)')
    parser.add_argument('--agents', type=positive, default=16, help='how many agents to draw, spread over the grid')
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture for each image and model."""
    args = parser().parse_args(argv)
    import numpy as np

    from mmgate.analysis.figures.maps import crop_to_image, draw_maps
    from mmgate.analysis.loading import load_models, picture_names, write_csv
    from mmgate.analysis.probes.relevance import agent_maps, agent_rows

    for loaded in load_models(args, ['agents'], 'A picture of agents'):
        shown = [agent_maps(loaded.model, batch, args.layer) for batch in loaded.inputs(args)]
        names = picture_names(sample.img_path for _, _, sample in shown)
        for path, maps, sample in shown:
            chosen = np.unique(np.linspace(0, len(maps) - 1, min(args.agents, len(maps))).round().astype(int))
            drawn = [(f'agent {i}', crop_to_image(maps[i], sample)) for i in chosen]
            name = f'{loaded.name}_{names[sample.img_path]}'.replace('/', '_')
            out = Path(args.out) / f'agents_{name}.png'
            which = f'All {len(maps)} agents.'
            if len(drawn) < len(maps):
                which = f'{len(drawn)} of {len(maps)} agents, numbered row by row.'
            note = f'{loaded.name}, {path}: from where each agent token gathers, in the mean over heads. {which}'
            draw_maps(sample, drawn, out, columns=min(4, len(drawn) + 1), label='attention', note=note)
            print(out, write_csv(out.with_suffix('.csv'), agent_rows(path, maps)))


if __name__ == '__main__':
    sys.exit(run(parser, main))

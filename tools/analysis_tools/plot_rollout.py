"""Draw attention rollout on images: which places the last layer's tokens, or the class token, depend on."""

import sys
from pathlib import Path

import numpy as np

import mmgate  # noqa: F401
from mmgate.analysis.map_figures import crop_to_image, draw_maps
from mmgate.analysis.recording import require
from mmgate.analysis.relevance import record_maps, relevance_map
from mmgate.analysis.subjects import parser, predict, subjects, write_csv
from mmgate.engine import cli


def main(argv: list[str]) -> None:
    """Parse arguments, run the models, draw a picture for each image."""
    args = parser(__doc__).parse_args(argv)
    models, shown = subjects(args), {}
    for subject in models:
        require(subject.model, ['attention'], 'A rollout')
        for batch in subject.inputs(args):
            with record_maps(subject.model) as recording:
                sample = predict(subject.model, batch)
            size = sample.get('batch_input_shape') or sample.img_shape[:2]
            values = crop_to_image(relevance_map(recording, tuple(size)).numpy(), sample)
            shown.setdefault(sample.img_path, []).append((subject.name, values))
    for image, maps in shown.items():
        out = Path(args.out) / f'rollout_{Path(image).stem}.png'
        draw_maps(image, maps, out, columns=len(models), label='relevance')
        rows = [
            dict(model=name, row=y, column=x, relevance=float(values[y, x]))
            for name, values in maps
            for y, x in np.ndindex(*values.shape)
        ]
        print(out, write_csv(out.with_suffix('.csv'), rows))


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""The demo: make the data, train, test and draw, through the tools that a user runs. Called by ``make demo``."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint

import mmgate  # noqa: F401
from mmgate.analysis.predictions import draw_predictions
from mmgate.datasets.shapes import write_shapes

METRIC = 'coco/bbox_mAP_50'


def run(*command: str) -> None:
    """Run one of the tools; its output is the user's to see."""
    print('demo: python', ' '.join(command), flush=True)
    subprocess.run([sys.executable, '-W', 'ignore', *command], check=True)


def evaluate(config: str, checkpoint: Path, work_dir: Path) -> float:
    """Return METRIC of a checkpoint, as tools/test.py measures it."""
    run('tools/test.py', config, str(checkpoint), '--work-dir', str(work_dir))
    results = max(work_dir.glob('*/*.json'), key=lambda path: path.stat().st_mtime)
    return json.loads(results.read_text().splitlines()[-1])[METRIC]


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    args = parser.parse_args()
    cfg = Config.fromfile(args.config)
    work_dir = Path('work_dirs') / Path(args.config).stem
    write_shapes(cfg.data_root.rstrip('/'))

    init_default_scope(cfg.default_scope)
    untrained = work_dir / 'untrained.pth'
    model = MODELS.build(cfg.model)
    work_dir.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict()}, str(untrained))
    before = evaluate(args.config, untrained, work_dir / 'untrained')

    run('tools/train.py', args.config, '--work-dir', str(work_dir))
    checkpoint = Path((work_dir / 'last_checkpoint').read_text())
    after = evaluate(args.config, checkpoint, work_dir / 'test')
    picture = draw_predictions(args.config, str(checkpoint), work_dir / 'predictions.png')
    print(
        f'demo: bbox_mAP_50 = {after:.3f} (untrained {before:.3f}), picture: {picture}, checkpoint: {checkpoint}',
        flush=True,
    )


if __name__ == '__main__':
    main()

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
from mmgate.analysis.predictions import draw_predictions, draw_segmentation
from mmgate.datasets.shapes import write_shapes

# by the config's scope: the metric, what the last line calls it, and the picture
TASKS = {
    'mmdet': ('coco/bbox_mAP_50', 'bbox_mAP_50', draw_predictions),
    'mmseg': ('mIoU', 'mIoU', draw_segmentation),
}


def run(*command: str) -> None:
    """Run one of the tools; its output is the user's to see."""
    print('demo: python', ' '.join(command), flush=True)
    subprocess.run([sys.executable, '-W', 'ignore', *command], check=True)


def evaluate(config: str, checkpoint: Path, work_dir: Path, metric: str) -> float:
    """Return ``metric`` of a checkpoint, as tools/test.py measures it."""
    run('tools/test.py', config, str(checkpoint), '--work-dir', str(work_dir))
    results = max(work_dir.glob('*/*.json'), key=lambda path: path.stat().st_mtime)
    return json.loads(results.read_text().splitlines()[-1])[metric]


def main() -> None:
    """Parse arguments and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('config')
    args = parser.parse_args()
    cfg = Config.fromfile(args.config)
    metric, name, draw = TASKS[cfg.default_scope]
    work_dir = Path('work_dirs') / Path(args.config).stem
    write_shapes(cfg.data_root.rstrip('/').removesuffix('/ade'))

    init_default_scope(cfg.default_scope)
    untrained = work_dir / 'untrained.pth'
    model = MODELS.build(cfg.model)
    work_dir.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict()}, str(untrained))
    before = evaluate(args.config, untrained, work_dir / 'untrained', metric)

    run('tools/train.py', args.config, '--work-dir', str(work_dir))
    checkpoint = Path((work_dir / 'last_checkpoint').read_text())
    after = evaluate(args.config, checkpoint, work_dir / 'test', metric)
    picture = draw(args.config, str(checkpoint), work_dir / 'predictions.png')
    print(
        f'demo: {name} = {after:.3f} (untrained {before:.3f}), picture: {picture}, checkpoint: {checkpoint}',
        flush=True,
    )


if __name__ == '__main__':
    main()

"""The demos: make the data, train, test and draw with the tools for users. ``make demo`` calls it."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint
from predictions import draw_predictions, draw_segmentation

import mmgate  # noqa: F401

REAL_IMAGES = 'demo: the same on real images, of face masks, blood cells and streets: configs/real/README.md'
MAKE_SHAPES = 'tools/dataset_converters/make_shapes.py'
# by the config's scope: the metrics to show, if they are there, and the picture
TASKS = {
    'mmdet': (('coco/bbox_mAP_50', 'coco/segm_mAP_50'), draw_predictions),
    'mmseg': (('mIoU',), draw_segmentation),
}


def run(*command: str) -> None:
    """Run one of the tools and show its output."""
    print('demo: python', ' '.join(command), flush=True)
    subprocess.run([sys.executable, '-W', 'ignore', *command], check=True)


def evaluate(config: str, checkpoint: Path, work_dir: Path) -> dict[str, float]:
    """Return the metrics of a checkpoint, as tools/test.py measures them."""
    run('tools/test.py', config, str(checkpoint), '--work-dir', str(work_dir))
    results = max(work_dir.glob('*/*.json'), key=lambda path: path.stat().st_mtime)
    return json.loads(results.read_text().splitlines()[-1])


def demo(config: str) -> str:
    """Train and test ``config`` and return a line of results."""
    cfg = Config.fromfile(config)
    metrics, draw = TASKS[cfg.default_scope]
    work_dir = Path('work_dirs') / Path(config).stem
    run(MAKE_SHAPES, cfg.data_root.rstrip('/').removesuffix('/ade'), '--num-objects', '0')

    init_default_scope(cfg.default_scope)
    untrained = work_dir / 'untrained.pth'
    model = MODELS.build(cfg.model)
    model.init_weights()
    work_dir.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict()}, str(untrained))
    before = evaluate(config, untrained, work_dir / 'untrained')

    run('tools/train.py', config, '--work-dir', str(work_dir))
    checkpoint = Path((work_dir / 'last_checkpoint').read_text())
    after = evaluate(config, checkpoint, work_dir / 'test')
    picture = draw(config, str(checkpoint), work_dir / 'predictions.png')
    figures = ', '.join(
        f'{metric.removeprefix("coco/")} = {after[metric]:.3f} (untrained {before.get(metric, 0.0):.3f})'
        for metric in metrics
        if metric in after
    )
    return f'demo: {figures}, picture: {picture}, checkpoint: {checkpoint}'


def main() -> None:
    """Parse arguments and run one demo after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('configs', nargs='+')
    lines = [demo(config) for config in parser.parse_args().configs]
    print('\n'.join([*lines, REAL_IMAGES]), flush=True)


if __name__ == '__main__':
    main()

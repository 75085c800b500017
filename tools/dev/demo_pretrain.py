"""Show the benefit of pre-training: Mask R-CNN from a classifier and from scratch; for ``make demo-pretrain``."""

import argparse
from pathlib import Path

from demo import MAKE_SHAPES, evaluate, run

CLASSIFIER = 'configs/saga/classification/saga-pvt-demo_1xb32-12e_shapes.py'
DETECTORS = {
    'pre-trained': 'configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo-pretrained_1xb8-8e_shapes.py',
    'from scratch': 'configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
}
WORK_DIR = Path('work_dirs/demo_pretrain')  # where the first config looks for the classifier
METRIC = 'coco/bbox_mAP_50'


def train(config: str, work_dir: Path, *options: str) -> Path:
    """Train ``config`` and return its last checkpoint."""
    run('tools/train.py', config, '--work-dir', str(work_dir), *options)
    return Path((work_dir / 'last_checkpoint').read_text())


def main() -> None:
    """Pre-train, train the detector twice for the same steps, and compare."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--epochs', type=int, default=4, help='of the detector, either way')
    args = parser.parse_args()
    run(MAKE_SHAPES, 'data/shapes')
    classifier = train(CLASSIFIER, WORK_DIR / 'classifier')
    shorter = (
        f'train_cfg.max_epochs={args.epochs}',
        f'train_cfg.val_interval={args.epochs}',
        f'param_scheduler.1.T_max={args.epochs}',
        f'param_scheduler.1.end={args.epochs}',
        f'default_hooks.checkpoint.interval={args.epochs}',
        'randomness.seed=0',
    )
    figures = {}
    for name, config in DETECTORS.items():
        work_dir = WORK_DIR / name.replace(' ', '-')
        checkpoint = train(config, work_dir, '--cfg-options', *shorter)
        figures[name] = evaluate(config, checkpoint, work_dir / 'test')[METRIC]
    accuracy = evaluate(CLASSIFIER, classifier, WORK_DIR / 'classifier' / 'test')['accuracy/top1']
    print(
        f'demo: classifier {accuracy:.1f} % of the shapes; Mask R-CNN after {args.epochs} epochs, AP50: '
        + ', '.join(f'{name} {figure:.3f}' for name, figure in figures.items()),
        flush=True,
    )


if __name__ == '__main__':
    main()

"""The demos: make the data, train, test and draw with the tools for users. ``make demo`` calls it.

Without a config it shows the benefit of pre-training: Mask R-CNN from a classifier and from scratch.
"""

import argparse
import signal
import subprocess
import sys
from pathlib import Path

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import save_checkpoint

import mmgate  # noqa: F401
from mmgate.analysis.trials.study import read_metrics

REAL_IMAGES = 'demo: the same on real images, of face masks, blood cells and streets: configs/real/README.md'
MAKE_SHAPES = 'tools/dataset_converters/make_shapes.py'
CLASSIFIER = 'configs/saga/classification/saga-pvt-demo_1xb32-12e_shapes.py'
DETECTORS = {
    'pre-trained': 'configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo-pretrained_1xb8-8e_shapes.py',
    'from scratch': 'configs/saga/mask_rcnn/saga-mask-rcnn_pvt-demo_1xb8-8e_shapes.py',
}
PRETRAIN = Path('work_dirs/demo_pretrain')  # where the first config looks for the classifier
METRICS = ('coco/bbox_mAP_50', 'coco/segm_mAP_50', 'mIoU')  # to show, if they are there


def run(*command: str) -> None:
    """Run one of the tools and show its output."""
    print('demo: python', ' '.join(command), flush=True)
    subprocess.run([sys.executable, '-W', 'ignore', *command], check=True)


def train(config: str, work_dir: Path, *options: str) -> Path:
    """Train ``config`` and return its last checkpoint."""
    run('tools/train.py', config, '--work-dir', str(work_dir), *options)
    return Path((work_dir / 'last_checkpoint').read_text())


def evaluate(config: str, checkpoint: Path, work_dir: Path, *options: str) -> dict[str, float]:
    """Return the metrics of a checkpoint, as tools/test.py measures them."""
    run('tools/test.py', config, str(checkpoint), '--work-dir', str(work_dir), *options)
    return read_metrics(work_dir)


def demo(config: str) -> str:
    """Train and test ``config`` and return a line of results."""
    cfg = Config.fromfile(config)
    work_dir = Path('work_dirs') / Path(config).stem
    run(MAKE_SHAPES, cfg.data_root.rstrip('/').removesuffix('/ade'), '--num-objects', '0')

    init_default_scope(cfg.default_scope)
    untrained = work_dir / 'untrained.pth'
    model = MODELS.build(cfg.model)
    model.init_weights()
    work_dir.mkdir(parents=True, exist_ok=True)
    save_checkpoint({'state_dict': model.state_dict()}, str(untrained))
    before = evaluate(config, untrained, work_dir / 'untrained')

    checkpoint = train(config, work_dir)
    pictures = work_dir / 'pictures'
    after = evaluate(config, checkpoint, work_dir / 'test', '--show-dir', str(pictures.resolve()))
    figures = ', '.join(
        f'{metric.removeprefix("coco/")} = {after[metric]:.3f} (untrained {before.get(metric, 0.0):.3f})'
        for metric in METRICS
        if metric in after
    )
    return f'demo: {figures}, pictures: {pictures}, checkpoint: {checkpoint}'


def pretrain(epochs: int) -> str:
    """Pre-train, train the detector twice for the same steps, and return a line of results."""
    run(MAKE_SHAPES, 'data/shapes')
    classifier = train(CLASSIFIER, PRETRAIN / 'classifier')
    keys = ('train_cfg.max_epochs', 'train_cfg.val_interval', 'param_scheduler.1.T_max', 'param_scheduler.1.end')
    shorter = [f'{key}={epochs}' for key in (*keys, 'default_hooks.checkpoint.interval')]
    figures = []
    for name, config in DETECTORS.items():
        work_dir = PRETRAIN / name.replace(' ', '-')
        checkpoint = train(config, work_dir, '--cfg-options', *shorter, 'randomness.seed=0')
        figures.append(f'{name} {evaluate(config, checkpoint, work_dir / "test")[METRICS[0]]:.3f}')
    accuracy = evaluate(CLASSIFIER, classifier, PRETRAIN / 'classifier/test')['accuracy/top1']
    shown = f'classifier {accuracy:.1f} % of the shapes; Mask R-CNN after {epochs} epochs, AP50'
    return f'demo: {shown}: {", ".join(figures)}'


def main() -> None:
    """Parse arguments and run one demo after the other."""
    # An exception ends the tool that runs.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('configs', nargs='*')
    parser.add_argument('--epochs', type=int, default=4, help='of the pre-trained detector (default %(default)s)')
    args = parser.parse_args()
    lines = [demo(config) for config in args.configs] or [pretrain(args.epochs)]
    print('\n'.join([*lines, REAL_IMAGES]), flush=True)


if __name__ == '__main__':
    main()

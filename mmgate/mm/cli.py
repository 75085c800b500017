"""The command lines of tools/train.py and tools/test.py, and what their options change in a config.

torch and mmengine's Runner are imported after the arguments are parsed, so that ``--help`` does not wait for them.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.config import Config, ConfigDict

from mmgate.errors import ConfigError

from .config_file import add_trust_option, check_checkpoint, config_parser, innermost, package_of, type_name
from .gate_options import add_gate_options, configured

if TYPE_CHECKING:
    from mmengine.runner import FlexibleRunner, Runner

STATISTICS = 'GateStatisticsHook'
META_KEYS = ('img_id', 'img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction')
# By package, for test-time augmentation: what is around the model, and the last step of the pipeline unless the
# config's own serves. mmdet registers its class in mmengine's registry, so that the name has no scope.
AUGMENTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    'mmdet': (
        dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100)),
        dict(type='mmdet.PackDetInputs', meta_keys=META_KEYS),
    ),
    'mmseg': (dict(type='mmseg.SegTTAModel'), dict(type='mmseg.PackSegInputs')),
    'mmpretrain': (dict(type='mmpretrain.AverageClsScoreTTA'), {}),
}


def main(command: Callable[[list[str]], None], argv: list[str] | None = None) -> int:
    """Run a command; print an error that the user can mend as a message without traceback.

    ``MMGATE_TRACEBACK=1`` shows the traceback.

    While it runs, mmengine loads checkpoints by our loaders, which run no code of a file.

    Returns:
        The exit status: 0, 2 after an error in the input, 130 after Ctrl-C.
    """
    _find_projects()
    try:
        with nullcontext() if command in (train, test) else _guarded():
            command(sys.argv[1:] if argv is None else argv)
        from torch import distributed

        if distributed.is_initialized():
            # Threads of gloo that outlive the interpreter abort the process; the model's wrapper holds their group.
            gc.collect()
            distributed.destroy_process_group()
    except (ConfigError, KeyboardInterrupt) as error:
        if os.environ.get('MMGATE_TRACEBACK'):
            raise
        interrupted = isinstance(error, KeyboardInterrupt)
        print('interrupted' if interrupted else f'error: {error}', file=sys.stderr)
        return 130 if interrupted else 2
    return 0


def _find_projects() -> None:
    """Let configs import projects, which are beside the folder of a tool, and which no installation has."""
    for folder in Path(sys.argv[0]).resolve().parents:
        root = folder.parent
        if folder.name == 'tools' and (root / 'projects').is_dir() and str(root) not in sys.path:
            # What is installed goes first.
            sys.path.append(str(root))


def _guarded() -> AbstractContextManager[None]:
    from mmgate.checkpoints.loading import guarded_loaders

    return guarded_loaders()


def train(argv: list[str]) -> None:
    """Run ``train.py``: train the model of a config."""
    parser = _parser('Train a detector, a segmentor or a classifier')
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision (on a GPU)')
    parser.add_argument(
        '--speedups',
        action='store_true',
        help="the same training by the faster step of mmgate's own configs: parameter groups merged, optimizer fused, "
        "one matching, mmgate's operator in deformable attention without a gate, channels last",
    )
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate to processes x batch, as mmdet does'
    )
    parser.add_argument(
        '--resume', nargs='?', const='auto', help='go on from this checkpoint, or from the last one in the work dir'
    )
    args = _parse(parser, argv)
    with _guarded():
        _train(args)


def _train(args: argparse.Namespace) -> None:
    from mmengine.runner import find_latest_checkpoint

    from .load_report import LoadReportHook
    from .speedups import speed_up

    cfg = load_config(args)
    note = speed_up(cfg) if args.speedups else ''
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        if (cfg.get('auto_scale_lr') or {}).get('base_batch_size') is None:
            raise ConfigError('--auto-scale-lr needs auto_scale_lr.base_batch_size in the config, the batch of its lr.')
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        last = find_latest_checkpoint(cfg.work_dir) if args.resume == 'auto' else args.resume
        # A first start has no checkpoint to resume from.
        cfg.resume = last is not None
        cfg.load_from = last or cfg.get('load_from')
    if cfg.get('load_from'):
        check_checkpoint(cfg.load_from, sharded='strategy' in cfg)
    runner = build_runner(cfg)
    if cfg.get('load_from') or cfg.get('resume'):
        start = cfg.get('load_from') or f'the last checkpoint in {cfg.work_dir}'
        runner.register_hook(LoadReportHook(start, gates=None if cfg.get('resume') else args.gates))
    add_gate_statistics(runner)
    if note:
        runner.logger.info(note)
    runner.train()


def test(argv: list[str]) -> None:
    """Run ``test.py``: evaluate a checkpoint with a config."""
    parser = _parser('Test (and evaluate) a detector, a segmentor or a classifier')
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument(
        '--out', help='mmdet, mmpretrain: .pkl file for all predictions; mmseg: folder for the label maps'
    )
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='folder for painted images (below the work dir)')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds a shown image stays')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    parser.add_argument(
        '--allow-mismatch',
        action='store_true',
        help="test although the checkpoint has less than half of the model's keys, tensors of other sizes, or gates "
        'that were trained with other options',
    )
    args = _parse(parser, argv)
    with _guarded():
        _test(args)


def _test(args: argparse.Namespace) -> None:
    from .load_report import LoadReportHook

    cfg = load_config(args)
    package = package_of(cfg)
    pickled = args.out if package != 'mmseg' else None
    if pickled and not pickled.endswith(('.pkl', '.pickle')):
        raise ConfigError(f'--out {pickled}: predictions are dumped into a .pkl or .pickle file.')
    cfg.load_from = args.checkpoint
    if args.show or args.show_dir:
        enable_visualization(cfg, show=args.show, show_dir=args.show_dir, wait_time=args.wait_time)
    if args.tta:
        enable_tta(cfg)
    if args.out and not pickled:
        for evaluator in cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]:
            evaluator.update(output_dir=args.out, keep_results=True)
    check_checkpoint(args.checkpoint, sharded='strategy' in cfg)
    runner = build_runner(cfg)
    runner.register_hook(LoadReportHook(args.checkpoint, allow_mismatch=args.allow_mismatch, gates=args.gates))
    if pickled:
        if package == 'mmpretrain':
            from mmengine.evaluator import DumpResults as Dump
        else:
            from mmdet.evaluation import DumpDetResults as Dump
        runner.test_loop.evaluator.metrics.append(Dump(out_file_path=pickled))
    runner.test()


def load_config(args: argparse.Namespace) -> Config:
    """Return the config that parsed arguments describe, with its gates and a work dir.

    The work dir is the argument's, else the config's, else one named after the config file.

    Raises:
        ConfigError: See :func:`.gate_options.configured`.
    """
    cfg = configured(args)
    cfg.launcher = args.launcher
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or f'./work_dirs/{Path(cfg.filename).stem}'
    return cfg


def build_runner(cfg: Config) -> Runner | FlexibleRunner:
    """Build the Runner of a config, with its model.

    Args:
        cfg: The config; ``runner_type`` names a registered runner, such as mmengine's FlexibleRunner.

    Raises:
        ConfigError: A launcher cannot work here, or a rule does not fit the model.
    """
    from mmengine.registry import RUNNERS, init_default_scope
    from mmengine.runner import FlexibleRunner, Runner

    from .processes import prepare_processes

    init_default_scope(cfg.get('default_scope') or 'mmengine')
    prepare_processes(cfg)
    runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
    if isinstance(runner, FlexibleRunner):  # else it builds the model only when it starts
        runner.model = runner.strategy.build_model(runner.model)
    return runner


def add_gate_statistics(runner: Any) -> None:
    """Add a GateStatisticsHook to a Runner whose model has gates, unless the config says otherwise.

    Sharded models are left out, whose modules have other names.
    """
    from mmengine.runner import FlexibleRunner

    from mmgate.gate import Gate

    named = any(type(hook).__name__ == STATISTICS for hook in runner.hooks)
    wanted = runner.cfg.get('gate_statistics', True) and not named and not isinstance(runner, FlexibleRunner)
    if wanted and any(isinstance(module, Gate) for module in runner.model.modules()):
        # By its name, because mmgate.analysis imports this package.
        runner.register_hook(dict(type=f'mmgate.{STATISTICS}', interval=500, per='type'))


def enable_amp(cfg: Config) -> None:
    """Change a config's optimizer wrapper to AmpOptimWrapper, for the option ``--amp``.

    Raises:
        ConfigError: The wrapper is of a type that has no such form.
    """
    wrapper_type = type_name({'type': 'OptimWrapper', **cfg.optim_wrapper})
    if wrapper_type == 'AmpOptimWrapper':
        warnings.warn('--amp: the config trains in mixed precision already.', stacklevel=2)
        return
    if wrapper_type != 'OptimWrapper':
        raise ConfigError(f'--amp: optim_wrapper.type={wrapper_type!r} cannot be converted; only OptimWrapper can.')
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')


def enable_visualization(cfg: Config, *, show: bool, show_dir: str | None, wait_time: float) -> None:
    """Let a config draw predictions during testing, for the options ``--show`` and ``--show-dir``.

    Raises:
        ConfigError: The config has no visualization hook.
    """
    hook = cfg.get('default_hooks', {}).get('visualization')
    package = package_of(cfg)
    if hook is None:
        raise ConfigError('--show and --show-dir need default_hooks.visualization in the config.')
    hook['enable' if package == 'mmpretrain' else 'draw'] = True
    if show:
        hook.show = True
        hook.wait_time = wait_time
    if show_dir and package == 'mmseg':
        cfg.visualizer.save_dir = show_dir
    elif show_dir:
        hook['out_dir' if package == 'mmpretrain' else 'test_out_dir'] = show_dir


def enable_tta(cfg: Config) -> None:
    """Change a config to test-time augmentation (``--tta``): its own, or a horizontal flip if it has none."""
    package = package_of(cfg) or 'mmdet'
    model, pack = AUGMENTED.get(package, AUGMENTED['mmdet'])
    dataset = innermost(cfg.test_dataloader.dataset)
    if 'tta_pipeline' not in cfg:
        *steps, last = deepcopy(dataset.pipeline)
        # Annotations stay outside, because they must not be flipped.
        flips = [dict(type=f'{package}.RandomFlip', prob=prob) for prob in (0.0, 1.0)]
        cfg.tta_pipeline = [*steps, dict(type='TestTimeAug', transforms=[flips, [pack or last]])]
    cfg.model = ConfigDict(**cfg.get('tta_model', model), module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def _parser(description: str) -> argparse.ArgumentParser:
    parser = config_parser(description)
    parser.add_argument('--work-dir', help='folder for logs, checkpoints and metrics')
    add_gate_options(parser)
    add_trust_option(parser)
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none', help='job launcher')
    # torchrun sets the variable; torch.distributed.launch passes the argument, in either spelling.
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    args = parser.parse_args(argv)
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args

"""The command lines of tools/train.py and tools/test.py: arguments, config, Runner.

Everything that can be wrong with the input is found before the Runner exists, so a failing start leaves nothing behind
and touches nothing on disk.
"""

from __future__ import annotations

import argparse
import os
import os.path as osp
import sys
import warnings
from collections.abc import Callable
from copy import deepcopy

from mmengine.config import Config, ConfigDict, DictAction
from mmengine.registry import RUNNERS, init_default_scope
from mmengine.runner import Runner

from .preflight import ConfigError, check_checkpoint, check_data, check_options, check_pretrained


def main(command: Callable[[list[str]], None], argv: list[str] | None = None) -> int:
    """Run a command and turn what the user can mend into one message on stderr (MMGATE_TRACEBACK=1: a traceback).

    Returns:
        0, or 2 after an error in the input.
    """
    try:
        command(sys.argv[1:] if argv is None else argv)
    except ConfigError as error:
        if os.environ.get('MMGATE_TRACEBACK'):
            raise
        print(f'error: {error}', file=sys.stderr)
        return 2
    return 0


def train(argv: list[str]) -> None:
    """Train the model of a config."""
    parser = _parser('Train a detector or a segmentor')
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument('--auto-scale-lr', action='store_true', help='scale the learning rate to the real batch size')
    parser.add_argument(
        '--resume', nargs='?', const='auto', help='go on from this checkpoint, or from the last one in the work dir'
    )
    args = _parse(parser, argv)
    cfg = load_config(args)
    if args.amp:
        enable_amp(cfg)
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if args.resume == 'auto':
        cfg.resume, cfg.load_from = True, None
    elif args.resume is not None:
        cfg.resume, cfg.load_from = True, args.resume
    check_data(cfg, ('train', 'val'))
    check_pretrained(cfg)
    if cfg.get('load_from'):
        check_checkpoint(cfg.load_from)
    build_runner(cfg, trains=True).train()


def test(argv: list[str]) -> None:
    """Evaluate a checkpoint."""
    parser = _parser('Test (and evaluate) a detector or a segmentor')
    parser.add_argument('checkpoint', help='checkpoint file or URL')
    parser.add_argument('--out', help='mmdet: .pkl file for all predictions; mmseg: folder for the label maps')
    parser.add_argument('--show', action='store_true', help='show predictions in a window')
    parser.add_argument('--show-dir', help='folder for painted images (below the work dir)')
    parser.add_argument('--wait-time', type=float, default=2, help='seconds a shown image stays')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation')
    args = _parse(parser, argv)
    cfg = load_config(args)
    segments = is_segmentation(cfg)
    if args.out and not segments and not args.out.endswith(('.pkl', '.pickle')):
        raise ConfigError(f'--out {args.out}: a detector dumps into a .pkl or .pickle file.')
    cfg.load_from = args.checkpoint
    if args.show or args.show_dir:
        enable_visualization(cfg, show=args.show, show_dir=args.show_dir, wait_time=args.wait_time)
    if args.tta:
        enable_tta(cfg)
    if args.out and segments:
        evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
        for evaluator in evaluators:
            evaluator.update(output_dir=args.out, keep_results=True)
    check_data(cfg, ('test',))
    check_checkpoint(args.checkpoint)
    runner = build_runner(cfg, trains=False)
    if args.out and not segments:
        from mmdet.evaluation import DumpDetResults

        runner.test_evaluator.metrics.append(DumpDetResults(out_file_path=args.out))
    runner.test()


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    parser.add_argument('--work-dir', help='folder for logs, checkpoints and metrics')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=DictAction,
        help='override settings: key=value, nested keys by dots, lists as key="[a,b]"',
    )
    parser.add_argument('--launcher', choices=['none', 'pytorch', 'slurm', 'mpi'], default='none', help='job launcher')
    # torchrun sets the variable, torch.distributed.launch passes the argument, in either spelling
    parser.add_argument('--local_rank', '--local-rank', type=int, default=0, help=argparse.SUPPRESS)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    args = parser.parse_args(argv)
    os.environ.setdefault('LOCAL_RANK', str(args.local_rank))
    return args


def load_config(args: argparse.Namespace) -> Config:
    """Read ``args.config``, merge ``args.cfg_options`` and settle the work dir: argument, then config, then file name.

    Raises:
        ConfigError: The file is missing or malformed, or an option names nothing in the config.
    """
    cfg = read_config(args.config)
    if args.cfg_options:
        check_options(cfg, args.cfg_options)
        cfg.merge_from_dict(args.cfg_options)
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('./work_dirs', name)
    return cfg


def read_config(config: str) -> Config:
    """Return the config of a file or of ``package::path``.

    Raises:
        ConfigError: The file is missing or malformed.
    """
    path = config
    if '::' in path:
        from mmengine.config.utils import _get_external_cfg_base_path, _get_package_and_cfg_path
        from mmengine.utils import get_installed_path

        try:
            package, relative = _get_package_and_cfg_path(path)
            path = _get_external_cfg_base_path(get_installed_path(package), relative)
        except (AssertionError, ValueError, FileNotFoundError, ModuleNotFoundError, ImportError) as error:
            raise ConfigError(f'config {config}: {error}') from error
    if not osp.isfile(path):
        raise ConfigError(f'config {path} does not exist (looked for {osp.abspath(path)}).')
    try:
        return Config.fromfile(path)
    except (OSError, SyntaxError, KeyError, TypeError, ValueError, AttributeError, NameError) as error:
        raise ConfigError(f'config {path} cannot be read: {type(error).__name__}: {error}') from error


def is_segmentation(cfg: Config) -> bool:
    """Return whether the config is one of mmseg's."""
    return cfg.get('default_scope') == 'mmseg'


def enable_amp(cfg: Config) -> None:
    """Turn the optimizer wrapper into its mixed-precision form.

    Raises:
        ConfigError: The wrapper is of a type that has no such form.
    """
    kind = cfg.optim_wrapper.get('type', 'OptimWrapper')
    if kind == 'AmpOptimWrapper':
        warnings.warn('--amp: the config trains in mixed precision already.', stacklevel=2)
        return
    if kind != 'OptimWrapper':
        raise ConfigError(f'--amp: optim_wrapper.type={kind!r} cannot be converted; only OptimWrapper can.')
    cfg.optim_wrapper.type = 'AmpOptimWrapper'
    cfg.optim_wrapper.setdefault('loss_scale', 'dynamic')


def enable_auto_scale_lr(cfg: Config) -> None:
    """Scale the learning rate by real over base batch size.

    Raises:
        ConfigError: The config names no base batch size.
    """
    if 'base_batch_size' not in (cfg.get('auto_scale_lr') or {}):
        raise ConfigError('--auto-scale-lr needs auto_scale_lr.base_batch_size in the config, the batch its lr is for.')
    cfg.auto_scale_lr.enable = True


def enable_visualization(cfg: Config, *, show: bool, show_dir: str | None, wait_time: float) -> None:
    """Draw predictions during testing.

    Raises:
        ConfigError: The config has no visualization hook.
    """
    hook = cfg.get('default_hooks', {}).get('visualization')
    if hook is None:
        raise ConfigError('--show and --show-dir need default_hooks.visualization in the config.')
    hook.draw = True
    if show:
        hook.show, hook.wait_time = True, wait_time
    if show_dir:
        if is_segmentation(cfg):
            cfg.visualizer.save_dir = show_dir
        else:
            hook.test_out_dir = show_dir


def enable_tta(cfg: Config) -> None:
    """Wrap the model and the pipeline in test-time augmentation: the config's own, else a horizontal flip."""
    segments = is_segmentation(cfg)
    if 'tta_model' not in cfg:
        detector = dict(type='DetTTAModel', tta_cfg=dict(nms=dict(type='nms', iou_threshold=0.5), max_per_img=100))
        cfg.tta_model = dict(type='SegTTAModel') if segments else detector
    dataset = cfg.test_dataloader.dataset
    while 'dataset' in dataset:
        dataset = dataset.dataset
    if 'tta_pipeline' not in cfg:
        pipeline = deepcopy(dataset.pipeline)
        meta = ['img_path', 'ori_shape', 'img_shape', 'scale_factor', 'flip', 'flip_direction']
        pack: dict = dict(type='PackSegInputs') if segments else dict(type='PackDetInputs', meta_keys=['img_id', *meta])
        # annotations stay outside: they must not be flipped
        flips = [dict(type='RandomFlip', prob=prob) for prob in (0.0, 1.0)]
        cfg.tta_pipeline = [*pipeline[:-1], dict(type='TestTimeAug', transforms=[flips, [pack]])]
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    dataset.pipeline = cfg.tta_pipeline


def build_runner(cfg: Config, *, trains: bool) -> Runner:
    """Return the config's Runner, or the default one, with the loops of training or of testing built.

    Raises:
        ConfigError: A component does not know an argument, or is not registered.
    """
    if cfg.get('default_scope') == 'mmdet':
        from mmdet.utils import setup_cache_size_limit_of_dynamo

        setup_cache_size_limit_of_dynamo()
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    try:
        runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
        # The Runner builds these when the loop starts, too late for a typo in a component's arguments.
        if trains:
            _ = runner.train_loop, runner.val_loop
            runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        else:
            _ = runner.test_loop
    except (TypeError, KeyError, ValueError, FileNotFoundError) as error:
        raise ConfigError(f'the config cannot be built: {type(error).__name__}: {error}') from error
    return runner

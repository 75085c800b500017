"""The command lines of tools/train.py and tools/test.py: arguments, config, Runner.

Everything that can be wrong with the input is found before the Runner exists, so a failing start leaves nothing behind
and touches nothing on disk.
"""

from __future__ import annotations

import argparse
import errno
import os
import os.path as osp
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mmengine.config import Config, DictAction
from mmengine.dist import is_main_process
from mmengine.registry import RUNNERS, init_default_scope
from mmengine.runner import FlexibleRunner, Runner

from .backends import check_backends
from .batch import count_accumulation, enable_auto_accumulate, enable_auto_scale_lr
from .choices_hook import BackendChoicesHook
from .classes import check_classes, predicted_classes
from .config_checks import check_optimizer, check_shape
from .data_checks import check_metrics
from .data_errors import DataError, cannot_be_built, explained_run, try_first_map, watch_data
from .distributed import explained_failures, prepare_processes
from .gate_hooks import own_model
from .hooks import LoadReportHook
from .interrupt_hook import SaveOnInterruptHook, shield_loaders
from .options import merge_options
from .preflight import ConfigError, check_amp, check_checkpoint, check_data, check_packages, check_pretrained, remedy
from .safe_load import add_trust_option
from .switches import enable_amp, enable_tta, enable_visualization, is_classification, is_segmentation
from .whole_checkpoints import (
    checkpoint_folders,
    keep_quiet_when_full,
    last_whole_checkpoint,
    remove_after_saving,
    remove_unfinished,
    write_whole_files,
)

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def main(command: Callable[[list[str]], None], argv: list[str] | None = None) -> int:
    """Run a command and turn what the user can mend into one message on stderr (MMGATE_TRACEBACK=1: a traceback).

    Returns:
        0, 2 after an error in the input or a full disk, 130 after Ctrl-C.
    """
    try:
        command(sys.argv[1:] if argv is None else argv)
    except KeyboardInterrupt:
        if os.environ.get('MMGATE_TRACEBACK'):
            raise
        print('interrupted', file=sys.stderr)
        return 130
    except ConfigError as error:  # some are an OSError, too
        if os.environ.get('MMGATE_TRACEBACK'):
            raise
        # a data loader's worker hands over its traceback in the message, the error last
        kind = type(error).__name__
        message = str(error).rpartition(f'{kind}: ')[2].strip() if isinstance(error, DataError) else error
        print(f'error: {message}', file=sys.stderr)
        return 2
    except OSError as error:
        if error.errno not in FULL or os.environ.get('MMGATE_TRACEBACK'):
            raise
        print(
            f'error: {error}. What was saved before is untouched; make room, and go on with --resume.', file=sys.stderr
        )
        return 2
    return 0


def train(argv: list[str]) -> None:
    """Train the model of a config."""
    parser = _parser('Train a detector, a segmentor or a classifier')
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision (on a GPU)')
    batch = parser.add_mutually_exclusive_group()
    batch.add_argument(
        '--auto-scale-lr',
        action='store_true',
        help='scale the learning rate to the images of a step (processes x batch x accumulation)',
    )
    batch.add_argument(
        '--auto-accumulate',
        action='store_true',
        help='accumulate gradients until a step has auto_scale_lr.base_batch_size images; what the config counts in '
        'iterations (max_iters, warm-up, intervals) is stretched alike, so that the optimizer steps stay as many',
    )
    parser.add_argument(
        '--resume', nargs='?', const='auto', help='go on from this checkpoint, or from the last one in the work dir'
    )
    args = _parse(parser, argv)
    cfg = load_config(args)
    notes: list[str | None] = []
    if args.amp:
        enable_amp(cfg)
    if args.auto_accumulate:
        notes.append(enable_auto_accumulate(cfg))
    if args.auto_scale_lr:
        enable_auto_scale_lr(cfg)
    if args.resume == 'auto':
        cfg.resume = True
        folders = checkpoint_folders(cfg)
        cfg.load_from, warning = last_whole_checkpoint(cfg.work_dir, *folders)
        notes.append(warning)
    elif args.resume is not None:
        cfg.resume, cfg.load_from = True, args.resume
    check_amp(cfg)
    check_data(cfg, ('train', 'val'))
    check_pretrained(cfg)
    if cfg.get('load_from'):
        check_checkpoint(cfg.load_from, sharded='strategy' in cfg)
    runner = build_runner(cfg, trains=True)
    if args.resume == 'auto' and is_main_process():
        remove_unfinished(cfg.work_dir, *folders)
    if cfg.get('load_from') or cfg.get('resume'):
        runner.register_hook(LoadReportHook(cfg.get('load_from') or f'the last checkpoint in {cfg.work_dir}'))
    for note in (*notes, count_accumulation(runner, cfg)):
        if note:
            runner.logger.info(note)
    with explained_failures(runner), explained_run():
        runner.train()


def test(argv: list[str]) -> None:
    """Evaluate a checkpoint."""
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
        help="test although the checkpoint has less than half of the model's keys",
    )
    args = _parse(parser, argv)
    cfg = load_config(args)
    segments = is_segmentation(cfg)
    if args.out and not segments and not args.out.endswith(('.pkl', '.pickle')):
        raise ConfigError(f'--out {args.out}: predictions are dumped into a .pkl or .pickle file.')
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
    check_checkpoint(args.checkpoint, sharded='strategy' in cfg)
    runner = build_runner(cfg, trains=False)
    runner.register_hook(LoadReportHook(args.checkpoint, allow_mismatch=args.allow_mismatch))
    if args.out and not segments:
        if is_classification(cfg):
            from mmengine.evaluator import DumpResults as Dump
        else:
            from mmdet.evaluation import DumpDetResults as Dump
        runner.test_evaluator.metrics.append(Dump(out_file_path=args.out))
    with explained_run():
        runner.test()


class Options(DictAction):
    """mmengine's, with a message for what it cannot read, and blanks kept in plain text, such as a path."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        """Add the options to the namespace."""
        texts: dict[str, str] = {}
        for option in values:
            key, sign, value = option.partition('=')
            if not sign or key != key.strip():
                parser.error(
                    f'--cfg-options {option}: write key=value, without blanks around the sign; a value with blanks '
                    'goes into quotes, as in key="[1, 2]".'
                )
            texts.pop(key, None)  # the last one counts
            if ' ' in value.strip() and ',' not in value and not value.strip().startswith(('(', '[')):
                texts[key] = value.strip().strip('\'"')
        try:
            super().__call__(parser, namespace, values, option_string)
        except AssertionError as error:
            parser.error(f'--cfg-options {" ".join(values)}: {error}')
        found = getattr(namespace, self.dest)
        found.update((key, text) for key, text in texts.items() if isinstance(found[key], str))


def _parser(description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument('config', help="config file, or 'package::path' of an installed package's config")
    parser.add_argument('--work-dir', help='folder for logs, checkpoints and metrics')
    parser.add_argument(
        '--cfg-options',
        nargs='+',
        action=Options,
        help='override settings: key=value, nested keys by dots, lists as key="[a,b]"',
    )
    add_trust_option(parser)
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
        ConfigError: The file is missing or malformed, or an option cannot be merged into the config.
    """
    cfg = read_config(args.config)
    if args.cfg_options:
        merge_options(cfg, args.cfg_options)
    check_shape(cfg)
    cfg.launcher = args.launcher
    name = osp.splitext(osp.basename(cfg.filename))[0]
    cfg.work_dir = args.work_dir or cfg.get('work_dir') or osp.join('./work_dirs', name)
    in_the_way = next((path for path in (Path(cfg.work_dir), *Path(cfg.work_dir).parents) if path.is_file()), None)
    if in_the_way:
        raise ConfigError(f'work dir {cfg.work_dir}: {in_the_way} is a file. Give another --work-dir.')
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
        cfg = Config.fromfile(path)
    except (ImportError, AssertionError) as error:  # a base of a package that is not here
        raise ConfigError(f'config {path} cannot be read: {error}{remedy(str(error))}') from error
    except (OSError, SyntaxError, KeyError, TypeError, ValueError, AttributeError, NameError) as error:
        raise ConfigError(f'config {path} cannot be read: {type(error).__name__}: {error}') from error
    check_packages(cfg)
    return cfg


def build_runner(cfg: Config, *, trains: bool) -> Runner | FlexibleRunner:
    """Return the config's Runner, or the default one, with the loops of training or of testing built.

    Args:
        cfg: The config; ``runner_type`` names a registered runner, such as mmengine's FlexibleRunner.
        trains: Whether the runner trains or tests.

    Raises:
        ConfigError: A component does not know an argument, or is not registered; a backend cannot run here; the heads
            do not go with the data set's classes.
    """
    if cfg.get('default_scope') == 'mmdet':
        from mmdet.utils import setup_cache_size_limit_of_dynamo

        setup_cache_size_limit_of_dynamo()
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    prepare_processes(cfg)
    write_whole_files()
    with _buildable():
        runner = RUNNERS.build(cfg) if 'runner_type' in cfg else Runner.from_cfg(cfg)
        if trains:
            check_optimizer(cfg)
        watch_data(runner)
        remove_after_saving(runner)
        keep_quiet_when_full(runner.logger)
        if trains and any(isinstance(hook, SaveOnInterruptHook) for hook in runner.hooks):
            shield_loaders(runner)  # an iteration-based loop may start its workers when it is built
        # The runners build these when the loop starts, too late for a typo in a component's arguments.
        if isinstance(runner, FlexibleRunner):
            runner.model = runner.strategy.build_model(runner.model)
        elif trains:
            runner.optim_wrapper = runner.build_optim_wrapper(runner.optim_wrapper)
        loops = [runner.train_loop, runner.val_loop] if trains else [runner.test_loop]
        for loop in loops:
            if hasattr(loop, 'evaluator'):
                data = loop.dataloader.dataset
                predicted = predicted_classes(own_model(runner.model), data)
                check_metrics(loop.evaluator, data, predicted, 'the data to evaluate on')
                if trains:
                    try_first_map(loop)
    if not any(isinstance(hook, BackendChoicesHook) for hook in runner.hooks):
        runner.register_hook(BackendChoicesHook())
    check_backends(runner.model)
    if trains:
        check_classes(own_model(runner.model), runner.train_dataloader.dataset)
    else:
        try:
            check_classes(own_model(runner.model), runner.test_dataloader.dataset, 'the data to test on')
        except ConfigError as error:  # it can be tested, over those classes alone
            runner.logger.warning(f'{error} The result counts the classes of the data.')
    return runner


@contextmanager
def _buildable() -> Iterator[None]:
    try:
        yield
    except ConfigError:
        raise
    except Exception as error:
        raise cannot_be_built(error) from error

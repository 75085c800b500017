"""The command lines of tools/train.py and tools/test.py.

Everything that can be wrong with the input is found before the Runner exists, so a failing start leaves nothing behind
and touches nothing on disk.
"""

from __future__ import annotations

import argparse
import errno
import os
import sys
from collections.abc import Callable
from typing import Any

from mmengine.config import DictAction
from mmengine.dist import is_main_process

from .batch import count_accumulation, enable_auto_accumulate, enable_auto_scale_lr
from .config_file import load_config
from .distributed import explained_failures
from .hooks import LoadReportHook
from .preflight import ConfigError, check_amp, check_checkpoint, check_data, check_pretrained
from .run_errors import explained_run
from .runner import build_runner
from .safe_load import add_trust_option
from .sample_checks import DataError
from .switches import enable_amp, enable_tta, enable_visualization, is_classification, is_segmentation
from .whole_checkpoints import checkpoint_folders, last_whole_checkpoint, remove_unfinished

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

"""A hook, to be named in a config, that saves a run when Ctrl-C or a cluster ends it."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import os.path as osp
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType
from typing import Any

import torch
from mmengine.dist import is_distributed, is_main_process
from mmengine.fileio import put_text
from mmengine.hooks import CheckpointHook, Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.optim import OptimWrapperDict
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from torch import Tensor, distributed

from mmgate.errors import ConfigError
from mmgate.registry import HOOKS

# As signal.signal returns it; None for a handler that was not set from Python.
Handler = Callable[[int, FrameType | None], Any] | int | None

INTERRUPTED = 'interrupted.pth'
# Key in a checkpoint's meta, of the number of trained batches of the epoch and the number of all.
KEY = 'mmgate_interrupted'
FORWARDED = 1.0  # seconds within which a launcher forwards a Ctrl-C that the terminal has sent to all processes


@HOOKS.register_module()
class SaveOnInterruptHook(Hook):
    """Hook that saves a run at Ctrl-C or SIGTERM and ends it; ``--resume`` continues it, also within an epoch.

    The current step is finished (the optimizer's, where gradients are accumulated; during a validation, the next one),
    and all processes stop after the same step. ``interrupted.pth`` is written beside the run's checkpoints, and
    ``last_checkpoint`` names it. The exit status is 130 after Ctrl-C and 143 after SIGTERM, as in a shell. A second
    Ctrl-C ends the run at once and saves nothing. torchrun and slurm send SIGKILL 30 seconds after SIGTERM.

    Args:
        signals: Names of the signals at which to save, such as ``'SIGUSR1'`` for ``sbatch --signal=USR1@120``.

    Raises:
        ConfigError: There is no signal of that name.
    """

    priority = 'LOWEST'  # after the schedulers, the averages and the checkpoints of the step

    def __init__(self, signals: Sequence[str] = ('SIGINT', 'SIGTERM')) -> None:
        if isinstance(signals, str) or not set(signals) <= set(signal.Signals.__members__):
            raise ConfigError(f"SaveOnInterruptHook: signals={signals!r} must be a list of names such as 'SIGTERM'.")
        self.signals = [signal.Signals[name] for name in signals]
        self._asked: int | None = None  # the signal that came
        self._before: dict[int, Handler] = {}
        self._trained: dict[str, int] = {}

    def after_load_checkpoint(self, runner: Runner, checkpoint: dict[str, Any]) -> None:
        """Keep the number of batches that an interrupted epoch has already trained, if this run resumes one."""
        if getattr(runner, '_resume', False):
            self._trained = checkpoint.get('meta', {}).get(KEY) or {}

    def before_train(self, runner: Runner) -> None:
        """Install signal handlers, let data workers ignore the signals, and skip the batches already trained."""
        atexit.register(_end_workers)
        for loop in filter(None, (runner.train_loop, runner.val_loop)):
            loop.dataloader.worker_init_fn = partial(_start_shielded, loop.dataloader.worker_init_fn)
        if isinstance(runner.train_loop, IterBasedTrainLoop):
            _restart_workers(runner.train_loop)
        self._asked = None
        self._process = os.getpid()
        self._group: distributed.ProcessGroup | None = (
            distributed.new_group(backend='gloo') if is_distributed() else None
        )
        self._before = {number: signal.signal(number, self._note) for number in self.signals}
        if self._trained:
            self._leave_out(runner, **self._trained)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: dict[str, Tensor] | None = None
    ) -> None:
        """Save the run and end it after an optimizer step, if any process has got a signal."""
        loop = runner.train_loop
        wrapper = runner.optim_wrapper
        if self._is_asked() and (isinstance(wrapper, OptimWrapperDict) or wrapper.should_update()):
            in_epoch = dict(batches=batch_idx + 1, of=len(loop.dataloader))
            self._end(runner, {KEY: in_epoch} if isinstance(loop, EpochBasedTrainLoop) else {})

    def after_train(self, runner: Runner) -> None:
        """Restore the signal handlers from before the training."""
        for number, handler in self._before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._before = {}

    def _note(self, number: int, frame: FrameType | None) -> None:
        # A worker that has just been forked has this handler, too.
        if os.getpid() != self._process:
            return
        if self._asked is None:
            self._asked = number
            self._since = time.monotonic()
            # A logger may be writing at this moment, so the message goes to stderr directly.
            if is_main_process():
                os.write(2, b'\nSaving after a step of training, if one is left; Ctrl-C once more ends it at once.\n')
        elif number == signal.SIGINT and time.monotonic() - self._since > FORWARDED:
            raise KeyboardInterrupt

    def _is_asked(self) -> bool:
        if self._group is not None:
            asked = torch.tensor(self._asked or 0)
            distributed.all_reduce(asked, distributed.ReduceOp.MAX, group=self._group)
            self._asked = int(asked) or None
        return self._asked is not None

    def _end(self, runner: Runner, meta: dict[str, Any]) -> None:
        hook = next((hook for hook in runner.hooks if isinstance(hook, CheckpointHook)), None)
        folder = getattr(hook, 'out_dir', None) or runner.work_dir
        options: dict[str, Any] = dict(meta=meta, by_epoch=False, backend_args=getattr(hook, 'backend_args', None))
        runner.save_checkpoint(folder, INTERRUPTED, save_param_scheduler=runner.param_schedulers is not None, **options)
        asked = signal.Signals(self._asked or signal.SIGINT)
        path = f'{folder.rstrip("/")}/{INTERRUPTED}'
        if is_main_process():
            put_text(path, osp.join(runner.work_dir, 'last_checkpoint'))
            words = f'{asked.name}: the run is saved as {path} after {runner.iter + 1} iterations; --resume goes on.'
            runner.logger.info(words)
        if self._group is not None:
            # A launcher ends all processes as soon as one has ended.
            distributed.barrier(self._group)
        self.after_train(runner)
        raise SystemExit(128 + asked)

    def _leave_out(self, runner: Runner, batches: int, of: int) -> None:
        loop = runner.train_loop
        there = len(loop.dataloader)
        if there != of:
            words = f'The run was interrupted after {batches} of {of} batches of an epoch, which has {there} now'
            runner.logger.warning(f'{words}: it starts anew.')
            return
        epoch = loop.epoch
        run_iter = loop.run_iter
        runner.logger.info(f'{batches} of {of} batches of epoch {epoch + 1} are trained; they are read and left out.')

        def untrained(idx: int, data_batch: DATA_BATCH) -> None:
            if loop.epoch != epoch or idx >= batches:
                run_iter(idx, data_batch)
            elif idx == batches - 1:
                runner.call_hook('after_left_out')  # ReproducibleHook has it

        loop.run_iter = untrained


def _restart_workers(loop: IterBasedTrainLoop) -> None:
    """Restart the data workers of an IterBasedTrainLoop so that they ignore signals.

    mmengine 0.10.7 starts them when it builds the loop.
    """
    first = getattr(loop.dataloader_iterator, '_iterator', None)
    if first is not None and loop.dataloader.num_workers:
        first._shutdown_workers()
        loop.dataloader._iterator = None  # else persistent workers, which are gone, would be used again
        loop.dataloader_iterator._iterator = iter(loop.dataloader)
        # The sampler's endless generator would end with the first iterator.
        loop.first_iterator = first


def _start_shielded(start: Callable[[int], None] | None, worker: int) -> None:
    """Initialise a data worker so that it ignores the signals that a terminal or cluster sends to all processes."""
    if start is not None:
        start(worker)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _end_workers() -> None:
    """Kill data workers that are left at exit, since they ignore the SIGTERM by which multiprocessing ends them."""
    # torch's handler would raise an error for each.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    for process in multiprocessing.active_children():
        if process.daemon:
            process.kill()

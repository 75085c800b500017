"""A hook that saves gates files during training, beside whole checkpoints or instead of them."""

from __future__ import annotations

from pathlib import Path

from mmengine.dist import is_main_process
from mmengine.hooks import CheckpointHook, EMAHook, Hook
from mmengine.hooks.hook import DATA_BATCH
from mmengine.runner import IterBasedTrainLoop, Runner
from torch import Tensor

from mmgate.checkpoints.safetensors_file import check_safetensors
from mmgate.errors import ConfigError
from mmgate.files import gates_content, save_gates
from mmgate.registry import HOOKS


@HOOKS.register_module()
class GatesCheckpointHook(Hook):
    """Hook that saves the gates of the model during training, as ``epoch_N.gates.safetensors`` in the work dir.

    In a loop of iterations the name is ``iter_N.gates.safetensors``.

    Among ``custom_hooks`` it writes beside the whole checkpoints; as ``default_hooks.checkpoint`` it writes instead of
    them, and then the run cannot be resumed.

    Args:
        interval: Epochs (or iterations) from file to file; a file is always written at the end.
        by_epoch: True counts epochs, False iterations; by default as the loop counts.
        max_keep_ckpts: Number of newest files to keep; -1 keeps all.
        **others: Other options of mmengine's CheckpointHook, which a config may inherit; they are refused.

    Raises:
        ConfigError: There are such options, or safetensors is not installed; a rule of the gates fits into no file, or
            everything trains and there are no whole checkpoints (from :meth:`before_train`).
    """

    priority = 'VERY_LOW'  # after hooks that update the weights

    def __init__(
        self,
        interval: int = 1,
        by_epoch: bool | None = None,
        max_keep_ckpts: int = -1,
        **others: object,
    ) -> None:
        if others:
            raise ConfigError(
                f'mmgate.GatesCheckpointHook has no {", ".join(others)}. Where default_hooks.checkpoint inherits that, '
                "write checkpoint=dict(_delete_=True, type='mmgate.GatesCheckpointHook', ...)."
            )
        check_safetensors()
        self.interval = interval
        self.by_epoch = by_epoch
        self.max_keep_ckpts = max_keep_ckpts
        self._written: list[Path] = []

    def before_train(self, runner: Runner) -> None:
        """Find out whether the loop counts epochs, and check that a gates file can hold all that trains."""
        if self.by_epoch is None:
            self.by_epoch = not isinstance(runner.train_loop, IterBasedTrainLoop)
        if gates_content(runner.model).trained == 'all':
            words = (
                'mmgate.GatesCheckpointHook: everything trains, and gates files hold only a part of it. '
                "model.train='gates' or 'attention' trains that part alone."
            )
            if not any(isinstance(hook, CheckpointHook) for hook in runner.hooks):
                raise ConfigError(f"{words} Or keep mmengine's CheckpointHook beside this hook.")
            runner.logger.warning(words)
        # Files from before the run was resumed count, too, and no others.
        unit = 'epoch' if self.by_epoch else 'iter'
        done = runner.epoch if self.by_epoch else runner.iter
        found = {}
        for path in Path(runner.work_dir).glob(f'{unit}_*.gates.safetensors'):
            number = path.name.removeprefix(f'{unit}_').removesuffix('.gates.safetensors')
            if number.isdecimal() and int(number) <= done:
                found[int(number)] = path
        self._written = [found[number] for number in sorted(found)]

    def after_train_epoch(self, runner: Runner) -> None:
        """Save a gates file after an epoch, if the hook counts epochs."""
        if self.by_epoch and (self.every_n_epochs(runner, self.interval) or self.is_last_train_epoch(runner)):
            self._write(runner, f'epoch_{runner.epoch + 1}')

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: DATA_BATCH = None, outputs: dict[str, Tensor] | None = None
    ) -> None:
        """Save a gates file after an iteration, if the hook counts iterations."""
        if not self.by_epoch and (self.every_n_train_iters(runner, self.interval) or self.is_last_train_iter(runner)):
            self._write(runner, f'iter_{runner.iter + 1}')

    def _write(self, runner: Runner, name: str) -> None:
        if not is_main_process():
            return
        averages = [hook for hook in runner.hooks if isinstance(hook, EMAHook)]
        # The file holds the averaged weights, as a whole checkpoint does.
        for hook in averages:
            hook._swap_ema_parameters()  # mmpretrain's hook does more in its public methods, and validates
        path = Path(runner.work_dir) / f'{name}.gates.safetensors'
        try:
            save_gates(runner.model, path)
        finally:
            for hook in averages:
                hook._swap_ema_parameters()
        self._written = [*(other for other in self._written if other != path), path]
        while 0 < self.max_keep_ckpts < len(self._written):
            self._written.pop(0).unlink(missing_ok=True)

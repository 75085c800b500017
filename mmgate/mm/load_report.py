"""Report how much of a model a checkpoint has filled."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.runner import CheckpointLoader, Runner, load_checkpoint
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmgate._environment import log
from mmgate.adapter import unused_names
from mmgate.checkpoints.loading import guarded_loaders
from mmgate.errors import ConfigError, listed
from mmgate.gate import is_gate_key, named_gate_parameters
from mmgate.wrappers import unwrap_model

from .other_options import other_options

COUNTERS = 'num_batches_tracked'  # of batch norms; often left out of checkpoints
OF_TRAINING = ('auxiliary_head', 'dn_query_generator')


class LoadReportHook(Hook):
    """Hook that logs how many of the model's tensors a checkpoint has filled, before training or testing starts.

    A key counts as filled when loading wrote into its tensor, even if it was renamed or resized on loading. Testing
    refuses a checkpoint that fills less than half of the keys. Training may start from one with a warning, for example
    if its head is another, but not from one that fills none. Gates that a vanilla checkpoint leaves as they are do not
    count, nor does what gates replace; the hook warns of gates in a checkpoint that have no place in the model. Testing
    also refuses tensors of other sizes, such as a head of another number of classes, and gates that were trained with
    other options, see :func:`.other_options.other_options`. Sharded models (FSDP, DeepSpeed) are not counted, because
    their state dicts hold other tensors than the model.

    Args:
        checkpoint: Name of the checkpoint in messages.
        allow_mismatch: True allows to test with less than half of the keys, and in spite of tensors of other sizes and
            gates of other options.
        gates: Gates file that is to be tested; the hook warns if the checkpoint has gates, too.

    Raises:
        ConfigError: Too few keys were filled, or others than the model's (from :meth:`before_test` and
            :meth:`before_train`); or the checkpoint of a run that is to be resumed has other gates, gates of other
            options, or nothing but weights (from :meth:`after_load_checkpoint`).
    """

    def __init__(self, checkpoint: str, *, allow_mismatch: bool = False, gates: str | None = None) -> None:
        self.checkpoint = checkpoint
        self.allow_mismatch = allow_mismatch
        self.gates = gates
        self._before: dict[str, tuple[int, int]] = {}
        self._given: list[str] = []
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._other = ''

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the state of each tensor, to see later which ones loading has changed; called before the copy."""
        # mmengine needs these two to resume.
        whole = 'iter' in checkpoint.get('meta', {}) and 'message_hub' in checkpoint
        resumes = getattr(runner, '_resume', False)
        if resumes and not whole:
            raise ConfigError(
                f'{self.checkpoint} holds nothing but weights, so that no run can be resumed from it. '
                f'--cfg-options load_from={self.checkpoint} starts a new run from them.'
            )
        if resumes and 'optimizer' in checkpoint:
            self._refuse_other_gates(runner, checkpoint)
        self._before = _versions(runner.model)
        cfg = getattr(runner, 'cfg', None)
        if self._before:
            self._other = other_options(runner.model, checkpoint, cfg.get('model') if cfg else None)
        if resumes and self._other:
            raise ConfigError(
                f'{self.checkpoint} cannot be resumed, its gates were trained with other options: {self._other}. Give '
                'the options that the run began with, or start a new run from its weights: --cfg-options '
                f'load_from={self.checkpoint}, without --resume.'
            )
        given = checkpoint.get('state_dict', checkpoint)
        self._given = [key for key in given if not key.endswith(COUNTERS)]
        self._shapes = {
            key.removeprefix('module.'): tuple(value.shape) for key, value in given.items() if isinstance(value, Tensor)
        }

    def _refuse_other_gates(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Raise ConfigError if a checkpoint to resume from has other gates, or gates of other sizes.

        torch loads the optimizer's state by its order alone. That of other parameters ends in a fused step's crash, or
        in wrong moments.
        """
        model = unwrap_model(runner.model)
        state = checkpoint.get('state_dict', {})
        keys = model.state_dict().keys()
        other = [
            name
            for name, gate in named_gate_parameters(model)
            if name not in state or state[name].numel() != gate.numel()
        ]
        other += [key for key in state if key not in keys and is_gate_key(key)]
        if other:
            raise ConfigError(
                f'{self.checkpoint} cannot be resumed: these gates are not in it, not in this model, or of another '
                f'size: {listed(other)}. Give the config that the run began with, or start a new run from its '
                f'weights: --cfg-options load_from={self.checkpoint}, without --resume.'
            )

    def before_train(self, runner: Runner) -> None:
        """Log the report; raise an error if the checkpoint fills nothing, and warn if it fills less than half."""
        found, share = self.report(runner)
        if not share:
            raise ConfigError(f'{found}. It is of another model; leave load_from away, or give one of this model.')
        if self._other:
            log(f'{self.checkpoint} has gates that were trained with other options: {self._other}.')
        self.log_report(runner, found, share >= 0.5)

    def before_test(self, runner: Runner) -> None:
        """Log the report; raise an error if the checkpoint fills less than half of the model."""
        found, share = self.report(runner)
        if share < 0.5 and not self.allow_mismatch:
            raise ConfigError(
                f'{found}. The checkpoint is of another model (it starts with {listed(self._given)}); test it with its '
                'own config, or give --allow-mismatch.'
            )
        resized = self.resized(runner)
        if resized and not self.allow_mismatch:
            raise ConfigError(
                f'{found}. Of other sizes in the checkpoint: {listed(resized)}. These stay as they are drawn at '
                'random. Give the checkpoint or the num_classes that belong together, or --allow-mismatch.'
            )
        if self._other and not self.allow_mismatch:
            raise ConfigError(f'{self._trained_otherwise()}, or --allow-mismatch.')
        self.log_report(runner, found, share == 1)
        own = unwrap_model(runner.model)
        if self.gates and not set(self._given).isdisjoint(dict(named_gate_parameters(own))):
            log(
                f'{self.checkpoint} has gates, which replaced those of --gates {self.gates}: the test is of the '
                "checkpoint's. Give the vanilla checkpoint to test the file's.",
                logging.WARNING,
            )

    def _trained_otherwise(self) -> str:
        return (
            f'{self.checkpoint} has gates that were trained with other options: {self._other}. Give the config, or the '
            '--gate, that they were trained with'
        )

    def report(self, runner: Any) -> tuple[str, float]:
        """Return a message on how many tensors were loaded, and their share; empty for a sharded model.

        Gates that were not filled do not count in the share: a vanilla checkpoint in a gated model is whole.
        """
        own = unwrap_model(runner.model)
        keys = _versions(runner.model)
        missing = self.not_loaded(runner)
        if not self._before or not keys:
            return '', 1.0
        found = (
            f'{len(keys) - len(missing)} of {len(keys)} keys of {type(own).__name__} were loaded from '
            f'{self.checkpoint}, which has {len(self._given)}'
        )
        gates = dict(named_gate_parameters(own, remove_duplicate=False)).keys() & missing
        share = (len(keys) - len(missing)) / max(len(keys) - len(gates), 1)
        if gates and (file := vars(own).get('gates_file')):
            found += f'; {len(gates)} of gates are from {file}'
            missing = [key for key in missing if key not in gates]
        found += f'; not loaded: {listed(missing)}' if missing else ''
        unused = unused_names(own)
        return found + (f'; {len(unused)} more rest, which gates replace' if unused else ''), share

    def not_loaded(self, runner: Any) -> list[str]:
        """Return the names of the model's tensors that the checkpoint did not fill."""
        return [key for key, version in _versions(runner.model).items() if self._before.get(key) == version]

    def resized(self, runner: Any) -> list[str]:
        """Return the parameters that the checkpoint has in other sizes and did not fill, unless only training has them.

        Buffers, such as Swin's indices of positions in a window, are those of this model's sizes.
        """
        own = dict(unwrap_model(runner.model).named_parameters(remove_duplicate=False))
        return [
            f'{key} is {self._shapes[key]} instead of {tuple(own[key].shape)}'
            for key in self.not_loaded(runner)
            if key in own and self._shapes.get(key, own[key].shape) != own[key].shape
            if key.partition('.')[0] not in OF_TRAINING
        ]

    def log_report(self, runner: Any, found: str, fits: bool) -> None:
        """Log the message of :meth:`report`, and warn if the checkpoint has gates that the model does not have."""
        if not found:
            return
        log(f'{found}.', logging.INFO if fits else logging.WARNING)
        own = unwrap_model(runner.model)
        keys = own.state_dict().keys()
        dropped = [key for key in self._given if key not in keys and is_gate_key(key)]
        if dropped:
            log(
                f'{self.checkpoint} holds gates for which {type(own).__name__} has no place; their {len(dropped)} '
                f'tensors are left out: {listed(dropped)}. Without them the attention is not the one that was trained; '
                'give the rules of the config that wrote them.',
                logging.WARNING,
            )


def load_weights(model: nn.Module, checkpoint: str, *, whole: bool = False) -> None:
    """Load a checkpoint into a model without a Runner, running no code of the file; log how much it filled.

    Args:
        model: Model.
        checkpoint: File or address.
        whole: True requires every parameter to be filled, except in heads that only training has.

    Raises:
        ConfigError: It fills less than half of the model's keys; or, with ``whole``, it leaves a parameter as it is, or
            its gates were trained with other options than the model's.
        UntrustedCheckpoint: It may run code, see :func:`~mmgate.checkpoints.loading.load_checkpoint_file`.
    """
    hook = LoadReportHook(checkpoint)
    runner = SimpleNamespace(model=model)
    with guarded_loaders():
        hook.after_load_checkpoint(runner, CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu'))
        # mmengine would warn of every gate that a vanilla checkpoint does not have.
        load_checkpoint(model, checkpoint, map_location='cpu', logger='silent')
    found, share = hook.report(runner)
    if resized := hook.resized(runner):
        found += f'. Of other sizes in the checkpoint: {listed(resized)}'
    if share < 0.5:
        raise ConfigError(f'{found}. It is of another model; give the config that it belongs to, or one of this model.')
    if whole and hook._other:
        raise ConfigError(f'{hook._trained_otherwise()}, or --allow-mismatch.')
    if hook._other:
        log(f'{hook._trained_otherwise()}.', logging.WARNING)
    parameters = {name for name, _ in model.named_parameters() if name.partition('.')[0] not in OF_TRAINING}
    if whole and parameters.intersection(hook.not_loaded(runner)):
        raise ConfigError(
            f'{found}. These stay as they are drawn at random. Give the checkpoint or the num_classes that belong '
            'together, or --allow-mismatch.'
        )
    hook.log_report(runner, found, share == 1)


def _versions(model: nn.Module) -> dict[str, tuple[int, int]]:
    if is_model_wrapper(model) and not isinstance(model, DistributedDataParallel):  # the model is sharded
        return {}
    own = unwrap_model(model)
    unused = {*unused_names(own)}
    # torch counts the writes into a tensor in its _version.
    return {
        key: (id(value), value._version)
        for key, value in own.state_dict(keep_vars=True).items()
        if isinstance(value, Tensor) and not key.endswith(COUNTERS) and key not in unused
    }

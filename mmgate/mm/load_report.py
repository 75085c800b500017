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
        gates: Gates file that the model has; the hook warns if the checkpoint has gates, too.

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
        self._given: dict[str, Any] = {}
        self._other = ''

    def after_load_checkpoint(self, runner: Any, checkpoint: dict[str, Any]) -> None:
        """Keep the state of each tensor, to see later which ones loading has changed; called before the copy."""
        given = checkpoint.get('state_dict', checkpoint)
        self._given = {key.removeprefix('module.'): x for key, x in given.items() if not key.endswith(COUNTERS)}
        self._before = _versions(runner.model)
        cfg = getattr(runner, 'cfg', None)
        if self._before:
            self._other = other_options(runner.model, checkpoint, cfg.get('model') if cfg else None)
        if getattr(runner, '_resume', False):
            self._refuse_to_resume(unwrap_model(runner.model), checkpoint)

    def _refuse_to_resume(self, model: nn.Module, checkpoint: dict[str, Any]) -> None:
        start = f'--cfg-options load_from={self.checkpoint}, without --resume, starts a new run from its weights.'
        # mmengine needs these two to resume.
        if 'iter' not in checkpoint.get('meta', {}) or 'message_hub' not in checkpoint:
            raise ConfigError(f'{self.checkpoint} holds nothing but weights, so that no run can be resumed. {start}')
        if 'optimizer' in checkpoint:
            # torch loads the optimizer's state by its order alone. That of other parameters ends in a fused step's
            # crash, or in wrong moments.
            keys = model.state_dict().keys()
            counts = {key: x.numel() for key, x in self._given.items() if isinstance(x, Tensor)}
            other = [name for name, gate in named_gate_parameters(model) if counts.get(name) != gate.numel()]
            other += [key for key in self._given if key not in keys and is_gate_key(key)]
            if other:
                raise ConfigError(
                    f'{self.checkpoint} cannot be resumed: these gates are not in it, not in this model, or of another '
                    f'size: {listed(other)}. Give the config that the run began with. {start}'
                )
        if self._other:
            raise ConfigError(
                f'{self.checkpoint} cannot be resumed, its gates were trained with other options: {self._other}. Give '
                f'the options that the run began with. {start}'
            )

    def before_train(self, runner: Runner) -> None:
        """Log the report; raise an error if the checkpoint fills nothing, and warn if it fills less than half."""
        found, share = self.report(runner.model)
        if not share:
            raise ConfigError(f'{found}. It is of another model; leave load_from away, or give one of this model.')
        if self._other:
            log(f'{self.checkpoint} has gates that were trained with other options: {self._other}.')
        self._log(runner.model, found, share >= 0.5)

    def before_test(self, runner: Runner) -> None:
        """Log the report; raise an error if the checkpoint does not fit the model."""
        found, share = self.report(runner.model)
        faults = self.faults(runner.model)
        if faults and not self.allow_mismatch:
            raise ConfigError(f'{found}. {faults[0]}, or give --allow-mismatch.')
        self._log(runner.model, '. '.join([found, *faults]), share == 1 and not faults)

    def faults(self, model: nn.Module, *, whole: bool = False) -> list[str]:
        """Return the reasons for which a checkpoint does not fit the model, without a full stop.

        Args:
            model: The model.
            whole: True requires every parameter to be filled, except in heads that only training has. False requires
                it of those that the checkpoint has in other sizes. Buffers, such as Swin's indices of positions in a
                window, may be of this model's sizes.
        """
        own = unwrap_model(model)
        found = []
        if self.report(model)[1] < 0.5:
            found.append(f'It is of another model (it starts with {listed(list(self._given))}); give one of this model')
        parameters = dict(own.named_parameters(remove_duplicate=False))
        empty = [
            key for key in self.not_loaded(model) if key.partition('.')[0] not in OF_TRAINING and key in parameters
        ]
        shapes = {key: tuple(getattr(self._given.get(key), 'shape', parameters[key].shape)) for key in empty}
        resized = [key for key in empty if shapes[key] != tuple(parameters[key].shape)]
        if resized or (whole and empty):
            sizes = [f'{key} is {shapes[key]} instead of {tuple(parameters[key].shape)}' for key in resized]
            of_sizes = f'Of other sizes in the checkpoint: {listed(sizes)}. ' if sizes else ''
            found.append(
                f'{of_sizes}What is not loaded stays as it is drawn at random. Give the checkpoint or the num_classes '
                'that belong together'
            )
        if self._other:
            found.append(
                f'Its gates were trained with other options: {self._other}. Give the config, or the --gate, that they '
                'were trained with'
            )
        return found

    def report(self, model: nn.Module) -> tuple[str, float]:
        """Return a message on how many tensors were loaded, and their share; empty for a sharded model.

        Gates that were not filled do not count in the share: a vanilla checkpoint in a gated model is whole.
        """
        own = unwrap_model(model)
        keys = _versions(model)
        missing = self.not_loaded(model)
        if not self._before or not keys:
            return '', 1.0
        loaded = len(keys) - len(missing)
        found = (
            f'{loaded} of {len(keys)} keys of {type(own).__name__} were loaded from {self.checkpoint}, which has '
            f'{len(self._given)}'
        )
        gates = dict(named_gate_parameters(own, remove_duplicate=False)).keys() & missing
        if gates and (file := vars(own).get('gates_file')):
            found += f'; {len(gates)} of gates are from {file}'
            missing = [key for key in missing if key not in gates]
        found += f'; not loaded: {listed(missing)}' if missing else ''
        unused = unused_names(own)
        found += f'; {len(unused)} more rest, which gates replace' if unused else ''
        return found, loaded / max(len(keys) - len(gates), 1)

    def not_loaded(self, model: nn.Module) -> list[str]:
        """Return the names of the model's tensors that the checkpoint did not fill."""
        return [key for key, version in _versions(model).items() if self._before.get(key) == version]

    def _log(self, model: nn.Module, found: str, fits: bool) -> None:
        """Log the message of :meth:`report`, and warn of gates in the checkpoint that the model has no place for."""
        if not found:
            return
        log(f'{found}.', logging.INFO if fits else logging.WARNING)
        own = unwrap_model(model)
        keys = own.state_dict().keys()
        dropped = [key for key in self._given if key not in keys and is_gate_key(key)]
        if dropped:
            log(
                f'{self.checkpoint} holds gates for which {type(own).__name__} has no place; their {len(dropped)} '
                f'tensors are left out: {listed(dropped)}. Without them the attention is not the one that was trained; '
                'give the rules of the config that wrote them.',
                logging.WARNING,
            )
        if self.gates and not self._given.keys().isdisjoint(dict(named_gate_parameters(own))):
            log(
                f'{self.checkpoint} has gates, which replaced those of --gates {self.gates}. Give the vanilla '
                "checkpoint to have the file's.",
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
    with guarded_loaders():
        content = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
        hook.after_load_checkpoint(SimpleNamespace(model=model), content)
        # mmengine would warn of every gate that a vanilla checkpoint does not have.
        load_checkpoint(model, checkpoint, map_location='cpu', logger='silent')
    found, share = hook.report(model)
    faults = hook.faults(model, whole=whole)
    if faults and (whole or share < 0.5):
        raise ConfigError(f'{found}. {faults[0]}{", or give --allow-mismatch" if whole else ""}.')
    hook._log(model, '. '.join([found, *faults]), share == 1 and not faults)


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

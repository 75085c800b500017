"""Check that the gates and the optimizer in a checkpoint to resume from are those of the config."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from mmengine.runner import Runner

from mmgate._environment import log
from mmgate.checkpoints.plain_config import literal_setting
from mmgate.errors import ConfigError, listed
from mmgate.finetune import gate_parameters
from mmgate.finetune.training import frozen_parameters
from mmgate.layers.base.gate import is_gate_key
from mmgate.wrappers import unwrap_model

from .config_file import differences
from .parameter_groups import groups_for, sizes


def refuse_other_run(runner: Runner, checkpoint: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError if a checkpoint to resume from has other gates or optimizer groups than this run.

    Rules that have changed and still fit are warned of, and so is another ``train``. The optimizer's state of what it
    freezes is taken out of the checkpoint.

    The optimizer's state would belong to other tensors; torch's error, at times only at the first step, names none.

    Args:
        runner: mmengine's Runner, its model and optimizer built and nothing loaded.
        checkpoint: Checkpoint of the run that is to be resumed.
        source: Its file or address.

    Raises:
        ConfigError: It does not fit; the message has the settings of model and optimizer that changed since.
    """
    problem = _other_gates(runner, checkpoint) or _other_groups(runner, checkpoint)
    changed = sorted(_changed(runner, checkpoint), key=lambda one: not _is_of_rules(one))
    if problem:
        since = f' Changed since: {listed(changed, separator="; ")}.' if changed else ''
        raise ConfigError(
            f'{source} cannot be resumed: {problem}.{since} Give the config that the run began with, or start a new '
            f'run from its weights: --cfg-options load_from={source}, without --resume.'
        )
    dropped = _drop_state_of_frozen(runner, checkpoint)
    trains = [one for one in changed if _is_of_train(one)]
    if trains:
        log(
            f'{source} is of a run in which other parameters trained, {"; ".join(trains)}. Parameters that train anew '
            'start without a state of the optimizer'
            + (f', and that of the {dropped} now frozen is dropped.' if dropped else '.'),
            logging.WARNING,
        )
    rules = [one for one in changed if _is_of_rules(one)]
    if rules:
        log(
            f'{source} was trained by other rules, and the run goes on by new ones: {"; ".join(rules)}.',
            logging.WARNING,
        )


def _other_gates(runner: Runner, checkpoint: Mapping[str, Any]) -> str:
    """Return a message on the first gate that differs between checkpoint and model, or an empty text."""
    state = checkpoint.get('state_dict', {})
    model = unwrap_model(runner.model)
    if 'optimizer' not in checkpoint:
        return ''
    for name, gate in gate_parameters(model).items():
        if name not in state:
            return f'it has no {name}'
        if state[name].numel() != gate.numel():
            return f'{name} is {tuple(state[name].shape)} in it and {tuple(gate.shape)} in this model'
    keys = model.state_dict().keys()
    dropped = next((key for key in state if key not in keys and is_gate_key(key)), '')
    return f'it has {dropped}, and this model has no such gate' if dropped else ''


def _other_groups(runner: Runner, checkpoint: Mapping[str, Any]) -> str:
    """Return a message if the optimizer's parameter groups differ from the checkpoint's, or an empty text."""
    state = checkpoint.get('optimizer')
    optimizer = _optimizer_of(runner)
    given = state.get('param_groups') if isinstance(state, Mapping) else None
    if state is None or optimizer is None or not given or not getattr(optimizer, 'param_groups', None):
        return ''
    if groups_for(optimizer, state) is not None:
        return ''
    counts = sizes(given), sizes(optimizer.param_groups)
    there, here = [f'{sum(count)} parameters in {len(count)} groups' for count in counts]
    return f"its optimizer has {there}, this run's {here}"


def _changed(runner: Runner, checkpoint: Mapping[str, Any]) -> list[str]:
    """Return the settings of model and optimizer in which the config differs from the checkpoint's."""
    before = checkpoint.get('meta', {}).get('cfg')
    if not isinstance(before, str) or not hasattr(runner, 'cfg'):
        return []
    found: list[str] = []
    for name in ('model', 'optim_wrapper'):
        there, here = (literal_setting(text, name) for text in (before, runner.cfg.pretty_text))
        if there is not None and here is not None:
            found += differences(there, here, name)
    return [one for one in found if not one.partition(':')[0].endswith('.backend')]  # of the machine, not of the run


def _drop_state_of_frozen(runner: Runner, checkpoint: Mapping[str, Any]) -> int:
    """Remove the optimizer's state of parameters that ``train`` has frozen from a checkpoint; return their number."""
    saved = checkpoint.get('optimizer')
    optimizer = _optimizer_of(runner)
    if optimizer is None or not isinstance(saved, Mapping) or not saved.get('state'):
        return 0
    groups = groups_for(optimizer, saved) or []
    model = unwrap_model(runner.model)
    frozen = {id(model.get_parameter(name)) for name in frozen_parameters(model)}
    dropped = 0
    # As in torch, the numbers of the state count through the groups' parameters.
    for before, now in zip(saved['param_groups'], groups, strict=True):
        for number, parameter in zip(before['params'], now['params'], strict=True):
            dropped += id(parameter) in frozen and saved['state'].pop(number, None) is not None
    return dropped


def _optimizer_of(runner: Runner) -> Any:
    """Return a runner's optimizer; None if it has no single one."""
    return getattr(getattr(runner, 'optim_wrapper', None), 'optimizer', None)


def _is_of_train(setting: str) -> bool:
    """Return True if a changed setting is what trains; ``train='all'`` is the default."""
    name, _, values = setting.partition(': ')
    return name.endswith('.train') and set(values.split(' -> ')) != {'not set', "'all'"}


def _is_of_rules(setting: str) -> bool:
    return 'attention' in setting.partition(':')[0].split('.')

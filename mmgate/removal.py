"""Switch the gates of a model off for a while, or remove them."""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager

import torch
from torch import nn

from mmgate._environment import log
from mmgate.adapter import gated_modules
from mmgate.errors import ConfigError, listed
from mmgate.gating import gates_off, refuse_removal, remove_gate
from mmgate.hosts.torch import switch_nested_tensors
from mmgate.start import unwrap_init_weights
from mmgate.wrappers import own_model, without_wrappers

from .training import unfreeze

TORCH = tuple(int(part) for part in torch.__version__.split('.')[:2])
# The oldest torch whose compiled graphs depend on what a thread has switched off.
OLDEST = (2, 7)


def restore_attention(model: nn.Module) -> list[str]:
    """Make a gated model vanilla again: remove its gates; all other parameters keep their trained values.

    A warning names the unused parameters of hosts that no checkpoint has filled.

    Returns:
        The names of the modules that rules chose, one for each that layers share; none if nothing is gated.

    Raises:
        ConfigError: Something was put around a gated module after its gating (FSDP, a parametrization, a replaced
            method); undo that first. The model is then as it was.
    """
    model = own_model(model)
    gated = list(gated_modules(model))
    for name, module in gated:
        refuse_removal(name, module)
    for part in model.modules():
        unfreeze(part)
        release_trained(part)
        unwrap_init_weights(part)
        vars(part).pop('gates_file', None)
    lacking = []
    names = []
    for name, module in gated:
        lacking += [f'{name}.{one}' for one in module.gating.lacks]
        names.append(module.gating.chosen_name(without_wrappers(name)))
        remove_gate(module)
    switch_nested_tensors(model)
    if lacking:
        log(
            f'mmgate: no checkpoint has filled {listed(lacking)}, which gates have replaced: they are as '
            'the model was initialised.',
            logging.WARNING,
        )
    return names


def gates_disabled(model: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the gates of a model are off in this thread, so that it computes as the vanilla model.

    The model stays as it is, with its gates in ``parameters()`` and state dicts, and other threads run it gated. A copy
    that is made in the context is gated.
    torch's ``TransformerEncoder`` packs no nested tensors while it has gates, even if they are off: its output for
    padded tokens is then not 0. timm's attention has no attribute ``gate`` inside, so that ``torch.export`` and
    ``torch.func.functional_call`` find no module of this name: give them a copy of the model, after
    :func:`restore_attention`.

    A gated module that is off raises RuntimeError inside activation checkpointing with gradients: the part would be
    computed again later, with its gate on.

    Raises:
        ConfigError: A module is compiled, and torch is older than 2.7, whose graphs do not ask for a thread's gates.
    """
    compiled = None
    if TORCH < OLDEST:
        compiled = next((name for name, part in model.named_modules() if _is_compiled(part)), None)
    if compiled is not None:
        raise ConfigError(
            f'{compiled or "the model"} is compiled, and graphs of torch {TORCH[0]}.{TORCH[1]} run with gates in '
            'gates_disabled; run the model that is not compiled there, or torch 2.7 or newer.'
        )
    return gates_off(model)


def _is_compiled(module: nn.Module) -> bool:
    return hasattr(module, '_orig_mod') or getattr(module, '_compiled_call_impl', None) is not None


def release_trained(model: nn.Module) -> None:
    """Stop protecting the tensors that a gates file has filled: checkpoints and initialisation may fill them again."""
    vars(model).pop('after_init_weights', None)
    vars(model).pop('gates_file_tensors', None)
    handle = vars(model).pop('gates_file_hook', None)
    if handle is not None:
        handle.remove()

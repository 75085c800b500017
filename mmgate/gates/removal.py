"""Gates left out for a while, or taken off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager

from torch import nn

from mmgate.weight_init import standing_swaps

from .training import unfreeze

SWAPPED = ('attention_swaps', 'attention_rules', 'gates_file', 'init_weights', 'apply')  # what a swap leaves on a model


def restore_attention(model: nn.Module) -> list[str]:
    """Put the vanilla modules back, in ``model`` and in the modules inside, with what they share with the gates.

    A gate that no longer stands where it was put, because someone wrapped or removed it, is left as it is.

    Returns:
        The names of the modules; none if nothing is swapped.

    Raises:
        ValueError: A parameter that was shared is gone (LoRA, parametrizations); nothing is restored.
    """
    return restore(dict(model.named_modules()))


@contextmanager
def gates_disabled(model: nn.Module) -> Iterator[None]:
    """Let the vanilla modules compute in the place of the gates, with what they share as it is.

    Attention that is no host's, such as DGViT's, stays. A mode that the model is given meanwhile is the gates', too,
    afterwards; another device or dtype is to be given before or after.
    """
    with ExitStack() as undo:
        for holder in list(model.modules()):
            for swap in standing_swaps(holder):
                undo.enter_context(swap.disabled(holder))
        yield


def restore(modules: Mapping[str, nn.Module]) -> list[str]:
    """Put the vanilla modules back in these modules and not in those inside; see :func:`restore_attention`."""
    standing = {prefix: standing_swaps(module) for prefix, module in modules.items()}
    for swaps in standing.values():
        for swap in swaps:  # all can be restored, or none is
            swap.follow()
    for module in modules.values():
        unfreeze(module)
        forget_trained(module)
    names = []
    for prefix, swaps in standing.items():
        for swap in reversed(swaps):
            swap.put_vanilla(modules[prefix])
        for name in SWAPPED if 'attention_swaps' in vars(modules[prefix]) else ():
            vars(modules[prefix]).pop(name, None)
        names += [f'{prefix}.{swap.name}'.lstrip('.') for swap in swaps]
    return names


def forget_trained(model: nn.Module) -> None:
    """Let a checkpoint that is loaded, or an initialisation, from now on fill what a file of gates had filled."""
    vars(model).pop('after_init_weights', None)
    handle = vars(model).pop('gates_file_hook', None)
    if handle is not None:
        handle.remove()

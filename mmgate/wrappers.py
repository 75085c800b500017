"""Find a model, its modules, and names of its tensors inside wrappers such as DistributedDataParallel and PEFT's."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mmgate.errors import ConfigError

SHARDED = '_fsdp_wrapped_module'
# Names of the only child in wrappers around parts of a model: of torch.compile, activation checkpointing and FSDP.
WRAPPED = ('_orig_mod', '_checkpoint_wrapped_module', SHARDED)
# Further ones around a whole model: of DDP, averages and test-time augmentation. Other modules use this name, too.
WRAPPED_CHILDREN = ('module', *WRAPPED)
# Classes of PEFT that hold a model, and the name of the child.
MODELS_OF_PEFT = {'PeftModel': 'base_model', 'PeftMixedModel': 'base_model', 'BaseTuner': 'model'}
# Classes of PEFT that hold a layer and adapters of it, and the name of the child that is the layer.
LAYERS_OF_PEFT = {'BaseTunerLayer': 'base_layer', 'AuxiliaryTrainingWrapper': 'original_module'}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel, torch.compile, EMA or PEFT; else the model.

    A wrapper is a module with one child of a name in :data:`WRAPPED_CHILDREN`, or one of PEFT's.
    """
    while True:
        model = own_model(model)
        children = {name: child for name, child in model.named_children() if name != 'data_preprocessor'}
        if len(children) != 1 or not children.keys() <= set(WRAPPED_CHILDREN):
            return model
        (model,) = children.values()


def own_model(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel or a wrapper with a child of a name in :data:`WRAPPED`; else the model."""
    while child := _child_by_class(model, MODELS_OF_PEFT) or _wrapped_child(model):
        model = model.get_submodule(child)
    return model


def named_parts(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each module of a model by each of its names, as if there were no wrappers of :data:`WRAPPED` in it."""
    for name, module in model.named_modules(remove_duplicate=False):
        if _wrapped_child(module) is None:
            yield '.'.join(part for part in name.split('.') if part not in WRAPPED), module


def named_part(model: nn.Module, name: str) -> nn.Module:
    """Return the module that :func:`named_parts` gives this name; torch's wrappers hand on the names inside them."""
    return own_model(model.get_submodule(name))


def refuse_sharded(model: nn.Module, reason: str) -> None:
    """Raise ConfigError with a reason if FSDP or another parallelism has cut a model's parameters into shards."""
    cut = any(hasattr(parameter, 'full_tensor') for parameter in model.parameters())  # a DTensor, as fully_shard makes
    if cut or any(SHARDED in name for name, _ in model.named_modules()):
        raise ConfigError(f'a sharded model (FSDP, fully_shard) {reason}')


def refuse_replicated(model: nn.Module) -> None:
    """Raise ConfigError if DistributedDataParallel, which averages the gradients that it found first, is in a model."""
    if any(isinstance(part, DistributedDataParallel) for part in model.modules()):
        raise ConfigError(
            'a model in DistributedDataParallel takes no gates: it averages the gradients of those parameters that '
            'were there when it was made, so that gates would differ between processes. Gate the model first, then '
            'wrap it.'
        )


def model_to_gate(model: nn.Module) -> nn.Module:
    """Return the model that gates can be put into, inside wrappers such as PEFT's.

    Raises:
        ConfigError: It is sharded or in DistributedDataParallel, which would not know of its gates.
    """
    refuse_sharded(model, 'takes no gates, which would not be sharded with it; gate the model first, then shard it.')
    refuse_replicated(model)
    return own_model(model)


def vanilla_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict as it would be without wrappers: under vanilla names, without PEFT's tensors.

    The tensors are those of the model, parameters included. What else modules keep there, quantised weights for
    instance, is left out.
    """
    state = model.state_dict(keep_vars=True)
    names = vanilla_names(model).items()
    return {vanilla: state[name] for name, vanilla in names if isinstance(state[name], Tensor)}


def vanilla_names(model: nn.Module) -> dict[str, str]:
    """Return the vanilla name of each tensor in a model's state dict, without the tensors that PEFT adds."""
    names = {name: vanilla_name(model, name) for name in model.state_dict(keep_vars=True)}
    return {name: vanilla for name, vanilla in names.items() if vanilla is not None}


def vanilla_name(model: nn.Module, name: str) -> str | None:
    """Return the name that a tensor or module has without wrappers, or None if PEFT has added it.

    Args:
        model: A model with wrappers around its parts.
        name: A name in the model or in its state dict, from which torch leaves out some wrappers.
    """
    kept = []
    module: nn.Module | None = model
    for part in name.split('.'):
        if part in WRAPPED:
            continue
        while module is not None and (child := _wrapped_child(module)):
            module = module._modules[child]
        layer = None if module is None else _child_by_class(module, LAYERS_OF_PEFT)
        if layer is None:
            kept.append(part)
        elif part != layer:
            return None
        module = None if module is None else module._modules.get(part)
    return '.'.join(kept)


def name_in_states(name: str) -> str:
    """Return a parameter's name as state dicts have it, from which torch leaves out activation checkpointing."""
    return name.replace('_checkpoint_wrapped_module.', '')


def without_wrappers(name: str) -> str:
    """Return the name of a module or parameter without the parts that wrappers in the model have added to it.

    It is the same before and after a wrapper or a layer of PEFT's is put around the module or taken off.
    """
    added = (*WRAPPED, *LAYERS_OF_PEFT.values())
    return '.'.join(part for part in name.split('.') if part not in added)


def _wrapped_child(module: nn.Module) -> str | None:
    """Return the name of the module that one of torch's wrappers holds, or None for any other module."""
    names = tuple(module._modules)
    return names[0] if len(names) == 1 and names[0] in WRAPPED else None


def _child_by_class(module: nn.Module, known: dict[str, str]) -> str | None:
    """Look a module's class up among PEFT's layers, and return the name of the child that it wraps."""
    for base in type(module).__mro__:
        if base.__module__.partition('.')[0] == 'peft' and base.__name__ in known:
            return known[base.__name__]
    return None

"""Find a model, and names of its tensors, inside wrappers such as DistributedDataParallel and PEFT's."""

from __future__ import annotations

from torch import Tensor, nn

SHARDED = '_fsdp_wrapped_module'
# Names of the child in wrappers: of DDP, averages and test-time augmentation; of torch.compile; of FSDP.
INSIDE = ('module', '_orig_mod', SHARDED)
# Classes of PEFT that hold a model, and the name of the child.
MODELS_OF_PEFT = {'PeftModel': 'base_model', 'PeftMixedModel': 'base_model', 'BaseTuner': 'model'}
# Classes of PEFT that hold a layer and adapters of it, and the name of the child that is the layer.
LAYERS_OF_PEFT = {'BaseTunerLayer': 'base_layer', 'AuxiliaryTrainingWrapper': 'original_module'}


def unwrap_model(model: nn.Module) -> nn.Module:
    """Return the model inside wrappers such as DistributedDataParallel, torch.compile, EMA or PEFT; else the model.

    A wrapper is a module with one child of a name in :data:`INSIDE`, or one of PEFT's.
    """
    while True:
        model = inside_peft(model)
        children = {name: child for name, child in model.named_children() if name != 'data_preprocessor'}
        if len(children) != 1 or not children.keys() <= set(INSIDE):
            return model
        (model,) = children.values()


def inside_peft(model: nn.Module) -> nn.Module:
    """Return the model inside a PeftModel, or the model itself if it is not PEFT's."""
    while child := _child_by_class(model, MODELS_OF_PEFT):
        model = model.get_submodule(child)
    return model


def vanilla_state(model: nn.Module) -> dict[str, Tensor]:
    """Return a model's state dict as it would be without PEFT: under vanilla names, without PEFT's tensors.

    The tensors are those of the model, parameters included.
    """
    state = model.state_dict(keep_vars=True)
    return {vanilla: state[name] for name, vanilla in vanilla_names(model).items()}


def vanilla_names(model: nn.Module) -> dict[str, str]:
    """Return the vanilla name of each tensor in a model's state dict, without the tensors that PEFT adds."""
    names = {name: vanilla_name(model, name) for name in model.state_dict(keep_vars=True)}
    return {name: vanilla for name, vanilla in names.items() if vanilla is not None}


def vanilla_name(model: nn.Module, name: str) -> str | None:
    """Return the name that a tensor or module has without PEFT, or None if PEFT has added it."""
    kept = []
    module: nn.Module | None = model
    for part in name.split('.'):
        layer = None if module is None else _child_by_class(module, LAYERS_OF_PEFT)
        if layer is None:
            kept.append(part)
        elif part != layer:
            return None
        module = None if module is None else module._modules.get(part)
    return '.'.join(kept)


def without_layers_of_peft(name: str) -> str:
    """Return a module's name without the parts that PEFT's wrapping layers have added to it.

    It is the same before and after a layer around the module is put there or taken off.
    """
    return '.'.join(part for part in name.split('.') if part not in LAYERS_OF_PEFT.values())


def _child_by_class(module: nn.Module, known: dict[str, str]) -> str | None:
    """Look a module's class up among PEFT's layers, and return the name of the child that it wraps."""
    for base in type(module).__mro__:
        if base.__module__.partition('.')[0] == 'peft' and base.__name__ in known:
            return known[base.__name__]
    return None

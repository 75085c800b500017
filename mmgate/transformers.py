"""Load models of the package transformers with gates in them.

:func:`mmgate.swap_attention` and the functions for gates as adapters work on any model of transformers' as they do on
mm models. This module adds ``from_pretrained``, which only transformers has.
"""

from __future__ import annotations

import os
from typing import Any

from torch import nn

from mmgate.adapter import gated_modules
from mmgate.errors import OptionError
from mmgate.gate import Gate
from mmgate.rules import Rules
from mmgate.start import initialise_again
from mmgate.swap import swap_attention


def from_pretrained(model_class: type[nn.Module], path: str | os.PathLike[str], rules: Rules, **options: Any) -> Any:
    """Load a model of transformers with gates in it, from a vanilla checkpoint or one that has the gates.

    Args:
        model_class: The model's own class, such as ``transformers.DeformableDetrForObjectDetection``.
        path: Name or folder, as ``model_class.from_pretrained`` takes it.
        rules: Of :func:`mmgate.swap_attention`.
        **options: Of ``model_class.from_pretrained``; with ``output_loading_info=True`` its report comes second.

    Returns:
        The model, an instance of ``model_class``. Gates that the checkpoint lacks start by ``init`` of their rule.

    Raises:
        OptionError: ``model_class`` is no model, as the classes ``AutoModel...``, or a rule is malformed.
        ConfigError: The rules do not fit the model, see :func:`mmgate.swap_attention`.
    """
    if not issubclass(model_class, nn.Module):
        raise OptionError(f'{model_class.__name__} is no model; give the class of the model itself.')

    def build(self: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, *args, **kwargs)
        swap_attention(self, rules)

    wanted = options.pop('output_loading_info', False)
    gated = type(model_class.__name__, (model_class,), dict(__init__=build, __module__=model_class.__module__))
    model, info = gated.from_pretrained(path, output_loading_info=True, **options)  # type: ignore[attr-defined]
    model.__class__ = model_class
    _start_gates(model, set(info['missing_keys']))
    return (model, info) if wanted else model


def _start_gates(model: nn.Module, missing: set[str]) -> None:
    """Initialise the gates that a checkpoint lacks, because transformers leaves their memory uninitialised."""
    for name, module in model.named_modules():
        own = {f'{name}.{key}' for key, _ in module.named_parameters()}
        if isinstance(module, Gate):
            module.loaded = not missing & own
    for _, module in gated_modules(model):
        initialise_again(module)

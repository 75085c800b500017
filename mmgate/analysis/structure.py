"""Build a config's model without weights, to list its modules in little time and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.overrides import TorchFunctionMode

from mmgate.errors import ConfigError
from mmgate.gates.base.deformable import DeformableGate
from mmgate.gates.base.map import IMAGE_SIDE
from mmgate.hosts.from_model import needs_image_size
from mmgate.listing import Attention, list_attention
from mmgate.mm.config_file import package_of
from mmgate.registry import MODELS as MMGATE_MODELS
from mmgate.rules import gate_named, path_regex, write_rule

__all__ = ['Attention', 'NoLanguageModel', 'build_structure', 'list_attention', 'rules_to_paste']


def build_structure(cfg: Config) -> nn.Module:
    """Build a config's model with most parameters on the device ``meta``, to read its modules' names and sizes.

    Raises:
        ConfigError: There is no model in it, or the model cannot be built.
    """
    if 'model' not in cfg:
        raise ConfigError(f'config {cfg.filename} has no model.')
    init_default_scope(package_of(cfg) or 'mmdet')
    model = {**cfg.model, **_apart(cfg.model)}
    try:
        try:
            with _EmptyOnMeta():
                # Hosts write into the config that they are built from.
                return MODELS.build(deepcopy(model))
        except (RuntimeError, TypeError):  # the model computes with its weights
            return MODELS.build(deepcopy(model))
    except (AssertionError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f'the model of {cfg.filename} cannot be built: {type(error).__name__}: {error}') from error


def rules_to_paste(
    model: nn.Module, listed: Sequence[Attention], image_size: int | Sequence[int] = IMAGE_SIDE
) -> dict[str, str]:
    """Suggest a rule for each attention that has no gate and that a gate fits, as text to paste after ``--gate``.

    The rule's type is the first that fits, has a gate and starts as the vanilla attention, or else the first that fits.
    Numbers in the path are replaced by ``*``, unless this type does not fit all modules that the pattern matches.

    Args:
        model: The model.
        listed: Its attention, see :func:`list_attention`.
        image_size: Size of the images in pre-training, for a gate that needs it where the model does not keep it.

    Returns:
        The texts by the attention's path.
    """
    gated = [row.path for row in listed if row.gate]

    def is_taken(path: str) -> bool:
        """Return True if this module, one around it or one inside it has a gate already."""
        return any(f'{path}.'.startswith(f'{other}.') or other.startswith(f'{path}.') for other in gated)

    free = {row.path: row for row in listed if row.gates and not is_taken(row.path)}
    names = [name for name, _ in model.named_modules(remove_duplicate=False)]
    texts = {}
    for path, row in free.items():
        rule_type = max(row.gates, key=_starts_as_vanilla)
        pattern = '.'.join('*' if name.isdigit() else name for name in path.split('.'))
        matched = [name for name in names if path_regex(pattern).fullmatch(name)]
        alike = all(name in free and rule_type in free[name].gates for name in matched)
        needed = needs_image_size(model, path, gate_named(rule_type, ''), {})
        texts[path] = write_rule(
            dict(path=pattern if alike else path, type=rule_type, **(dict(image_size=image_size) if needed else {}))
        )
    return texts


def _starts_as_vanilla(rule_type: str) -> bool:
    gate = gate_named(rule_type, '')
    # The base of deformable gates changes nothing at all.
    return gate.identity_start and gate is not DeformableGate


def _apart(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return replacements for parts of a model's config that need downloads or packages and hold no attention.

    They are the data preprocessor, which mmseg refuses in two configs; a teacher, a language model, a backbone of timm
    and StrongSORT's post-processing model, whose weights would be downloaded; activation checkpointing, for which
    Grounding DINO imports fairscale.
    """
    beside = ('data_preprocessor', 'teacher_ckpt', 'postprocess_model')
    apart: dict[str, Any] = {key: None for key in beside if key in model}
    if (model.get('backbone') or {}).get('pretrained') is True:
        apart['backbone'] = {**model['backbone'], 'pretrained': False}
    if (model.get('data_preprocessor') or {}).get('type') == 'ReIDDataPreprocessor':
        # Without one mmpretrain's classifier builds its own, which mmdet does not find.
        del apart['data_preprocessor']
    if 'language_model' in model:
        apart['language_model'] = dict(type='mmgate.NoLanguageModel')
    if 'num_cp' in (model.get('encoder') or {}):
        apart['encoder'] = {**model['encoder'], 'num_cp': 0}
    return apart


@MMGATE_MODELS.register_module()
class NoLanguageModel(nn.Module):
    """Stand-in for a vision-language detector's language model: it has the width of BERT's features, and no weights."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Module()
        body.language_dim = 768  # type: ignore[assignment]
        self.language_backbone = nn.ModuleDict(dict(body=body))


class _EmptyOnMeta(TorchFunctionMode):
    """Mode in which ``torch.empty``, with which layers make parameters, and no other function returns meta tensors.

    Under ``torch.device('meta')`` all tensors would be without values, and models read their drop path rates from one.
    """

    def __torch_function__(
        self, func: Callable, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, 'device': 'meta'} if func is torch.empty else kwargs))

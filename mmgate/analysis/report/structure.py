"""What a config's model is made of, without the time and memory that its weights would take."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn
from torch.overrides import TorchFunctionMode

from mmgate.errors import ConfigError
from mmgate.hosts import gates_for
from mmgate.layers.base.gated import GatedModule, host_class
from mmgate.registry import MODELS as MMGATE_MODELS
from mmgate.swap import attention_modules, names_of_gates

SIZES = ('embed_dims', 'embed_dim', 'num_heads', 'num_levels', 'num_points', 'window_size', 'sr_ratio')


def build_structure(cfg: Config) -> nn.Module:
    """Build a config's model for its modules' names, classes and sizes: most parameters hold no values.

    Raises:
        ConfigError: There is no model in it, or the model cannot be built.
    """
    if 'model' not in cfg:
        raise ConfigError(f'config {cfg.filename} has no model.')
    init_default_scope(cfg.get('default_scope') or 'mmdet')
    model = {**cfg.model, **_apart(cfg.model)}
    try:
        try:
            with _EmptyOnMeta():
                return MODELS.build(deepcopy(model))  # hosts write into the config that they build from
        except (RuntimeError, TypeError):  # the model computes with its weights
            return MODELS.build(deepcopy(model))
    except (AssertionError, ImportError, KeyError, OSError, RuntimeError, TypeError, ValueError) as error:
        raise ConfigError(f'the model of {cfg.filename} cannot be built: {type(error).__name__}: {error}') from error


@dataclass(frozen=True)
class Attention:
    """An attention in a model.

    Attributes:
        path: Its name.
        kind: The name of its class, of a gated one that of its host.
        sizes: Those of :data:`SIZES` that it has.
        gates: What rules may name as ``type`` for it.
        inside: The path of the module around it, where every gate that fits this one fits that one and is better put
            there: mmcv's MultiheadAttention around torch's.
        gate: The name of the class of the gate that it has, or None.
    """

    path: str
    kind: str
    sizes: dict[str, Any]
    gates: tuple[str, ...]
    inside: str | None
    gate: str | None = None


def list_attention(model: nn.Module) -> list[Attention]:
    """Return every attention module of ``model``, in the order of its modules."""
    listed: dict[str, Attention] = {}
    for path, module in attention_modules(model):
        sizes = {size: getattr(module, size) for size in SIZES if hasattr(module, size)}
        gates = tuple(gate.__name__ for gate in gates_for(module))
        around = listed.get(path.rpartition('.')[0])
        inside = around.path if around and gates and set(gates) <= set(around.gates) else None
        gate = names_of_gates(module) if isinstance(module, GatedModule) else None
        listed[path] = Attention(path, host_class(module).__name__, sizes, gates, inside, gate)
    return list(listed.values())


def _apart(model: Mapping[str, Any]) -> dict[str, Any]:
    """Return, without what is no part of the structure, those parts of a model's config that would need something.

    What normalises images, which mmseg refuses in two configs; a teacher's weights, a language model, a backbone of
    timm's and what links StrongSORT's tracks, whose weights would be downloaded; the checkpointing of activations, for
    which Grounding DINO imports fairscale.
    """
    beside = ('data_preprocessor', 'teacher_ckpt', 'postprocess_model')
    apart: dict[str, Any] = {key: None for key in beside if key in model}
    if (model.get('backbone') or {}).get('pretrained') is True:
        apart['backbone'] = {**model['backbone'], 'pretrained': False}
    if (model.get('data_preprocessor') or {}).get('type') == 'ReIDDataPreprocessor':
        del apart['data_preprocessor']  # without it mmpretrain's classifier builds its own, which mmdet does not find
    if 'language_model' in model:
        apart['language_model'] = dict(type='mmgate.NoLanguageModel')
    if 'num_cp' in (model.get('encoder') or {}):
        apart['encoder'] = {**model['encoder'], 'num_cp': 0}
    return apart


@MMGATE_MODELS.register_module()
class NoLanguageModel(nn.Module):
    """Stands for the language model of a vision-language detector, which asks it for the width of BERT's features."""

    def __init__(self) -> None:
        super().__init__()
        body = nn.Module()
        body.language_dim = 768  # type: ignore[assignment]
        self.language_backbone = nn.ModuleDict(dict(body=body))


class _EmptyOnMeta(TorchFunctionMode):
    """Let ``torch.empty``, of which layers make their parameters, take no memory, and leave every other tensor real.

    Under ``torch.device('meta')`` all tensors would be without values, and models read their drop path rates off one.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return func(*args, **({**kwargs, 'device': 'meta'} if func is torch.empty else kwargs))

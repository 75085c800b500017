"""The type ``mmgate.Gated`` of a config: build a model of an mm package, put gates into it, choose what trains."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn

from mmgate._environment import log
from mmgate.errors import ConfigError, OptionError
from mmgate.files import put_gates
from mmgate.gates.base.map import EXAMPLE
from mmgate.registry import MODELS
from mmgate.rules import Rules, shown_as_read
from mmgate.swap import swap_attention
from mmgate.training import train_only_gates

# Names of the size of the images in pre-training in the configs of backbones.
IMAGE_SIZES = ('pretrain_img_size', 'img_size')


@MODELS.register_module()
def Gated(
    *,
    host: str | Callable[..., nn.Module] | None = None,
    attention: Rules | None = None,
    gates: str | None = None,
    train: str = 'all',
    **host_cfg: Any,
) -> nn.Module:
    """Build a model of an mm package, named by ``host``, with gates in some of its attention modules.

    In a config that inherits an mm config, ``type='mmgate.Gated'``, ``host`` and ``attention`` are all that is added.

    Args:
        host: The model's ``type`` without gates: a registered name, such as ``'mmdet.DeformableDETR'``, or a class.
        attention: A rule or a list of rules, see :func:`swap_attention`. It may be left out beside ``gates``.
        gates: Path of a gates file, which places its gates, see :func:`load_gates`.
        train: ``'all'``, ``'gates'`` or ``'attention'``, see :func:`train_only_gates`.
        **host_cfg: The config of the host.

    Returns:
        An instance of the host's class: no wrapper, no prefix in the state dict.

    Raises:
        OptionError: No host, neither rules nor a file, or a rule is malformed, see :func:`swap_attention`.
        ConfigError: ``host`` is not registered, a pattern matches nothing, a gate or a file of gates does not fit, see
            :func:`swap_attention` and :func:`load_gates`; ``train`` is unknown.
    """
    if host is None:
        raise OptionError(
            "mmgate.Gated needs host, the type that the model had without gates, such as host='mmdet.DeformableDETR'."
        )
    if attention is None and gates is None:
        raise OptionError('mmgate.Gated needs attention (a rule or a list of rules) or gates (a file of gates).')
    # The default scope is where mmengine looks up a type.
    with MODELS.switch_scope_and_registry(None) as models:
        if isinstance(host, str) and models.get(host) is None:
            raise ConfigError(
                f'host={host!r} is not registered. Give the name with its scope, such as mmdet.DeformableDETR, and '
                'import what registers it.'
            )
    model = MODELS.build(dict(type=host, **host_cfg))
    if attention is not None:
        with shown_as_read(attention), _image_size_suggested(host_cfg):
            names = swap_attention(model, attention)
        log(f'mmgate: gated {len(names)} attention modules of {type(model).__name__}')
    if gates is not None:
        content = put_gates(model, gates)
        log(f'mmgate: loaded {len(content.tensors)} tensors of gates from {gates}')
    if train != 'all':
        train_only_gates(model, train)
    return model


def image_size_of(cfg: Mapping[str, Any]) -> Any:
    """Return the size of the images in pre-training that a model's config names, or None."""
    backbone = cfg.get('backbone') or cfg.get('image_encoder') or cfg
    return next((backbone[name] for name in IMAGE_SIZES if backbone.get(name)), None)


@contextmanager
def _image_size_suggested(cfg: Mapping[str, Any]) -> Iterator[None]:
    """Let an error that asks for the size of the images in pre-training suggest the one in a model's config."""
    try:
        yield
    except OptionError as error:
        size = image_size_of(cfg)
        if size is None:
            raise
        raise OptionError(str(error).replace(EXAMPLE, f'image_size={size}')) from error

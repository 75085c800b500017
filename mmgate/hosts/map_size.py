"""Find out the size of the feature map that each attention sees in pre-training, by a pass on the device ``meta``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from math import isqrt
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from mmgate._environment import log
from mmgate.errors import ConfigError
from mmgate.hosts.table import gate_of_type, options_of
from mmgate.layers.base.gated import GatedModule
from mmgate.layers.base.map import MapGate, MapHost, Size, UntoldMapHost, embedder_around
from mmgate.wrappers import named_part

BACKBONES = ('backbone', 'image_encoder')  # names of the part of a model that takes images
IMAGE_SIZES = ('pretrain_img_size', 'img_size')  # backbones' names of the size of images in pre-training
IMAGE = 224  # side in pixels, for a backbone that keeps no such size
# The options that a rule may have to set, and their meaning.
MEANS = dict(
    map_size='the height and width of the map in pre-training',
    class_token='True if a class token comes before the tokens of the map, or the number of tokens that do',
)
EXAMPLES = dict(
    map_size='map_size=(14, 14) for images of 224 pixels and a stride of 16', class_token='class_token=False'
)


@dataclass(frozen=True)
class Derived:
    """Map that an attention sees in pre-training, as a pass of the backbone shows it, for the gate.

    Attributes:
        options: The options ``map_size`` and ``class_token`` that the gate needs and the rule leaves out.
        map_size: Height and width of the map.
    """

    options: Mapping[str, Any] = field(default_factory=dict)
    map_size: Size | None = None


def map_options(
    model: nn.Module, adapters: Mapping[str, type[GatedModule]], gate: type, options: Mapping[str, Any]
) -> dict[str, Derived]:
    """Find out for each attention the map that a gate needs to know, and return it by the attention's name.

    The size is that of the map for images of the backbone's ``pretrain_img_size`` or ``img_size``, see
    :func:`keep_image_size`, or of 224 x 224 pixels. A copy of the backbone on the device ``meta`` runs once. Options
    that the rule sets are kept. A warning is logged if the rule sets one ``map_size`` for stages whose maps differ.

    Args:
        model: The model.
        adapters: The adapter of each attention, by its name.
        gate: Class of the gate, or an attention that a rule names by its type.
        options: The options that the rule sets.

    Returns:
        Nothing for a gate that needs to know no map.

    Raises:
        ConfigError: They cannot be derived, and the message has the options to write; more tokens than one precede a
            map; or one does, and the gate's class has no option ``class_token``.
    """
    names = list(adapters)
    told = all('hw_shape' in inspect.signature(type(named_part(model, name)).forward).parameters for name in names)
    takes_token = 'class_token' in options_of(gate)
    wanted = dict(map_size=needs_map_size(gate), class_token=not told and takes_token)
    needed = [option for option, is_wanted in wanted.items() if is_wanted and option not in options]
    one_size = wanted['map_size'] and options.get('map_size') is not None and _of_several_stages(model, names)
    # A gate of maps whose constructor dropped the option would take the class token for one of the map's.
    blind = not told and not takes_token and issubclass(gate_of_type(gate) or gate, MapGate)
    if not names:
        return {}
    for name, adapter in adapters.items():
        if issubclass(adapter, UntoldMapHost):
            _refuse_dropped_tokens(gate, embedder_around(model, name))
    if not (needed or one_size or blind):
        return {}
    parts = names[0].split('.')
    prefix = next(('.'.join(parts[: i + 1]) for i, part in enumerate(parts) if part in BACKBONES), '')
    owner = model.get_submodule(prefix)
    image = _image_size(owner, embedder_around(model, names[0]))
    found: dict[str, tuple[Size, int]] = {}
    try:
        # In the copy a tensor is one of meta from the start, so that no weight is copied.
        tensors = (*owner.parameters(), *owner.buffers())
        copied = deepcopy(owner, {id(tensor): _on_meta(tensor) for tensor in tensors}).to('meta')
        # Some hosts' ``eval`` returns nothing, so that the calls are not chained.
        copied.eval()
        for name, adapter in adapters.items():
            cut = None
            if issubclass(adapter, MapHost):
                cut = adapter.map_of_images(embedder_around(model, name), image)
            counterpart = named_part(copied, name.removeprefix(f'{prefix}.'))
            counterpart.register_forward_pre_hook(_noting(found, name, owner, cut), with_kwargs=True)
        with torch.no_grad():
            # The first convolution is that of the patches.
            channels = next((part.in_channels for part in copied.modules() if isinstance(part, nn.Conv2d)), 3)
            copied(torch.empty(1, channels, *image, device='meta'))
        missing = ', '.join(name for name in names if name not in found)
        reason = f'{missing} did not run' if missing else ''
    except ConfigError as error:
        raise ConfigError(f'{gate.__name__}: {error}') from error
    except Exception as error:  # a host may raise anything on images of this size or on this device
        reason = f'{type(error).__name__}: {error}'
    if reason and needed:
        lacking = ' and '.join(f'{option}, {MEANS[option]},' for option in needed)
        examples = ', '.join(EXAMPLES[option] for option in needed)
        raise ConfigError(
            f'{gate.__name__} needs {lacking} which a pass of {type(owner).__name__} does not tell ({reason}). '
            f'Write it into the rule, such as {examples}.'
        )
    before = next((name for name, (_, tokens) in found.items() if tokens), None)
    if blind and before is not None:
        raise ConfigError(
            f'{gate.__name__} has no option class_token, and a class token comes before the map of {before}. Let the '
            "gate's constructor take class_token=False as a keyword and hand it on: "
            'super().__init__(sizes, class_token=class_token). Or leave the module out of the path.'
        )
    sizes = sorted({size for size, _ in found.values()}, reverse=True)
    if one_size and len(sizes) > 1:
        maps = ', '.join(f'{height} x {width}' for height, width in sizes)
        log(
            f"mmgate: map_size={tuple(options['map_size'])} is one for all of {gate.__name__}'s maps in "
            f'{type(owner).__name__}, which are of {maps} at the image size of pre-training. Leave it out, so that '
            'each gets that of its map, or write a rule for each stage.',
            logging.WARNING,
        )
    derived = {}
    for name, (size, tokens) in found.items():
        read = dict(map_size=size, class_token=tokens)
        derived[name] = Derived({option: read[option] for option in needed}, size)
    return derived


def keep_image_size(part: nn.Module, cfg: Mapping[str, Any]) -> None:
    """Set the image size that a config names on the modules built from it, since most classes do not keep it."""
    for name, value in cfg.items():
        built = getattr(part, name, None)
        if name in IMAGE_SIZES and built is None:
            setattr(part, name, value)
        elif isinstance(built, nn.Module) and isinstance(value, Mapping):
            keep_image_size(built, value)


def _refuse_dropped_tokens(gate: type, embedder: Any) -> None:
    """Raise ConfigError if a model drops tokens of a map in training, as timm's ``patch_drop`` does."""
    drops = getattr(embedder, 'patch_drop', None)
    if isinstance(drops, nn.Module) and not isinstance(drops, nn.Identity):
        raise ConfigError(
            f'{gate.__name__} needs all tokens of a map, and this {type(embedder).__name__} drops some in training '
            f'(patch_drop: {type(drops).__name__}). Build it with patch_drop_rate=0.'
        )


def needs_map_size(gate: type) -> bool:
    """Return True if a class of gates cannot be made without the option ``map_size``."""
    parameter = options_of(gate).get('map_size')
    return parameter is not None and parameter.default is parameter.empty


def _of_several_stages(model: nn.Module, names: Collection[str]) -> bool:
    """Return True if attentions belong to several stages: their weights differ in shape, and so do their maps."""
    return len({next(model.get_submodule(name).parameters()).shape for name in names}) > 1


def _kept_size(owner: Any, embedder: Any = None) -> Any:
    """Return the image size that a backbone or the patch embedding of a module in it keeps as an attribute, or None."""
    kept = [getattr(owner, name, None) for name in IMAGE_SIZES]
    for part in (owner, embedder):
        embedding = getattr(part, 'patch_embed', None)
        kept += [getattr(embedding, name, None) for name in ('init_input_size', 'img_size')]
    return next((size for size in kept if size), None)


def _on_meta(tensor: Tensor) -> Tensor:
    """Return an empty tensor, or parameter, of a tensor's shape and dtype on the device ``meta``."""
    empty = torch.empty_like(tensor, device='meta')
    return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def _image_size(owner: Any, embedder: Any) -> Size:
    kept = _kept_size(owner, embedder)
    if kept is None:
        name = type(owner).__name__
        log(
            f'mmgate: {name} keeps no pretrain_img_size, so that maps are taken as those of images of {IMAGE} pixels. '
            'If it was pre-trained on others, write pretrain_img_size into its config where it takes one, or '
            'map_size=(height, width) into a rule for each stage.'
        )
    size = kept or IMAGE
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _noting(
    found: dict[str, tuple[Size, int]], name: str, owner: Any, cut: tuple[Size, int] | None
) -> Callable[..., None]:
    """Return a forward pre-hook that writes an attention's map, and the number of tokens before it, into ``found``.

    Args:
        found: The dict to write to, by the attention's name.
        name: The attention's name.
        owner: The backbone.
        cut: The map into which the model around the attention cuts images, and the tokens before it, if it says so.
    """

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(MethodType(type(module).forward, module)).bind(*args, **kwargs).arguments
        states = next(iter(given.values()))
        if states.dim() == 4:  # (B, H, W, C), as in timm's Swin
            found[name] = ((states.shape[1], states.shape[2]), 0)
            return
        tokens = states.shape[1]
        if cut is not None:
            (height, width), before = cut
            if tokens != before + height * width:
                raise ValueError(f'{tokens} tokens of {name} are not {before} and those of a map of {height} x {width}')
            found[name] = cut
            return
        # The resolution of a backbone that keeps no image size is of other images than those of this pass.
        resolution = None if _kept_size(owner) is None else getattr(owner, 'patch_resolution', None)
        told = given.get('hw_shape') or resolution
        sides = told or (isqrt(tokens),) * 2
        before = tokens - sides[0] * sides[1]
        if told and before > 1:
            raise ConfigError(
                f'{before} tokens come before the map of {name}, and an attention over a map takes one at most, the '
                'class token. Leave it out of the path, or take a gate of queries and keys.'
            )
        if before not in (0, 1):
            raise ValueError(f'{before} tokens of {name} lie on no map')
        found[name] = ((int(sides[0]), int(sides[1])), before)

    return note

"""Find out the size of the feature map that each attention sees in pre-training, by a pass on the device ``meta``."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from copy import deepcopy
from dataclasses import dataclass
from math import isqrt
from types import MethodType
from typing import Any

import torch
from torch import nn

from mmgate._environment import log
from mmgate.errors import ConfigError
from mmgate.hosts.table import gate_of_type, options_of
from mmgate.layers.base.map import MapGate
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


def map_options(
    model: nn.Module, names: Collection[str], gate: type, options: Mapping[str, Any]
) -> tuple[dict[int, dict[str, Any]], dict[int, tuple[int, int]]]:
    """Find out for each attention the options ``map_size`` and ``class_token`` that a gate needs, and return them.

    They are by the module's id. The second dict has the size of each attention's map.

    The size is that of the map for images of the backbone's ``pretrain_img_size`` or ``img_size``, see
    :func:`keep_image_size`, or of 224 x 224 pixels. A copy of the backbone on the device ``meta`` runs once. Options
    that the rule sets are kept. A warning is logged if the rule sets one ``map_size`` for stages whose maps differ.

    Raises:
        ConfigError: They cannot be derived, and the message has the options to write; more tokens than one precede a
            map; or one does, and the gate's class has no option ``class_token``.
    """
    told = all('hw_shape' in inspect.signature(type(named_part(model, name)).forward).parameters for name in names)
    takes_token = 'class_token' in options_of(gate)
    wanted = dict(map_size=needs_map_size(gate), class_token=not told and takes_token)
    needed = [option for option, is_wanted in wanted.items() if is_wanted and option not in options]
    one_size = wanted['map_size'] and options.get('map_size') is not None and _of_several_stages(model, names)
    # A gate of maps whose constructor dropped the option would take the class token for one of the map's.
    blind = not told and not takes_token and issubclass(gate_of_type(gate) or gate, MapGate)
    if not names or not (needed or one_size or blind):
        return {}, {}
    first = next(iter(names))
    parts = first.split('.')
    prefix = next(('.'.join(parts[: i + 1]) for i, part in enumerate(parts) if part in BACKBONES), '')
    owner = model.get_submodule(prefix)
    image = _image_size(owner, _of_timm(model, first))
    found: dict[int, dict[str, Any]] = {}
    try:
        copied = deepcopy(owner).to('meta')
        # Some hosts' ``eval`` returns nothing, so that the calls are not chained.
        copied.eval()
        for name in names:
            told_by = _TimmMap(_of_timm(model, name), image)
            note = _noting(found, id(named_part(model, name)), name, owner, told_by)
            counterpart = named_part(copied, name.removeprefix(f'{prefix}.'))
            counterpart.register_forward_pre_hook(note, with_kwargs=True)
        with torch.no_grad():
            copied(torch.empty(1, 3, *image, device='meta'))
        missing = ', '.join(name for name in names if id(named_part(model, name)) not in found)
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
    before = next((name for name in names if found.get(id(named_part(model, name)), {}).get('class_token')), None)
    if blind and before is not None:
        raise ConfigError(
            f'{gate.__name__} has no option class_token, and a class token comes before the map of {before}. Let the '
            "gate's constructor take class_token=False as a keyword and hand it on: "
            'super().__init__(sizes, class_token=class_token). Or leave the module out of the path.'
        )
    sizes = sorted({read['map_size'] for read in found.values()}, reverse=True)
    if one_size and len(sizes) > 1:
        maps = ', '.join(f'{height} x {width}' for height, width in sizes)
        log(
            f"mmgate: map_size={tuple(options['map_size'])} is one for all of {gate.__name__}'s maps in "
            f'{type(owner).__name__}, which are of {maps} at the image size of pre-training. Leave it out, so that '
            'each gets that of its map, or write a rule for each stage.',
            logging.WARNING,
        )
    derived = {key: {name: read[name] for name in needed} for key, read in found.items()}
    return derived, {key: read['map_size'] for key, read in found.items()}


def keep_image_size(part: nn.Module, cfg: Mapping[str, Any]) -> None:
    """Set the image size that a config names on the modules built from it, since most classes do not keep it."""
    for name, value in cfg.items():
        built = getattr(part, name, None)
        if name in IMAGE_SIZES and built is None:
            setattr(part, name, value)
        elif isinstance(built, nn.Module) and isinstance(value, Mapping):
            keep_image_size(built, value)


def needs_map_size(gate: type) -> bool:
    """Return True if a class of gates cannot be made without the option ``map_size``."""
    parameter = options_of(gate).get('map_size')
    return parameter is not None and parameter.default is parameter.empty


def _of_several_stages(model: nn.Module, names: Collection[str]) -> bool:
    """Return True if attentions belong to several stages: their weights differ in shape, and so do their maps."""
    return len({next(model.get_submodule(name).parameters()).shape for name in names}) > 1


def _of_timm(model: nn.Module, name: str) -> Any:
    """Return the timm model around an attention: the nearest module with timm's patch embedding; or None."""
    parts = name.split('.')
    around = (model.get_submodule('.'.join(parts[:count])) for count in range(len(parts) - 1, -1, -1))
    found = next((part for part in around if hasattr(part, 'patch_embed')), None)
    return found if hasattr(getattr(found, 'patch_embed', None), 'dynamic_feat_size') else None


@dataclass(frozen=True)
class _TimmMap:
    """Size of the map, and number of tokens before it, of a timm model for images of a size; None without a model."""

    owner: Any
    image: tuple[int, int]

    @property
    def sides(self) -> tuple[int, int] | None:
        """Height and width, in patches, of the map that images are cut into."""
        return None if self.owner is None else self.owner.patch_embed.dynamic_feat_size(self.image)

    @property
    def before(self) -> int | None:
        """Number of class and register tokens before those of the map."""
        return getattr(self.owner, 'num_prefix_tokens', None)


def _kept_size(owner: Any, of_timm: Any = None) -> Any:
    """Return the image size that a backbone keeps as an attribute, or None."""
    embedding = getattr(owner, 'patch_embed', None)
    kept = [*(getattr(owner, name, None) for name in IMAGE_SIZES), getattr(embedding, 'init_input_size', None)]
    kept.append(None if of_timm is None else of_timm.patch_embed.img_size)
    return next((size for size in kept if size), None)


def _image_size(owner: Any, of_timm: Any) -> tuple[int, int]:
    size = _kept_size(owner, of_timm) or IMAGE
    if _kept_size(owner, of_timm) is None:
        name = type(owner).__name__
        log(
            f'mmgate: {name} keeps no pretrain_img_size, so that maps are taken as those of images of {IMAGE} pixels. '
            'If it was pre-trained on others, write pretrain_img_size into its config where it takes one, or '
            'map_size=(height, width) into a rule for each stage.'
        )
    return (size, size) if isinstance(size, int) else (int(size[0]), int(size[-1]))


def _noting(
    found: dict[int, dict[str, Any]], key: int, name: str, owner: Any, of_timm: _TimmMap
) -> Callable[..., None]:
    """Return a forward pre-hook that writes an attention's map size and class token into ``found[key]``."""

    def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = inspect.signature(MethodType(type(module).forward, module)).bind(*args, **kwargs).arguments
        states = next(iter(given.values()))
        if states.dim() == 4:  # (B, H, W, C), as in timm's Swin
            found[key] = dict(map_size=(states.shape[1], states.shape[2]), class_token=False)
            return
        tokens = states.shape[1]
        if of_timm.before is not None:
            sides = of_timm.sides
            if sides is None or tokens != of_timm.before + sides[0] * sides[1]:
                raise ValueError(f'{tokens} tokens of {name} are not {of_timm.before} and those of a map of {sides}')
            found[key] = dict(map_size=(int(sides[0]), int(sides[1])), class_token=of_timm.before)
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
        found[key] = dict(map_size=(int(sides[0]), int(sides[1])), class_token=bool(before))

    return note

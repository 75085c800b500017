"""Hooks that make training steps faster: parts compiled, a layout, and what mixed precision needs beside it."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from mmengine.hooks import Hook
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mmgate.errors import ConfigError
from mmgate.ops.library import without_autocast
from mmgate.paths import own_model
from mmgate.registry import HOOKS
from mmgate.swap import path_regex


class _PathsHook(Hook):
    """A hook for modules that patterns name.

    Args:
        paths: Patterns as those of ``mmgate.Gated``, each of which has to match; None for the ``usual``, of which
            one has to.
    """

    usual: tuple[str, ...] = ()

    def __init__(self, paths: str | Sequence[str] | None = None) -> None:
        self.paths = (paths,) if isinstance(paths, str) else paths
        if self.paths is not None and (not self.paths or not all(isinstance(one, str) for one in self.paths)):
            raise ConfigError(f'{type(self).__name__}: paths must be a pattern or a list of some, got {paths!r}.')

    def modules(self, runner: Any) -> dict[str, nn.Module]:
        """Return the modules by name; of one and another inside it the outer alone.

        Raises:
            ConfigError: A pattern matches nothing; the message lists the model's parts.
        """
        model = own_model(runner.model)
        names = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
        found: dict[str, nn.Module] = {}
        idle = []
        for pattern in self.usual if self.paths is None else self.paths:
            matched = {name: module for name, module in names.items() if path_regex(pattern).fullmatch(name)}
            found.update(matched)
            idle += [] if matched else [repr(pattern)]
        if idle and (self.paths is not None or not found):
            parts = ', '.join(name for name, _ in model.named_children())
            raise ConfigError(
                f'{type(self).__name__}: no module of {type(model).__name__} matches {", ".join(idle)}; its parts are '
                f'{parts}.'
            )
        return {name: module for name, module in found.items() if not any(name.startswith(f'{o}.') for o in found)}


@HOOKS.register_module()
class CompileHook(_PathsHook):
    """Compile parts of the model for training: backbone and encoder layers, each by itself.

    mmengine's ``compile=True`` takes in the whole step with losses and matching, whose sizes differ from image to
    image. Here modules are compiled in place, so that checkpoints keep their keys and go on without the hook. The first
    iterations wait for the compiler, minutes on a CPU; evaluation between epochs has its own forms. Probes and
    :class:`GateStatisticsHook` do not see into compiled modules.

    Args:
        paths: Patterns as those of ``mmgate.Gated``; by default ``'backbone'`` and ``'**encoder.layers.*'``, of which
            one has to match.
        mode: Of torch.compile.
        dynamic: Of torch.compile: None compiles for the first size and, at the second, for any.
        backend: Of torch.compile.

    Raises:
        ConfigError: ``paths`` is malformed, or a pattern matches nothing (from :meth:`before_train`).
    """

    usual = ('backbone', '**encoder.layers.*')

    def __init__(
        self,
        paths: str | Sequence[str] | None = None,
        *,
        mode: str | None = None,
        dynamic: bool | None = None,
        backend: str = 'inductor',
    ) -> None:
        super().__init__(paths)
        self.options: dict[str, Any] = dict(mode=mode, dynamic=dynamic, backend=backend)

    def before_train(self, runner: Any) -> None:
        """Compile; what runs is compiled at its first call."""
        modules = self.modules(runner)
        for module in dict.fromkeys(modules.values()):
            module.compile(**self.options)
        runner.logger.info(f'CompileHook: {", ".join(modules)} are compiled as they are first called.')


@HOOKS.register_module()
class ChannelsLastHook(_PathsHook):
    """Hand images to the backbone with their channels last in memory, where a CPU's convolutions are faster.

    Convolutions, norms and activations keep the layout that they are given. Weights stay as they are, in memory and in
    checkpoints. ``paths`` (``'backbone'`` by default) and errors are as in :class:`CompileHook`, from
    :meth:`before_run`.
    """

    usual = ('backbone',)

    def before_run(self, runner: Any) -> None:
        """Turn what the modules are given, from now on."""
        for module in dict.fromkeys(self.modules(runner).values()):
            if _channels_last not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_channels_last)


def _channels_last(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    def turn(x: Any) -> Any:
        return x.contiguous(memory_format=torch.channels_last) if isinstance(x, Tensor) and x.dim() == 4 else x

    return tree_map(turn, args)


@HOOKS.register_module()
class Float32Hook(_PathsHook):
    """Keep parts of the model in float32 where mixed precision would have 16 bits: coordinates and logits.

    A coordinate of bfloat16 has 8 bits, four pixels in a thousand, and mmdet's heads refine boxes in the type that
    autocast gives to the layers that predict them. Without autocast the hook changes nothing. ``paths`` (by default
    what predicts reference points, boxes, classes and sampling offsets in DETR-like detectors) and errors are as in
    :class:`CompileHook`, from :meth:`before_run`.
    """

    usual = ('**reference_points_fc', '**reg_branches.*', '**cls_branches.*', '**sampling_offsets')

    def before_run(self, runner: Any) -> None:
        """Exempt the modules from autocast."""
        for module in dict.fromkeys(self.modules(runner).values()):
            keep_float32(module)


def keep_float32(module: nn.Module) -> None:
    """Let ``module`` compute in float32 within autocast, from then on."""
    if not isinstance(module, _Float32):
        module.__class__ = _in_float32(type(module))  # type: ignore[arg-type]


class _Float32(nn.Module):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = tree_map(_wide, (args, kwargs))
        with without_autocast(next(self.parameters(), torch.empty(0)).device.type):
            return super().forward(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle by the module's class: the one that is made of it has no name in any module."""
        return _empty, (type(self).__bases__[1],), vars(self)


def _wide(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


@functools.cache
def _in_float32(kind: Any) -> type[nn.Module]:
    return type(kind.__name__, (_Float32, kind), {})


def _empty(kind: type[nn.Module]) -> nn.Module:
    made: Any = _in_float32(kind)  # type: ignore[arg-type]
    return made.__new__(made)

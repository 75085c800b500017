"""Checks of an operator's arguments: each tensor against its layout, with a message that names the wrong one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .autocast import autocast_dtype
from .tracing import is_exporting


def check_layout(
    *arguments: tuple[str, Tensor | None, str], filled: str = '', integer: str = '', one_dtype: bool = True
) -> None:
    """Refuse tensors that do not go together.

    Args:
        *arguments: Name, tensor (None is passed over, but as the first) and layout, such as ``'B H N d'``. Axes
            of one letter have one size; ``'H|1'`` may have size 1 instead, and a number stands for itself. Where all
            axes may be 1, the tensor broadcasts and leading ones may be missing.
        filled: Axes that must not be empty.
        integer: Names of the tensors that hold whole numbers; all others are floating point.
        one_dtype: Whether those are of one dtype; under autocast, which converts them, they need not be.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype or device does not fit; the message names the argument.
    """
    if is_exporting():  # sizes are symbols there
        return
    given: Any = [argument for argument in arguments if argument[1] is not None or argument is arguments[0]]
    first, like = given[0][:2]
    for name, x, _ in given:
        if not isinstance(x, Tensor):
            raise TypeError(f'{name} must be a tensor, got {type(x).__name__}.')
        whole = name in integer.split()
        if whole and (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool):
            raise ValueError(f'{name} must be integer, got {x.dtype}.')
        if not whole and not x.is_floating_point():
            raise ValueError(f'{name} must be floating point, got {x.dtype}.')
        if x.device != like.device:
            raise ValueError(f'{name} is on {x.device}, {first} on {like.device}; move one to the other.')
        if one_dtype and not whole and x.dtype != like.dtype and autocast_dtype(x.device.type) is None:
            raise ValueError(f'{name} is {x.dtype}, {first} is {like.dtype}; convert one to the other.')
    sizes: dict[str, tuple[int, str]] = {}
    for name, x, layout in given:
        _check_sizes(name, x, layout, sizes)
    for axis in filled.split():
        if axis in sizes and not sizes[axis][0]:
            raise ValueError(f'{sizes[axis][1]} is empty: its axis {axis} must be 1 or more.')


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, *more: tuple[str, Tensor | None, str], filled: str = 'M d', one_dtype: bool = True
) -> None:
    """Refuse queries ``(B, H, N, d)``, keys ``(B, H, M, d)``, values ``(B, H, M, e)`` and more, see above."""
    qkv = ('q', q, 'B H N d'), ('k', k, 'B H M d'), ('v', v, 'B H M e')
    check_layout(*qkv, *more, filled=filled, one_dtype=one_dtype)


def _check_sizes(name: str, x: Tensor, layout: str, sizes: dict[str, tuple[int, str]]) -> None:
    axes = layout.split()
    broadcasts = all(axis.endswith('|1') for axis in axes)
    missing = len(axes) - x.dim()
    if missing < 0 or (missing and not broadcasts):
        raise ValueError(f'{name} must be ({", ".join(axes)}), got {tuple(x.shape)}.')
    for axis, size in zip(axes[missing:], x.shape, strict=True):
        letter, _, one = axis.partition('|')
        if one and size == 1:
            continue
        expected, owner = (int(letter), '') if letter.isdigit() else sizes.setdefault(letter, (size, name))
        if size != expected:
            reason = f' with {letter} = {expected} as in {owner}' if owner else ''
            raise ValueError(f'{name} must be ({", ".join(axes)}){reason}, got {tuple(x.shape)}.')


def broadcasts_to(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Return whether a tensor of ``shape`` can be expanded to ``full``."""
    return len(shape) <= len(full) and all(n in (m, 1) for n, m in zip(reversed(shape), reversed(full), strict=False))

"""Check that an operator's arguments have matching shapes, dtypes and devices; errors name the wrong one."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .autocast import autocast_dtype
from .tracing import is_exporting

# Where PLuG's gate acts: on the logits, or on the weights.
POSITIONS = ('pre_softmax', 'post_softmax')


def check_layout(
    *arguments: tuple[str, Tensor | None, str], filled: str = '', integer: str = '', one_dtype: bool = True
) -> None:
    """Raise an error unless tensors have the layouts given as text (``'B H N d'``), one device and matching dtypes.

    Args:
        *arguments: Name, tensor and layout of each argument, the layout such as ``'B H N d'``. Axes with the same
            letter have the same size. ``'H|1'`` may have size 1 instead, and a number is the size itself. If all axes
            of a tensor may be 1, it broadcasts, and its leading axes may be missing. None instead of a tensor is not
            checked, except for the first argument.
        filled: Axes that must not be empty.
        integer: Names of the tensors that hold integers; all others are floating point.
        one_dtype: True if the floating-point tensors must have one dtype. Under autocast, which converts them, they
            may differ.

    Raises:
        TypeError: An argument is no tensor.
        ValueError: A shape, dtype or device does not fit; the message names the argument.
    """
    # In an export sizes are symbols, whose comparison would fix them.
    if is_exporting():
        return
    first, like, _ = arguments[0]
    given = [arguments[0], *(argument for argument in arguments[1:] if argument[1] is not None)]
    checked: list[tuple[str, Tensor, str]] = []
    for name, x, layout in given:
        if not isinstance(x, Tensor) or not isinstance(like, Tensor):
            raise TypeError(f'{name} must be a tensor, got {type(x).__name__}.')
        checked.append((name, x, layout))
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
    for name, x, layout in checked:
        _check_sizes(name, x, layout, sizes)
    for axis in filled.split():
        if axis in sizes and not sizes[axis][0]:
            raise ValueError(f'{sizes[axis][1]} is empty: its axis {axis} must be 1 or more.')


def check_qkv(
    q: Tensor, k: Tensor, v: Tensor, *more: tuple[str, Tensor | None, str], filled: str = 'M d', one_dtype: bool = True
) -> None:
    """Raise an error unless queries ``(B, H, N, d)``, keys ``(B, H, M, d)`` and values ``(B, H, M, e)`` match.

    The arguments and errors are those of :func:`check_layout`.
    """
    check_layout(
        ('q', q, 'B H N d'),
        ('k', k, 'B H M d'),
        ('v', v, 'B H M e'),
        *more,
        filled=filled,
        one_dtype=one_dtype,
    )


def _check_sizes(name: str, x: Tensor, layout: str, sizes: dict[str, tuple[int, str]]) -> None:
    """Check a tensor's shape against its layout and the axis sizes known so far, and add the sizes that it defines.

    The values of ``sizes`` are the size of an axis and the name of the tensor that has it.
    """
    axes = layout.split()
    broadcasts = all(axis.endswith('|1') for axis in axes)
    missing = len(axes) - x.dim()
    if missing < 0 or (missing and not broadcasts):
        raise ValueError(f'{name} must be ({", ".join(axes)}), got {tuple(x.shape)}.')
    for axis, size in zip(axes[missing:], x.shape, strict=True):
        letter, _, may_be_one = axis.partition('|')
        if may_be_one and size == 1:
            continue
        if letter.isdigit():
            expected = int(letter)
            owner = ''
        else:
            expected, owner = sizes.setdefault(letter, (size, name))
        if size != expected:
            reason = f' with {letter} = {expected} as in {owner}' if owner else ''
            raise ValueError(f'{name} must be ({", ".join(axes)}){reason}, got {tuple(x.shape)}.')


def broadcasts_to(shape: Sequence[int], full: Sequence[int]) -> bool:
    """Return True if a tensor of the shape ``shape`` broadcasts to the shape ``full``."""
    if len(shape) > len(full):
        return False
    return all(size in (wanted, 1) for size, wanted in zip(reversed(shape), reversed(full), strict=False))

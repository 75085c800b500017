"""Check the values of options. numpy's integers and numbers are taken, bools are not: True would be the number 1."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite
from numbers import Integral, Real

from mmgate.errors import ConfigError


def check_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError if an option's value is not one of the allowed ones, which the message lists."""
    if value not in allowed:
        raise ConfigError(f'{name}={value!r} is unknown; choose one of {", ".join(map(str, allowed))}.')


def integer(name: str, value: object, *, least: int = 1, most: int | None = None, meaning: str = '') -> int:
    """Return an option's value as an int.

    Args:
        name: Name of the option.
        value: Its value.
        least: The smallest value that is allowed.
        most: The largest one; None for no limit.
        meaning: Words for the message on what the value is.

    Raises:
        ConfigError: The value is no integer, or out of these bounds.
    """
    if isinstance(value, Integral) and not isinstance(value, bool):
        found = int(value)
        if least <= found and (most is None or found <= most):
            return found
    bounds = f'an integer from {least} to {most}' if most is not None else f'an integer, {least} or more'
    raise ConfigError(f'{name}={value!r} must be {bounds}{meaning}.')


def number(
    name: str,
    value: object,
    *,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> float:
    """Return an option's value as a float.

    Args:
        name: Name of the option.
        value: Its value.
        least: The smallest value that is allowed; None for no limit.
        most: The largest one; None for no limit.
        above: A limit that the value has to exceed; None for none.
        below: A limit that the value must not reach; None for none.

    Raises:
        ConfigError: The value is no finite number, or out of these bounds.
    """
    if isinstance(value, Real) and not isinstance(value, bool) and isfinite(value):
        found = float(value)
        within = (
            least is None or found >= least,
            most is None or found <= most,
            above is None or found > above,
            below is None or found < below,
        )
        if all(within):
            return found
    words = {'of at least': least, 'of at most': most, 'above': above, 'below': below}
    bounds = ' and '.join(f'{word} {limit:g}' for word, limit in words.items() if limit is not None)
    raise ConfigError(f'{name}={value!r} must be a finite number {bounds}'.rstrip() + '.')


def height_and_width(name: str, value: object) -> tuple[int, int]:
    """Return an option's value, the size of a map or an image, as a tuple of height and width.

    Raises:
        ConfigError: The value is no sequence of two positive integers.
    """
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
        return integer(f'{name}[0]', value[0]), integer(f'{name}[1]', value[1])
    raise ConfigError(f'{name}={value!r} must be a height and a width, such as {name}=(56, 56).')

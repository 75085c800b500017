"""Exceptions for mistakes that a user can mend: command lines print the message without a traceback."""

from __future__ import annotations

from collections.abc import Sequence

# The variable of the environment by which checkpoints may run code.
TRUST = 'MMGATE_TRUST_CHECKPOINT'


def first_line(error: Exception) -> str:
    """Return an exception's class and the first line of its message, as a reason why something was left out."""
    return f'{type(error).__name__}: {error}'.split('\n')[0]


def listed(items: Sequence[str], most: int = 3, *, separator: str = ', ') -> str:
    """Return the first items of a list for a message, and the number of the others."""
    others = f' and {len(items) - most} more' if len(items) > most else ''
    return separator.join(items[:most]) + others


def full_name(cls: type) -> str:
    """Return the dotted name of a class with its module, since mmdet and mmseg have classes of equal names."""
    return f'{cls.__module__}.{cls.__qualname__}'


class ConfigError(ValueError):
    """Error: the user's input is wrong; the message names the fault, the expected input and the remedy."""


class OptionError(ConfigError, TypeError):
    """Error: a rule or an option of a gate is malformed or unknown. It is also a TypeError."""


class UntrustedCheckpoint(ConfigError):
    """Error: a checkpoint may run code of whoever made it."""


class UnsupportedCall(ConfigError):
    """Error: a backend cannot run this call of an operator; the message has the reason, and another backend may."""

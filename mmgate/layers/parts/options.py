"""Check the values of options."""

from __future__ import annotations

from mmgate.errors import ConfigError


def check_option(name: str, value: object, allowed: tuple[object, ...]) -> None:
    """Raise ConfigError if an option's value is not one of the allowed ones, which the message lists."""
    if value not in allowed:
        raise ConfigError(f'{name}={value!r} is unknown; choose one of {", ".join(map(str, allowed))}.')

"""Errors that a user can mend: the command lines print their message and no traceback."""


class ConfigError(ValueError):
    """The user's input is wrong; the message has the fault, the expected input and the remedy."""


class OptionError(ConfigError, TypeError):
    """A rule or an option is malformed or unknown, which Python calls a TypeError."""


class UntrustedCheckpoint(ConfigError):
    """A checkpoint would run code, or unpack into far more than it is."""


class UnsupportedCall(ConfigError):
    """A backend does not have what a call asks for; the message names it, and another backend may have it."""

"""Exceptions for mistakes that a user can mend: command lines print the message without a traceback."""


class ConfigError(ValueError):
    """The user's input is wrong: the message names the fault, the expected input and the remedy."""


class OptionError(ConfigError, TypeError):
    """A rule or an option of a gate is malformed or unknown; also a TypeError, as Python calls a wrong argument."""


class UntrustedCheckpoint(ConfigError):
    """A checkpoint would run code, or unpack into far more memory than the file has."""


class UnsupportedCall(ConfigError):
    """A backend cannot run this call of an operator; the message has the reason, and another backend may run it."""

"""A project of someone else: an attention of its own in a detector, a gate of its own, and mmgate's beside it."""

from . import gate, host  # noqa: F401

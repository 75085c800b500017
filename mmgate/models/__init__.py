"""What a config names: models with their attention swapped."""

from . import adapters  # noqa: F401  (registers which gate fits which host)
from .gated import Gated, attention_modules, swap_attention

__all__ = ['Gated', 'attention_modules', 'swap_attention']

"""What a config names: models with their attention swapped, and backbones."""

from typing import Any

from . import backbones
from .adapters import adapts
from .classifier import Classifier
from .gated import Gated, attention_modules, swap_attention
from .starts import restore_attention

__all__ = [
    *backbones.__all__,
    'Classifier',
    'Gated',
    'adapts',
    'attention_modules',
    'restore_attention',
    'swap_attention',
]


def __getattr__(name: str) -> Any:
    """Return a backbone; each stands in the package of its host."""
    if name in backbones.HOSTS:
        return getattr(backbones, name)
    raise AttributeError(f'module {__name__!r} has no attribute {name!r}')

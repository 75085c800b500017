"""Autocast in every torch version: the dtype that it gives to matrix products, and a context without it."""

from __future__ import annotations

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype that autocast gives to matrix products on ``device_type``, or None if it is off."""
    if device_type == 'meta':
        return None
    if hasattr(torch, 'get_autocast_dtype'):  # torch 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == 'cpu':
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if device_type == 'cuda' and torch.is_autocast_enabled() else None


def without_autocast(device_type: str) -> torch.autocast:
    """Return a context without autocast, which does not know the device ``'meta'``."""
    return torch.autocast('cpu' if device_type == 'meta' else device_type, enabled=False)

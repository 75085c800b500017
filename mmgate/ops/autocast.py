"""Helpers for autocast in every torch version: its dtype for matrix products, and a context that switches it off."""

from __future__ import annotations

import torch


def autocast_dtype(device_type: str) -> torch.dtype | None:
    """Return the dtype to which autocast converts matrix products on this type of device, or None if it is off."""
    if device_type == 'meta':
        return None
    if hasattr(torch, 'get_autocast_dtype'):  # torch 2.4
        return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
    if device_type == 'cpu':
        return torch.get_autocast_cpu_dtype() if torch.is_autocast_cpu_enabled() else None
    return torch.get_autocast_gpu_dtype() if device_type == 'cuda' and torch.is_autocast_enabled() else None


def without_autocast(device_type: str) -> torch.autocast:
    """Return a context that switches autocast off; on ``'meta'``, which autocast does not know, it does nothing."""
    return torch.autocast('cpu' if device_type == 'meta' else device_type, enabled=False)

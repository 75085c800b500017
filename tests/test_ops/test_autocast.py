"""The dtype of autocast, by device."""

from __future__ import annotations

import torch

from mmgate.ops.autocast import autocast_dtype, without_autocast


def test_autocast_dtype_is_that_of_the_device() -> None:
    assert autocast_dtype('cpu') is None
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert autocast_dtype('cpu') is torch.bfloat16
        assert autocast_dtype('cuda') is None
        assert autocast_dtype('meta') is None


def test_without_autocast_switches_it_off() -> None:
    x = torch.ones(2, 2)
    with torch.autocast('cpu', dtype=torch.bfloat16):
        assert (x @ x).dtype is torch.bfloat16
        for device_type in ('cpu', 'meta'):
            with without_autocast(device_type):
                assert (x @ x).dtype is torch.float32

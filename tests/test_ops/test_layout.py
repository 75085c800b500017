"""Tensors that do not go together are refused by a message that names the wrong one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmgate.ops.layout import check_layout

X = torch.zeros(2, 3, 4)


@pytest.mark.parametrize(
    ('name', 'y', 'layout', 'message'),
    [
        ('y', [1.0], 'B', 'y must be a tensor, got list'),
        ('y', torch.zeros(3), 'B', r'y must be \(B\) with B = 2 as in x, got \(3,\)'),
        ('y', torch.zeros(2, 3), 'B', r'y must be \(B\), got \(2, 3\)'),
        ('y', torch.zeros(3), 'B N', r'y must be \(B, N\), got \(3,\)'),
        ('y', torch.zeros(2, 2), 'B|1 N|1', r'y must be \(B\|1, N\|1\) with N = 3 as in x, got \(2, 2\)'),
        ('y', torch.zeros(2, 3), 'B 2', r'y must be \(B, 2\), got \(2, 3\)'),
        ('y', torch.zeros(2, 3).long(), 'B N', 'y must be floating point, got torch.int64'),
        ('y', torch.zeros(2, 3).double(), 'B N', 'y is torch.float64, x is torch.float32; convert one to the other'),
        ('y', torch.zeros(2, 3, device='meta'), 'B N', 'y is on meta, x on cpu; move one to the other'),
        ('index', torch.zeros(2, 3), 'B N', 'index must be integer, got torch.float32'),
        ('index', torch.zeros(2, 3, dtype=torch.bool), 'B N', 'index must be integer, got torch.bool'),
        ('y', torch.zeros(2, 0), 'B M', 'y is empty: its axis M must be 1 or more'),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(name: str, y: Any, layout: str, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=f'^{message}'):
        check_layout(('x', X, 'B N d'), (name, y, layout), filled='M', integer='index')


def test_dtypes_may_differ_where_that_is_said_or_autocast_converts() -> None:
    mixed = ('x', X, 'B N d'), ('y', X.bfloat16(), 'B N d')
    check_layout(*mixed, one_dtype=False)
    with torch.autocast('cpu', torch.bfloat16):
        check_layout(*mixed)


def test_the_first_tensor_must_not_be_left_out() -> None:
    with pytest.raises(TypeError, match='x must be a tensor, got NoneType'):
        check_layout(('x', None, 'B N'), ('y', X, 'B N d'))

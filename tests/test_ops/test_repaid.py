"""Compilation that has to pay: not before, not if it is wrong, not if it is no faster."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmgate.ops import repaid
from mmgate.ops.repaid import Repaid


def slowly(x: Tensor) -> tuple[Tensor, ...]:
    time.sleep(0.01)
    return (x * 2, x + 1)


def broken(x: Tensor) -> tuple[Tensor, ...]:
    raise RuntimeError('no compiler\nhere')


@pytest.mark.parametrize(
    'compiled, kept, said',
    [
        (lambda x: (x * 2, x + 1), True, 'kept'),
        (lambda x: (x * 2, x + 2), False, 'failed'),
        (lambda x: (time.sleep(0.05), (x * 2, x + 1))[1], False, 'left as it was'),
        (broken, False, 'no compiler'),
    ],
    ids=['faster', 'wrong', 'slower', 'raises'],
)
def test_it_is_compiled_once_that_pays(
    compiled: Callable[..., Any], kept: bool, said: str, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    caplog.set_level(logging.INFO, 'mmgate')
    calls: list[int] = []

    def counted(x: Tensor) -> Any:
        calls.append(1)
        return compiled(x)

    monkeypatch.setattr(repaid, 'WAIT', 0.03)
    monkeypatch.setattr(torch, 'compile', lambda function, dynamic: counted)
    function = Repaid(slowly)
    function(torch.ones(3))
    assert not calls
    for _ in range(8):
        assert torch.equal(function(torch.ones(3))[0], torch.full((3,), 2.0))
    assert (len(calls) > 2) is kept and calls and said in caplog.text

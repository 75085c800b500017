"""Declarations of mmgate 0.2 are refused, not ignored; to be removed in 0.4."""

from __future__ import annotations

import pytest

from mmgate import DenseAdapter, DenseGate, MapGate
from mmgate.former import OF_ADAPTERS, OF_GATES


@pytest.mark.parametrize('name', OF_GATES)
def test_a_gate_that_declares_a_former_name_is_refused(name: str) -> None:
    for base in (DenseGate, MapGate):
        with pytest.raises(TypeError, match=f"Mine declares '{name}', which mmgate no longer reads. Write instead: "):
            type('Mine', (base,), {name: True})


@pytest.mark.parametrize('name', OF_ADAPTERS)
def test_an_adapter_that_declares_a_former_name_is_refused(name: str) -> None:
    with pytest.raises(TypeError, match=f"Mine declares '{name}', which mmgate no longer reads. Write instead: "):
        type('Mine', (DenseAdapter,), {name: classmethod(lambda cls, host: None)})


def test_names_of_ones_own_are_free() -> None:
    class Mine(DenseGate):
        vits = ()

    class Adapter(DenseAdapter):
        trial_rate = 2.0

    assert Mine.vits == () and Adapter.trial_rate == 2

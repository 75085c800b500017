"""Draw the same random numbers in each test of a project, whichever tests run before it."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)

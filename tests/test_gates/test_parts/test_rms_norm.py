"""The norm of heads."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from mmgate.gates.parts.rms_norm import _RMSNorm


@pytest.mark.skipif(not hasattr(nn, 'RMSNorm'), reason='torch has had it since 2.4')
@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_is_torchs(dtype: torch.dtype) -> None:
    x, theirs, ours = torch.randn(2, 3, 8).to(dtype), nn.RMSNorm(8, eps=1e-5).to(dtype), _RMSNorm(8, eps=1e-5).to(dtype)
    nn.init.normal_(theirs.weight)
    ours.load_state_dict(theirs.state_dict())
    torch.testing.assert_close(ours(x), theirs(x), rtol=4 * torch.finfo(dtype).eps, atol=1e-6)

"""DGViT's feed-forward network."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from mmgate.gates.parts.swiglu import SwiGLU


@pytest.mark.parametrize('dropouts', [1, 2])
def test_swiglu_is_its_equation(dropouts: int) -> None:
    ffn = SwiGLU(8, 4, dropouts=dropouts, drop=0.5)
    x = torch.randn(2, 5, 8)
    first, second = (x @ ffn.expand.weight.T + ffn.expand.bias).chunk(2, -1)
    expected = x + (F.silu(first) * second) @ ffn.project.weight.T + ffn.project.bias
    torch.testing.assert_close(ffn.eval()(x), expected)
    assert sum(isinstance(m, nn.Dropout) for m in ffn.modules()) == dropouts
    for options, message in ((dict(dropouts=3), 'must be 1 or 2'), (dict(expansion=0.4), 'an even number')):
        with pytest.raises(ValueError, match=message):
            SwiGLU(8, **options)

"""SAGA against its equations."""

from __future__ import annotations

import pytest
import torch
from conftest import assert_same, values_and_gradients
from torch import nn

from mmgate.gates import SAGAAttention


@pytest.mark.parametrize('qk_scale', [None, 0.9], ids=['printed', 'scaled'])
def test_saga_is_its_printed_equations(qk_scale: float | None) -> None:
    """Eq. 9 and 10, token by token: ``[Q ((K * A)^T (V * B)) + DWC(V)] * G``, and by a scale and the tokens' number."""
    layer = SAGAAttention(12, 3, map_size=(3, 5), scale_by_tokens=qk_scale is not None, qk_scale=qk_scale).double()
    factor = 1.0 if qk_scale is None else qk_scale / 15
    nn.init.normal_(layer.gate.position_encoding)
    x = torch.randn(2, 15, 12, dtype=torch.float64, requires_grad=True)

    def printed(x: torch.Tensor) -> torch.Tensor:
        q, k, v = layer.qkv(x).chunk(3, -1)
        gated_k = (k + layer.gate.position_encoding) * layer.gate.gate_k(x).sigmoid()
        gated_v = v * layer.gate.gate_v(x).sigmoid()
        out = torch.zeros_like(q)
        for head in (slice(0, 4), slice(4, 8), slice(8, 12)):
            out[..., head] = sum(
                torch.einsum('bnc,bc,bd->bnd', q[..., head], gated_k[:, j, head], gated_v[:, j, head])
                for j in range(15)
            )
        return layer.proj((factor * out + layer.gate.convolve(v, (3, 5))) * layer.gate.gate_out(x))

    def computed(x: torch.Tensor) -> torch.Tensor:
        return layer(x, (3, 5))

    results = []
    for function in (printed, computed):
        layer.zero_grad()
        results.append(values_and_gradients(function, [x], [0]))
        results[-1] |= {name: parameter.grad for name, parameter in layer.named_parameters()}
    assert_same(results[1], results[0], rtol=1e-10, atol=1e-10)
    assert torch.autograd.gradcheck(computed, (x,), fast_mode=True)

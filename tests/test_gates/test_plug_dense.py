"""PLuG between queries and keys against its equations written out, with an open gate, positions and masks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.equations import C, Call, D, H, linear, opened, split

from mmgate import record
from mmgate.gates import PLuGMultiheadAttention


@torch.no_grad()
@pytest.mark.parametrize('backend', ['torch', 'chunked'])
@pytest.mark.parametrize(
    'options',
    [
        {},
        dict(heads='per_head'),
        dict(ratio=0.5),
        dict(activation='hardtanh'),
        dict(activation='softsign'),
        dict(position='post_softmax'),
        dict(residual=False, init='paper'),
    ],
    ids=str,
)
def test_dense_plug_is_its_equations(options: dict[str, Any], backend: str) -> None:
    """Eq. 1 to 7; Eq. 17 behind the softmax."""
    layer = opened(PLuGMultiheadAttention(C, H, batch_first=True, backend=backend, **options))
    call = Call(layer)
    gate_heads = H if 'heads' in options else 1
    rq, rk = (
        split(linear(p, x), gate_heads)
        for p, x in zip((layer.attn.gate.gate_q_proj, layer.attn.gate.gate_k_proj), call.inputs, strict=False)
    )
    assert rq.shape[-1] == options.get('ratio', 1) * D
    r = rq @ rk.mT / rq.shape[-1] ** 0.5
    (a, c), (b, e) = layer.attn.gate.gml.weight, layer.attn.gate.gml.bias
    squash = {'hardtanh': lambda x: x.clamp(-1, 1), 'softsign': lambda x: x / (1 + x.abs())}
    factor = squash.get(options.get('activation', 'tanh'), torch.tanh)((a * r + b) * (c * r + e))
    with record(layer, 'gate') as recording:
        call.run(layer)
    torch.testing.assert_close(recording['attn']['gate'].last, factor)
    factor = factor + options.get('residual', True)
    logits = call.q @ call.k.mT / D**0.5
    if 'position' in options:
        weights = (logits + call.bias).softmax(-1) * factor
    else:
        weights = (logits * factor + call.bias).softmax(-1)  # a masked pair stays masked
    torch.testing.assert_close(call.run(layer), call.identity + call.finish(layer, weights @ call.v))

"""Differential gated self-attention (M-DGSA)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.dense import DenseGate, GatedMultiheadAttention, Inputs
from mmgate.layers.base.gate import Sizes
from mmgate.ops.differential_attention import differential_attention, differential_map
from mmgate.registry import MODELS

from .parts.options import check_option
from .parts.rms_norm import RMSNorm


class DGSAGate(DenseGate):
    """An excitatory minus an inhibitory attention, weighted by a gate of each token and head.

    The heads are as wide as those of the vanilla attention, so that the projections keep their sizes. Each of the two
    attentions (streams) takes one half of a head's channels. Their difference is not the vanilla attention, and so
    there is no identity start.

    Args:
        sizes: Sizes of the host's attention.
        residual: Tensor that is added to the projected output: ``'query'`` (default) for the projected queries
            ``[Q+; Q-]`` as in section 4.2, ``'input'`` for the query input as in the paper's figure, or ``'none'`` as
            for text.
        lambda_init: The heads are scaled by ``1 - lambda_init`` after their norm. Default 0.8.
        learnable: True learns ``lambda_init``, from the value above on; the paper found it better fixed (A.5).
        gate_depth: Number of layers of the gate's network, 1 by default; more were worse (A.5). The paper does not
            describe a deeper network; here the layers before the last have C channels, with GELU between them.

    Raises:
        ValueError: The residual is unknown, the head width is odd, or ``gate_depth`` is below 1.

    Source: M-DGSA, sections 4.1 and 4.2, A.5.
    """

    undecayed = ('head_norm',)
    gate_readings = {'gate': 'heads'}
    two_streams = True

    def __init__(
        self,
        sizes: Sizes,
        *,
        residual: str = 'query',
        lambda_init: float = 0.8,
        learnable: bool = False,
        gate_depth: int = 1,
    ) -> None:
        check_option('residual', residual, ('query', 'input', 'none'))
        super().__init__(sizes)
        if gate_depth < 1:
            raise ValueError(f'gate_depth={gate_depth} must be the number of layers, from 1 on.')
        self.residual = residual
        self.lambda_start = lambda_init
        self.lambda_init: float | nn.Parameter = lambda_init
        if learnable:
            self.lambda_init = nn.Parameter(torch.full((1,), lambda_init))
        hidden = [nn.Linear(self.qdim, self.qdim) for _ in range(gate_depth - 1)]
        self.gate_hidden = nn.ModuleList(hidden)
        self.gate_proj = nn.Linear(self.qdim, self.num_heads)
        self.head_norm = RMSNorm(self.head_dim, eps=1e-5)

    def reset_gate(self) -> None:
        """Start the gate's network as torch does, the norm at 1, and a learnt ``lambda_init`` at its value."""
        for layer in (*self.gate_hidden, self.gate_proj):
            layer.reset_parameters()
        if isinstance(self.lambda_init, nn.Parameter):
            nn.init.constant_(self.lambda_init, self.lambda_start)
        nn.init.ones_(self.head_norm.get_parameter('weight'))

    def read_gate(self, name: str, *inputs: Tensor) -> Tensor:
        """Return the weight of the excitatory attention of every token and head, ``(B, H, N, 1)``."""
        return self._gate(inputs[0])

    def _gate(self, query_input: Tensor) -> Tensor:
        for layer in self.gate_hidden:
            query_input = F.gelu(layer(query_input))
        return self.gate_proj(query_input).sigmoid().transpose(1, 2)[..., None]  # (B, H, N, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the normalised heads."""
        heads = differential_attention(query, key, value, self._gate(inputs[0]), bias, dropout=self.drop_rate)
        return self.head_norm(heads) * (1 - self.lambda_init)

    @property
    def acts_after_projection(self) -> bool:
        """True if a residual is added to the output."""
        return self.residual != 'none'

    def finish(self, output: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Return the output with the residual added."""
        if self.residual == 'query':
            return output + query.transpose(1, 2).flatten(2)
        return output + inputs[0] if self.residual == 'input' else output

    def attention_map(self, query: Tensor, key: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the signed map ``g A+ - (1 - g) A-``."""
        return differential_map(query, key, self._gate(inputs[0]), bias)


@MODELS.register_module()
class DifferentialGatedMultiheadAttention(GatedMultiheadAttention):
    """M-DGSA in mmcv's ``MultiheadAttention``; it takes the options of :class:`DGSAGate`."""

    gate_type = DGSAGate

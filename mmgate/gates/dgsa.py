"""Multihead differential gated self-attention (M-DGSA): a gated difference of two softmax attentions."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.gate import Sizes, refuse_other_output
from mmgate.gates.base.dense import DenseGate, Inputs, dense_attention
from mmgate.notes import note
from mmgate.ops.differential import differential_attention, differential_map

from .differential import check_streams
from .parts.options import check_option, integer, number
from .parts.rms_norm import RMSNorm


class DGSAGate(DenseGate):
    """M-DGSA's gate: it weighs an excitatory against an inhibitory attention, for each token and head.

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
        gate_depth: Number of layers of the gate's network; more were worse (A.5). The paper does not
            describe a deeper network; here the layers before the last have C channels, with GELU between them.

    Raises:
        ConfigError: The residual is unknown or not as wide as the output, the heads cannot be split in two,
            ``gate_depth`` is no positive integer, or ``lambda_init`` no number below 1.

    Source: M-DGSA, sections 4.1 and 4.2, A.5.
    """

    undecayed = ('head_norm', 'lambda_init')

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
        check_streams(sizes)
        if residual != 'none':
            refuse_other_output(sizes)
        super().__init__(sizes)
        self.residual = residual
        self.lambda_start = number('lambda_init', lambda_init, below=1)
        self.lambda_init: float | nn.Parameter = self.lambda_start
        if learnable:
            self.lambda_init = nn.Parameter(torch.full((1,), self.lambda_start))
        hidden = [nn.Linear(self.qdim, self.qdim) for _ in range(integer('gate_depth', gate_depth) - 1)]
        self.gate_hidden = nn.ModuleList(hidden)
        self.gate_proj = nn.Linear(self.qdim, self.num_heads)
        self.head_norm = RMSNorm(self.head_dim, eps=1e-5)

    def reset(self) -> None:
        """Initialise the gate's network as torch does, the norm to 1, and a learnt ``lambda_init`` to its option."""
        for layer in (*self.gate_hidden, self.gate_proj):
            layer.reset_parameters()
        if isinstance(self.lambda_init, nn.Parameter):
            nn.init.constant_(self.lambda_init, self.lambda_start)
        nn.init.ones_(self.head_norm.get_parameter('weight'))

    def _gate(self, query_input: Tensor) -> Tensor:
        """Compute the gate, the weight of the excitatory attention for each token and head, ``(B, H, N, 1)``."""
        for layer in self.gate_hidden:
            query_input = F.gelu(layer(query_input))
        return self.gate_proj(query_input).sigmoid().transpose(1, 2)[..., None]  # (B, H, N, 1)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute the gated difference of both attentions; return the normalised, scaled heads ``(B, H, N, d)``."""
        gate = self._gate(inputs[0])
        note(self, 'gate', gate, 'heads')
        note(self, 'attention', lambda: differential_map(query, key, gate, bias))  # which may be negative
        note(self, 'values', value)
        heads = differential_attention(query, key, value, gate, bias, dropout=self.drop_rate)
        return self.head_norm(heads) * (1 - self.lambda_init)

    def finish(self, output: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Add the projected queries or the query input to the projected output, as the option ``residual`` says."""
        if self.residual == 'query':
            return output + query.transpose(1, 2).flatten(2)
        return output + inputs[0] if self.residual == 'input' else output


DifferentialGatedMultiheadAttention = dense_attention('DifferentialGatedMultiheadAttention', DGSAGate)

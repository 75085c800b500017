"""The attention of the differential transformer and of its second version: one softmax attention minus another."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes, refuse_to_split
from mmgate.gates.base.dense import DenseGate, Inputs, dense_attention
from mmgate.notes import note
from mmgate.ops.differential import (
    differential_streams,
    shared_key_attention,
    shared_key_map,
    stream_maps,
)

from .parts.options import check_option, integer, number
from .parts.rms_norm import RMSNorm

LAMBDAS = ('lambda_q1', 'lambda_k1', 'lambda_q2', 'lambda_k2')


def check_streams(sizes: Sizes) -> None:
    """Raise ConfigError if the heads of an attention cannot be split in two, half of the channels each."""
    refuse_to_split(sizes, 'splits heads in two')
    if sizes.head_dim % 2:
        raise ConfigError(f'The head width {sizes.head_dim} must be even, half of it for each stream.')


class DifferentialGate(DenseGate):
    """Differential attention as a gate: the difference of two softmax attentions ``(A1 - lambda A2) V``.

    ``lambda`` is one number for the layer: ``exp(lq1 lk1) - exp(lq2 lk2) + lambda_init`` with four learnt vectors, or
    ``lambda_init`` itself. The heads are as wide as those of the vanilla attention, so that the projections keep their
    sizes. Each of the two attentions (streams) takes one half of a head's channels. Each head is normalised and scaled
    by ``1 - lambda_init``. There is no identity start.

    Args:
        sizes: Sizes of the host's attention.
        depth: Number l of the layer, from 1 on, which gives ``lambda_init = 0.8 - 0.6 exp(-0.3 (l - 1))``.
        lambda_init: Value to use instead of that, such as M-DGSA's 0.8.
        learnable: True learns lambda; False makes it ``lambda_init``.

    Raises:
        ConfigError: The heads cannot be split in two, ``depth`` is no positive integer, or ``lambda_init`` no number
            below 1.

    The vectors start normal with deviation 0.1.

    Source: Differential transformer (Ye et al., 2024), Eq. 1 to 3.
    """

    undecayed = ('head_norm', *LAMBDAS)
    lambda_q1: nn.Parameter | None
    lambda_k1: nn.Parameter
    lambda_q2: nn.Parameter
    lambda_k2: nn.Parameter

    def __init__(
        self,
        sizes: Sizes,
        *,
        depth: int = 1,
        lambda_init: float | None = None,
        learnable: bool = True,
    ) -> None:
        check_streams(sizes)
        super().__init__(sizes)
        of_depth = 0.8 - 0.6 * math.exp(-0.3 * (integer('depth', depth) - 1))
        self.lambda_init = of_depth if lambda_init is None else number('lambda_init', lambda_init, below=1)
        for name in LAMBDAS:
            vector = nn.Parameter(torch.empty(self.head_dim // 2)) if learnable else None
            self.register_parameter(name, vector)
        self.head_norm = RMSNorm(self.head_dim, eps=1e-5)

    def reset(self) -> None:
        """Initialise the vectors of lambda from a normal distribution, and the norm to 1."""
        for name in LAMBDAS:
            vector = getattr(self, name)
            if vector is not None:
                nn.init.normal_(vector, std=0.1)
        nn.init.ones_(self.head_norm.get_parameter('weight'))

    def compute_lambda(self) -> Tensor | float:
        """Compute lambda, the weight of the attention that is subtracted."""
        if self.lambda_q1 is None:
            return self.lambda_init
        first = (self.lambda_q1 * self.lambda_k1).sum()
        second = (self.lambda_q2 * self.lambda_k2).sum()
        return first.exp() - second.exp() + self.lambda_init

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute the difference of both attentions; return the normalised, scaled heads ``(B, H, N, d)``."""
        weight = self.compute_lambda()

        def weights() -> Tensor:  # which may be negative
            plus, minus = stream_maps(query, key, bias)
            return plus - weight * minus

        note(self, 'attention', weights)
        note(self, 'values', value)
        first, second = differential_streams(query, key, value, bias, dropout=self.drop_rate)
        return self.head_norm(first - weight * second) * (1 - self.lambda_init)


DifferentialMultiheadAttention = dense_attention('DifferentialMultiheadAttention', DifferentialGate)


class DifferentialV2Gate(DenseGate):
    """Differential attention, version 2, as a gate: the difference of two attentions over the same keys and values.

    The heads are ``(A1 - lambda A2) V``. ``A1`` is the vanilla attention. ``A2`` has other queries for the same keys.
    Each token and head has a weight ``lambda = sigmoid(x W + b)``, where ``x`` is the query's input. No norm follows.

    With ``init='paper'`` the second queries are ``x W2 + b2``, in the parameters ``query_proj``. ``W`` and ``W2`` are
    drawn as by torch's Linear, and ``b`` so that lambda starts near ``lambda_init``; the source has no ``b``. This
    start is not the vanilla attention. A smaller ``lambda_init`` brings it closer, but the gradients of the gate are
    proportional to lambda: if it is too small, the gate does not learn.

    With ``init='identity'`` the second queries are the host's plus ``x W2 + b2``, in the parameters ``query_shift``,
    and the heads are divided by ``1 - lambda_init``. ``W``, ``W2`` and ``b2`` start at 0, so that ``A1 = A2`` and the
    output is the vanilla attention's for any ``lambda_init``. All parameters learn from the first step on. Both forms
    compute the same functions: the host's and the added projection sum up to one projection, and the output projection
    can contain the factor.

    Neither form loads a checkpoint of the other. The cost over the vanilla attention is one more projection and one
    more attention.

    Args:
        sizes: Sizes of the host's attention.
        init: ``'paper'`` (default) or ``'identity'``.
        lambda_init: Lambda at the start, above 0 and below 1. The default is near the source's.

    Raises:
        ConfigError: ``init`` is unknown, ``lambda_init`` is not between 0 and 1, or the host takes no further queries.

    Source: Differential Transformer V2 (Ye, Dong, Sun, Wei; January 2026, huggingface.co/blog/microsoft/diff-attn-v2).
    The identity start is ours.
    """

    # The bias holds lambda's start.
    undecayed = ('lambda_proj.bias',)

    def __init__(self, sizes: Sizes, *, init: str = 'paper', lambda_init: float = 0.5) -> None:
        check_option('init', init, ('paper', 'identity'))
        refuse_to_split(sizes, 'adds a second set of queries')
        super().__init__(sizes)
        self.init = init
        self.lambda_init = number('lambda_init', lambda_init, above=0, below=1)
        added = nn.Linear(self.qdim, self.embed_dims)
        if init == 'paper':
            self.query_proj = added
        else:
            self.query_shift = added
        self.lambda_proj = nn.Linear(self.qdim, self.num_heads)

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise the projections as the option ``init`` says, and lambda to about ``lambda_init``."""
        if self.init == 'paper':
            self.query_proj.reset_parameters()
            self.lambda_proj.reset_parameters()
        else:
            nn.init.zeros_(self.query_shift.weight)
            nn.init.zeros_(self.query_shift.bias)
            nn.init.zeros_(self.lambda_proj.weight)
        # The inverse of the sigmoid.
        self.lambda_proj.bias.fill_(math.log(self.lambda_init / (1 - self.lambda_init)))

    def _lambda(self, query_input: Tensor) -> Tensor:
        """Compute lambda, the weight of the subtracted attention, for each token and head: ``(B, H, N, 1)``."""
        return self.lambda_proj(query_input).sigmoid().transpose(1, 2)[..., None]  # (B, H, N, 1)

    def _second_query(self, query: Tensor, query_input: Tensor) -> Tensor:
        """Compute the queries of the second, subtracted attention, ``(B, H, N, d)``."""
        if self.init == 'paper':
            return self.scaled(self.split_heads(self.query_proj(query_input)))
        return query + self.scaled(self.split_heads(self.query_shift(query_input)))

    @property
    def _factor(self) -> float:
        """The constant that multiplies the heads: ``1 / (1 - lambda_init)`` with an identity start, else 1."""
        return 1.0 if self.init == 'paper' else 1 / (1 - self.lambda_init)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute the difference of both attentions and return the heads ``(B, H, N, d)``."""
        second = self._second_query(query, inputs[0])
        weight = self._lambda(inputs[0])
        factor = self._factor
        # with an identity start there is a further factor, so that no lambda changes nothing
        note(self, 'gate', weight, 'heads', unchanged=0 if self.init == 'paper' else None)
        note(self, 'attention', lambda: factor * shared_key_map(query, second, key, weight, bias))
        note(self, 'values', value)
        return factor * shared_key_attention(query, second, key, value, weight, bias, dropout=self.drop_rate)


DifferentialV2MultiheadAttention = dense_attention('DifferentialV2MultiheadAttention', DifferentialV2Gate)

"""The SDPA output gate: a learned gate on the output of softmax attention, or at one of four other places (G1-G5)."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes, StateDict, refuse_other_output
from mmgate.gates.base.dense import DenseGate, Inputs, dense_attention
from mmgate.notes import note

from .parts.options import check_option, integer, number

SDPA_POSITIONS = ('G1', 'G2', 'G3', 'G4', 'G5')
INITS = ('identity', 'paper')
SHARED = (False, 'average', 'projection')
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    'sigmoid': torch.sigmoid,
    'silu': F.silu,
    # The paper's NS-sigmoid (not sparse) stays above 1/2.
    'ns_sigmoid': lambda x: 0.5 + 0.5 * torch.sigmoid(x),
}
# By form and activation, the scale and the bias with which a gate of W = 0 is the identity; None if any scale will do.
# 1.278... is the number whose silu is 1.
IDENTITIES: dict[tuple[str, str], tuple[float | None, float]] = {
    ('multiplicative', 'sigmoid'): (2.0, 0.0),
    ('multiplicative', 'ns_sigmoid'): (4 / 3, 0.0),
    ('multiplicative', 'silu'): (1.0, 1.2784645427610738),
    ('additive', 'silu'): (None, 0.0),
}
# Index of the input from which the gate at a position is computed: 0 for the query, 1 for the key, 2 for the value.
_INPUT = {'G1': 0, 'G2': 2, 'G3': 1, 'G4': 0, 'G5': 0}


class SDPAGate(DenseGate):
    """Gate ``s = scale * act(x W + b)`` on the heads, values, keys, queries or output of softmax attention.

    ``x`` is the query input for G1, G4 and G5, the value input for G2 and the key input for G3, or the first channels
    of it.

    Args:
        sizes: Sizes of the host's attention.
        position: Tensor that is gated. ``'G1'`` (default): the heads, before the output projection. ``'G2'``: the
            values. ``'G3'``: the keys. ``'G4'``: the queries. ``'G5'``: the output of the output projection.
        granularity: ``'elementwise'`` (default) for one score per channel, ``'headwise'`` for one per head, which is
            not possible at G5, where there are no heads.
        head_shared: False (default) for scores of each head; no other value is possible at G5. ``'average'``, the
            paper's: all heads take the mean of the heads' scores, with as many parameters as without sharing.
            ``'projection'``, not in the paper: one projection, as wide as a head, makes the scores of all heads.
        form: ``'multiplicative'`` (default): ``y * s``, or ``'additive'``: ``y + s``.
        act: ``'sigmoid'`` (default), ``'silu'`` or ``'ns_sigmoid'``: ``0.5 + 0.5 sigmoid``, the paper's NS-sigmoid.
        scale: Factor of the score; 1 in the paper (default).
        init: ``'paper'`` (default): W as torch's Linear, b = 0; a sigmoid starts around 0.5. ``'identity'``: the
            vanilla attention, which silu allows in both forms (multiplicative with ``scale=1``), and a multiplicative
            sigmoid of ``scale=2`` or ns_sigmoid of ``scale=4/3``.
        gate_channels: Number of channels of ``x`` that the gate reads, the first ones. None (default), the paper's,
            reads all. modded-nanogpt reads 12 of 768, headwise.

    Raises:
        ConfigError: An option is unknown; ``granularity`` or ``head_shared`` need heads at G5, or the output there is
            not as wide as the heads; the options rule out an
            identity start; ``gate_channels`` is below 1 or above the channels of ``x``. On loading: the checkpoint
            is of a gate with other ``gate_channels``.

    Source: Gated attention, section 2: positions G1 to G5 and the gating variants. ``gate_channels``: the sparse
    attention gate of modded-nanogpt (github.com/KellerJordan/modded-nanogpt).
    """

    # The bias holds the identity start.
    undecayed = ('gate_bias',)

    def __init__(
        self,
        sizes: Sizes,
        *,
        position: str = 'G1',
        granularity: str = 'elementwise',
        head_shared: bool | str = False,
        form: str = 'multiplicative',
        act: str = 'sigmoid',
        scale: float = 1.0,
        init: str = 'paper',
        gate_channels: int | None = None,
    ) -> None:
        check_option('position', position, SDPA_POSITIONS)
        check_option('granularity', granularity, ('elementwise', 'headwise'))
        check_option('form', form, ('multiplicative', 'additive'))
        # The paper spells it in this way.
        act = 'ns_sigmoid' if act == 'NS-sigmoid' else act
        check_option('act', act, tuple(ACTIVATIONS))
        check_option('init', init, INITS)
        check_option('head_shared', head_shared, SHARED)
        if position == 'G5' and (granularity == 'headwise' or head_shared):
            raise ConfigError(
                "position='G5' gates what the output projection has mixed, where there are no heads: use "
                f"granularity='elementwise' and head_shared=False; got {granularity!r} and {head_shared!r}."
            )
        if position == 'G5':
            refuse_other_output(sizes)
        # A scale of 0 would switch the attention off.
        scale = number('scale', scale, above=0)
        if init == 'identity':
            _check_identity(form, act, scale)
        super().__init__(sizes)
        self.position = position
        self.form = form
        self.act = act
        self.scale = scale
        self.init = init
        self.head_shared = head_shared
        heads = 1 if head_shared == 'projection' else self.num_heads
        width = sizes.query_width or self.head_dim if position in ('G3', 'G4') else self.head_dim
        self.gate_shape = (heads, width if granularity == 'elementwise' else 1)
        outputs = self.gate_shape[0] * self.gate_shape[1]
        inputs = self._input_width
        meaning = f', the channels of the input that a gate at {position} reads here'
        given = inputs if gate_channels is None else gate_channels
        self.gate_channels = integer('gate_channels', given, most=inputs, meaning=meaning)
        self.gate_weight = nn.Parameter(torch.empty(outputs, self.gate_channels))
        self.gate_bias = nn.Parameter(torch.empty(outputs))

    @torch.no_grad()
    def reset(self) -> None:
        """Initialise the gate as the option ``init`` says."""
        if self.init == 'paper':
            # torch's nn.Linear starts within these bounds.
            bound = self.gate_weight.shape[1] ** -0.5
            self.gate_weight.uniform_(-bound, bound)
            self.gate_bias.zero_()
        else:
            self.gate_weight.zero_()
            self.gate_bias.fill_(IDENTITIES[self.form, self.act][1])

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        weight = state_dict.get(f'{prefix}gate_weight')
        if weight is not None and self._reads_others(weight):
            raise ConfigError(
                f'{prefix}gate_weight {tuple(weight.shape)} reads {weight.shape[1]} channels, but this gate reads '
                f'{self.gate_channels}. Set gate_channels={weight.shape[1]} for this checkpoint.'
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @property
    def _input_width(self) -> int:
        """Number of channels of the input from which the gate is computed, which depends on its position."""
        return (self.qdim, self.kdim, self.vdim)[_INPUT[self.position]]

    def _reads_others(self, weight: Tensor) -> bool:
        """Return True if a checkpoint's weight fits this gate except for another number of ``gate_channels``."""
        same_outputs = weight.dim() == 2 and weight.shape[0] == self.gate_weight.shape[0]
        return same_outputs and self.gate_channels != weight.shape[1] <= self._input_width

    def compute_gate(self, inputs: Inputs) -> Tensor:
        """Compute the gate ``(B, H|1, N|M, d|1)`` from query, key and value before projection, ``(B, N|M, C)``."""
        x = inputs[_INPUT[self.position]][..., : self.gate_channels]  # (B, N, k)
        score = F.linear(x, self.gate_weight, self.gate_bias)  # (B, N, H|1 * d|1)
        score = self.scale * ACTIVATIONS[self.act](score.unflatten(-1, self.gate_shape)).transpose(1, 2)
        return score.mean(1, keepdim=True) if self.head_shared == 'average' else score

    def _gated(self, heads: Tensor, inputs: Inputs) -> Tensor:
        """Apply the gate to queries, keys, values or heads ``(B, H, N, d)``; it is computed from the matching input."""
        gate = self.compute_gate(inputs)
        multiplies = self.form == 'multiplicative'
        note(self, 'gate', gate, 'heads', unchanged=1 if multiplies else 0)
        if multiplies:
            return heads * gate
        return heads + (self.scaled(gate) if self.position == 'G4' else gate)

    def _gated_at(self, position: str, x: Tensor, inputs: Inputs) -> Tensor:
        """Apply the gate to ``x`` if the gate acts at ``position``; return ``x`` unchanged otherwise."""
        return self._gated(x, inputs) if self.position == position else x

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Attend by torch's fused attention with the gate before it (G2, G3, G4) or after it (G1); return heads."""
        query = self._gated_at('G4', query, inputs)
        key = self._gated_at('G3', key, inputs)
        value = self._gated_at('G2', value, inputs)
        return self._gated_at('G1', super().attend(query, key, value, inputs, bias), inputs)

    def finish(self, output: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Return the projected output, with the gate applied if it acts at G5."""
        if self.position != 'G5':
            return output
        return self._gated(self.split_heads(output), inputs).transpose(1, 2).flatten(2)


def _check_identity(form: str, act: str, scale: float) -> None:
    """Raise ConfigError unless a gate with these options can start as the identity."""
    if (form, act) not in IDENTITIES:
        raise ConfigError(f"init='identity': an {form} {act} never is the identity; use act='silu' or init='paper'.")
    needed = IDENTITIES[form, act][0]
    if needed is not None and not isclose(scale, needed, rel_tol=1e-6):
        raise ConfigError(
            f"init='identity' with form={form!r} and act={act!r} needs scale={needed:.7g}, where the gate starts at 1; "
            f'got scale={scale}.'
        )


SDPAGatedMultiheadAttention = dense_attention('SDPAGatedMultiheadAttention', SDPAGate)

"""A small decoder whose attention is gated by mmgate's SDPA gate, in the rows of the paper's Table 1."""

from typing import Any
from zlib import crc32

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate import Sizes
from mmgate.gates import SDPAGate

# By the name of a row the options of SDPAGate; None: no gate.
VARIANTS: dict[str, dict[str, Any] | None] = {
    'none': None,
    'wide-ffn': None,  # the parameters of g1-elementwise, in the feed-forward networks
    'g1-elementwise': dict(),
    'g1-headwise': dict(granularity='headwise'),
    'g2-elementwise': dict(position='G2'),
    'g3-elementwise': dict(position='G3'),
    'g4-elementwise': dict(position='G4'),
    'g5-elementwise': dict(position='G5'),
    'g1-head-shared': dict(head_shared='average'),
    'g1-head-shared-projection': dict(head_shared='projection'),  # not the paper's
    'g1-additive': dict(form='additive', act='silu'),
    'g1-silu': dict(act='silu'),
    'g1-ns-sigmoid': dict(act='ns_sigmoid'),
}
Look = tuple[Tensor, Tensor | None]  # attention (B, H, N, N); the gate's scores (B, H|Hk|1, N, d|1) if there is one


class CausalAttention(nn.Module):
    """Causal attention with grouped keys and rotary positions, gated.

    mmgate's gate computes its scores. What is around it is here: queries and keys are gated
    before they are rotated, and keys and values (G2, G3) have as many gates as heads, fewer than queries.

    Args:
        width: Channels C.
        heads: Query heads H.
        kv_heads: Key and value heads Hk, of which H is a multiple.
        head_dim: Channels d of a head; at G5 H * d has to be C.
        gate: Options of :class:`~mmgate.gates.SDPAGate`, or None.
        norm_eps: Of an RMSNorm of each head's query and key; None: no such norm.
        bias: Whether the projections have a bias.
        rotated: Share of a head's channels that are rotated.
        theta: Base of the rotary frequencies.

    Source: Gated attention, section 2.
    """

    def __init__(
        self, width: int, heads: int, kv_heads: int, head_dim: int, gate: dict[str, Any] | None = None, *,
        norm_eps: float | None = None, bias: bool = False, rotated: float = 1.0, theta: float = 1e4
    ) -> None:  # fmt: skip
        super().__init__()
        self.group, self.head_dim = heads // kv_heads, head_dim
        self.q_proj = nn.Linear(width, heads * head_dim, bias=bias)
        self.k_proj, self.v_proj = (nn.Linear(width, kv_heads * head_dim, bias=bias) for _ in range(2))
        self.o_proj = nn.Linear(heads * head_dim, width, bias=bias)
        self.q_norm, self.k_norm = (nn.RMSNorm(head_dim, norm_eps) if norm_eps else nn.Identity() for _ in range(2))
        channels = torch.arange(0, int(head_dim * rotated), 2)
        self.register_buffer('frequencies', 1 / theta ** (channels / int(head_dim * rotated)), persistent=False)
        self.gate = None
        if gate is not None:  # last, so that what all variants have starts alike
            n = kv_heads if gate.get('position') in ('G2', 'G3') else heads
            self.gate = SDPAGate(Sizes(n * head_dim, n, inputs=(width, width, width)), **gate)
            self.gate.reset()

    def forward(self, x: Tensor, look: bool = False) -> tuple[Tensor, Look | None]:
        """Return the output ``(B, N, C)`` for tokens ``(B, N, C)``, and with ``look`` what the attention did."""
        score = None if self.gate is None else self.gate.compute_gate((x, x, x))
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)) for p in (self.q_proj, self.k_proj, self.v_proj))
        q, k, v = (t.transpose(1, 2) for t in (self.q_norm(q), self.k_norm(k), v))  # (B, H|Hk, N, d)
        q, k, v = self._gated('G4', q, score), self._gated('G3', k, score), self._gated('G2', v, score)
        k, v = (t.repeat_interleave(self.group, 1) for t in (self._rotate(k), v))  # (B, H, N, d)
        q, bias = self._rotate(q), x.new_full((x.shape[1],) * 2, float('-inf')).triu(1)
        heads = self._gated('G1', F.scaled_dot_product_attention(q, k, v, bias), score)
        out = self.o_proj(heads.transpose(1, 2).flatten(2))
        out = self._gated('G5', out, None if score is None else score.transpose(1, 2).flatten(2))
        weights = (q @ k.transpose(-1, -2) / self.head_dim**0.5 + bias).softmax(-1) if look else None
        return out, (weights, score) if look else None

    def _gated(self, position: str, x: Tensor, score: Tensor | None) -> Tensor:
        if score is None or self.gate.position != position:
            return x
        return x * score if self.gate.form == 'multiplicative' else x + score

    def _rotate(self, x: Tensor) -> Tensor:
        """Turn the channels (i, i + r) of every head, i < r, by the token's position times a frequency."""
        r, wide = len(self.frequencies), torch.promote_types(x.dtype, torch.float32)
        angles = torch.arange(x.shape[2], device=x.device, dtype=wide)[:, None] * self.frequencies
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        first, second, rest = x.split((r, r, x.shape[-1] - 2 * r), -1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


class SwiGLU(nn.Module):
    """``project(silu(a) * b)`` with ``[a; b] = expand(x)``, ``hidden`` channels together."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.expand = nn.Linear(width, hidden)
        self.project = nn.Linear(hidden // 2, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the output ``(B, N, C)`` for tokens ``(B, N, C)``."""
        gate, value = self.expand(x).chunk(2, -1)
        return self.project(F.silu(gate) * value)


class Decoder(nn.Module):
    """Four blocks of attention and SwiGLU, each after a norm; the embedding is the last layer, too."""

    def __init__(self, variant: str, rotated: float = 0.25, width: int = 64, heads: int = 4, kv_heads: int = 2) -> None:
        super().__init__()
        gate, sizes = VARIANTS[variant], (width, heads, kv_heads, width // heads)
        # G1's gate has width^2 + width parameters, a channel behind the expansion 1.5 width + 1
        wider = 2 * round(width * (width + 1) / (1.5 * width + 1) / 2) if variant == 'wide-ffn' else 0
        self.embedding = nn.Embedding(257, width)  # bytes, and one token that begins every text
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.attention, self.feed_forward = nn.ModuleList(), nn.ModuleList()
        for layer in range(4):
            self.feed_forward.append(SwiGLU(width, 4 * width + wider))
            with torch.random.fork_rng(devices=[]):  # so that a gate changes nothing that is drawn after it
                torch.manual_seed((torch.initial_seed() + crc32(f'attention {layer}'.encode())) % 2**63)
                self.attention.append(CausalAttention(*sizes, gate, rotated=rotated))
        self.norms = nn.ModuleList(nn.RMSNorm(width, eps=1e-6) for _ in range(9))

    def forward(self, tokens: Tensor, look: bool = False) -> tuple[Tensor, list[tuple[Look | None, Tensor]]]:
        """Return logits ``(B, N, 257)`` for ``(B, N)``, and what each layer did with what came out of it."""
        x, layers = self.embedding(tokens), []
        for i, (attention, feed_forward) in enumerate(zip(self.attention, self.feed_forward, strict=True)):
            y, seen = attention(self.norms[2 * i](x), look)
            x = x + y
            x = x + feed_forward(self.norms[2 * i + 1](x))
            layers.append((seen, x))
        return self.norms[-1](x) @ self.embedding.weight.T, layers

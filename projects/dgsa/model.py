"""An encoder that classifies texts, with vanilla, differential or differential gated attention."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate import swap_attention
from projects.dgsa.swiglu import SwiGLU

PAD, UNKNOWN = 0, 1
# By name the type and options of the gates; the differential transformer's get their layer's depth, too.
ATTENTIONS: dict[str, dict[str, Any] | None] = {
    'vanilla': None,
    'differential': dict(type='DifferentialMultiheadAttention'),
    'm_dgsa': dict(type='DifferentialGatedMultiheadAttention', residual='none'),
}
# Table 2's: DIFF Transformer and DGT, beside the same encoder with vanilla attention, and a Transformer, whose network
# is not expanded by e: the paper says "default configurations", here Linear(C, 4 C), ReLU, Linear(4 C, C)
TABLE_2 = ('transformer', *ATTENTIONS)


class FeedForward(nn.Module):
    """The original Transformer's network, four times as wide between; called as :class:`.SwiGLU`."""

    def __init__(self, dim: int, drop: float) -> None:
        super().__init__()
        self.first = nn.Linear(dim, 4 * dim)
        self.second = nn.Linear(4 * dim, dim)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor, identity: Tensor) -> Tensor:
        """Return ``identity`` and what the network makes of ``x``, ``(B, N, C)`` each."""
        return identity + self.drop(self.second(self.drop(self.first(x).relu())))


class Block(nn.Module):
    """Vanilla attention and a feed-forward network, each after a norm and with a residual."""

    def __init__(self, dim: int, heads: int, ffn: nn.Module, dropout: float) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(dim, eps=1e-5)
        self.ffn_norm = nn.RMSNorm(dim, eps=1e-5)
        self.attention = nn.MultiheadAttention(dim, heads, dropout, batch_first=True)
        self.ffn = ffn
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor, padding: Tensor) -> Tensor:
        """Return tokens ``(B, N, C)``; ``padding`` ``(B, N)`` is True where there is none."""
        y = self.attention_norm(x)
        x = x + self.drop(self.attention(y, y, y, key_padding_mask=padding, need_weights=False)[0])
        return self.ffn(self.ffn_norm(x), x)


class TextClassifier(nn.Module):
    """Embedded words and positions, blocks, a norm, the mean over the words, and a linear layer.

    Args:
        vocabulary: Words, padding among them as number 0.
        classes: Classes.
        attention: One of :data:`TABLE_2`; ``'transformer'`` is vanilla, with :class:`FeedForward`.
        dim: Channels C; ``layers``, ``heads`` and ``dropout`` are what they say.
        expansion: e of the feed-forward network ``Linear(C, e C), SwiGLU, Linear(e C / 2, C)``: 2, 4 or 16/3.
        length: Most words of a text.
        extra_hidden: Channels more between the halves of that network, for models of equal parameters.

    Source: M-DGSA, sections 4.3 and 5.2, Tables 4 and 6. Norms, positions and pooling are ours: the paper gives none.
    """

    def __init__(
        self,
        vocabulary: int,
        classes: int,
        *,
        attention: str = 'm_dgsa',
        dim: int = 256,
        layers: int = 6,
        heads: int = 8,
        expansion: float = 4,
        length: int = 256,
        dropout: float = 0.1,
        extra_hidden: int = 0,
    ) -> None:
        super().__init__()
        hidden = round(expansion * dim / 2) + extra_hidden

        def network() -> nn.Module:
            plain = attention == 'transformer'
            return FeedForward(dim, dropout) if plain else SwiGLU(dim, 2 * hidden / dim, drop=dropout)

        self.words = nn.Embedding(vocabulary, dim, PAD)
        angles = torch.arange(length)[:, None] * 10_000 ** (-torch.arange(0, dim, 2) / dim)
        self.register_buffer('positions', torch.cat((angles.sin(), angles.cos()), -1), persistent=False)
        self.blocks = nn.ModuleList(Block(dim, heads, network(), dropout) for _ in range(layers))
        self.norm = nn.RMSNorm(dim, eps=1e-5)
        self.classify = nn.Linear(dim, classes)
        self.drop = nn.Dropout(dropout)
        gate = ATTENTIONS['vanilla' if attention == 'transformer' else attention]
        if gate is not None:
            depths = [dict(depth=n + 1) if attention == 'differential' else {} for n in range(layers)]
            rules = [dict(path=f'blocks.{n}.attention', **gate, **depth) for n, depth in enumerate(depths)]
            swap_attention(self, rules)

    def forward(self, words: Tensor) -> Tensor:
        """Return logits ``(B, classes)`` of numbered words ``(B, N)``, with padding behind every text."""
        there = (words != PAD)[..., None]
        x = self.drop(self.words(words) + self.get_buffer('positions')[: words.shape[1]])
        for block in self.blocks:
            x = block(x, ~there[..., 0])
        return self.classify((self.norm(x) * there).sum(1) / there.sum(1))


def count_parameters(*args: Any, **options: Any) -> int:
    """Return the number of parameters of a :class:`TextClassifier` without making it."""
    with torch.device('meta'):
        return sum(parameter.numel() for parameter in TextClassifier(*args, **options).parameters())


def compared(
    vocabulary: int, classes: int, seed: int, *, of_table_2: bool = False, **options: Any
) -> dict[str, TextClassifier]:
    """Return one model of each attention, which start from the same numbers where shapes are the same.

    Args:
        vocabulary: As of :class:`TextClassifier`.
        classes: As there.
        seed: Of the start.
        of_table_2: The models of the paper's Table 2, each as it is. By default one of each attention, of as many
            parameters as the width of the feed-forward network allows.
        **options: As of :class:`TextClassifier`.
    """
    names = TABLE_2 if of_table_2 else tuple(ATTENTIONS)
    most = max(count_parameters(vocabulary, classes, attention=name, **options) for name in names)
    models: dict[str, TextClassifier] = {}
    for name in names:
        kwargs = dict(attention=name, **options)
        widths = range(1 if of_table_2 else 9)
        sizes = [count_parameters(vocabulary, classes, extra_hidden=n, **kwargs) for n in widths]
        extra = min(widths, key=lambda n: abs(sizes[n] - most))
        torch.manual_seed(seed)
        models[name] = TextClassifier(vocabulary, classes, extra_hidden=extra, **kwargs)
        own = models[name].state_dict()
        partners = [models[other].state_dict() for other in ('vanilla', 'transformer') if other in models]
        shared = {k: v for state in partners for k, v in state.items() if k in own and own[k].shape == v.shape}
        models[name].load_state_dict(own | shared)
    return models

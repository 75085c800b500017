"""Stand-ins for the language models of Grounding DINO, GLIP and SAN, whose weights and tables are downloads."""

from __future__ import annotations

import re
from typing import Any

import torch
from mmdet.models.dense_heads import atss_vlfusion_head
from torch import Tensor, nn

from mmgate.registry import MODELS

GLIP_WIDTH = 768  # its fusion knows no other


class _Tokens:
    """What create_positive_map asks of a tokenised caption: the token of a character, after a class token."""

    def __init__(self, caption: str) -> None:
        self.caption = caption
        self.words = re.findall(r'\w+|\.', caption)
        self.input_ids = torch.zeros(1, len(self.words) + 2)

    def char_to_token(self, index: int) -> int | None:
        for number, match in enumerate(re.finditer(r'\w+|\.', self.caption)):
            if match.start() <= index < match.end():
                return number + 1
        return None


@MODELS.register_module(force=True)
class TinyLanguageModel(nn.Module):
    """In the place of BERT: an embedding of words by their length; padded, and masked by token, as GLIP has it."""

    max_tokens = 256

    def __init__(self, width: int = 32, pad_to_max: bool = False) -> None:
        super().__init__()
        self.pad_to_max = pad_to_max
        self.language_backbone = nn.Module()
        self.language_backbone.body = nn.Module()
        self.language_backbone.body.language_dim = width
        self.embedding = nn.Embedding(16, width)

    def tokenizer(self, captions: list[str], **kwargs: Any) -> _Tokens:
        return _Tokens(captions[0])

    def forward(self, captions: list[str]) -> dict[str, Tensor]:
        lengths = [[0, *(min(len(word), 15) for word in _Tokens(caption).words), 0] for caption in captions]
        words = torch.tensor(lengths)
        count, tokens = words.shape
        masks = torch.ones(count, tokens, tokens, dtype=torch.bool)
        if self.pad_to_max:
            words = nn.functional.pad(words, (0, self.max_tokens - tokens))
            masks = (torch.arange(self.max_tokens) < tokens).long().expand(count, -1)
        embedded = self.embedding(words)  # (B, T, C)
        return dict(
            embedded=embedded,
            hidden=embedded,
            text_token_mask=torch.ones(count, tokens, dtype=torch.bool),
            masks=masks,
            position_ids=torch.arange(tokens).expand(count, tokens),
        )


class TinyBertConfig:
    """In the place of transformers' class, of which GLIP asks the width."""

    hidden_size = GLIP_WIDTH

    @classmethod
    def from_pretrained(cls, name: str) -> TinyBertConfig:
        return cls()


class TinyBertLayer(nn.Module):
    """In the place of GLIP's BERT layer: leaves language as it is."""

    def __init__(self, config: TinyBertConfig, **kwargs: Any) -> None:
        super().__init__()

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        return features


atss_vlfusion_head.BertConfig, atss_vlfusion_head.BertEncoderLayer = TinyBertConfig, TinyBertLayer

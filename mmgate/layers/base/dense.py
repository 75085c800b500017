"""What gated dense attentions share: torch's call signature inside, mmcv's outside.

A gate is a :class:`DenseAttention`, a drop-in for ``torch.nn.MultiheadAttention``; mmcv's ``MultiheadAttention`` holds
one as ``attn``, so its drop-in is mmcv's own class around ours, and every parameter keeps its name.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.layers.base.of_mmcv import MultiheadAttention
from mmgate.ops.layout import broadcasts_to, check_layout
from mmgate.ops.library import is_exporting
from mmgate.ops.masks import merge_masks

KEEP_ALL = dict(type='Dropout', drop_prob=0.0)  # mmcv's default
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value before projection, (B, N|M, C)
OF_TORCH = ('bias', 'add_bias_kv', 'add_zero_attn', 'kdim', 'vdim', 'device', 'dtype')  # what mmcv hands on


class DenseAttention(nn.MultiheadAttention):
    """Drop-in for ``torch.nn.MultiheadAttention``; a subclass computes the heads in :meth:`attend`.

    Attention weights are not returned unless ``need_weights`` is set: they are the N x M maps that the gates avoid.

    Args:
        embed_dim: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        dropout: Probability of dropping an attention weight.
        bias: Whether the projections have a bias.
        add_bias_kv: Has to be False: a gate reads inputs, and the key that this would append has none.
        add_zero_attn: Has to be False, likewise.
        kdim: Channels of the key input; C by default.
        vdim: Channels of the value input; C by default.
        batch_first: ``(B, N, C)`` in the place of ``(N, B, C)``.
        device: Of the parameters.
        dtype: Of the parameters.
        qdim: Channels of the query input, for hosts that project by themselves
            (:func:`~mmgate.hosts.core.without_projections`); C by default.

    Raises:
        ValueError: ``embed_dim`` is no multiple of ``num_heads``, a head of ``two_streams`` has an odd width, or a key
            would be appended.

    Attributes:
        two_streams: Whether the halves of a head attend separately.
        has_projections: Whether it projects by itself; else a host does, and calls :meth:`attend` alone.
        beyond_weights: Whether the heads are more than the weights of :meth:`attention_map` times the projected values.
        logit_factor: A host's own scale of the logits over ``1 / sqrt(d)``; the projected queries are multiplied by it.
    """

    two_streams = False
    logit_factor = 1.0
    beyond_weights = False
    has_projections = True

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        qdim: int | None = None,
    ) -> None:
        if embed_dim % num_heads:
            raise ValueError(f'embed_dim={embed_dim} is not a multiple of num_heads={num_heads}.')
        if self.two_streams and embed_dim // num_heads % 2:
            raise ValueError(f'The head width {embed_dim // num_heads} must be even, half of it for each stream.')
        if add_bias_kv or add_zero_attn:
            raise ValueError(
                f'{type(self).__name__} has no add_bias_kv and no add_zero_attn: no input belongs to the key that is '
                'appended, so its gate has nothing to read. Leave them at False.'
            )
        inputs: dict[str, Any] = dict(kdim=kdim, vdim=vdim, batch_first=batch_first, device=device, dtype=dtype)
        super().__init__(embed_dim, num_heads, dropout, bias=bias, **inputs)
        # torch's encoder layers have a fused path in eval mode that reads our weights and skips our forward;
        # it asks for this attribute, which nothing else needs after construction.
        self._qkv_same_embed_dim = False
        self.qdim = embed_dim if qdim is None else qdim

    def _reset_parameters(self) -> None:
        if self.has_projections:  # transformers calls this for every module of torch's class that it initialises
            self._qkv_same_embed_dim = self.in_proj_weight is not None
            super()._reset_parameters()
            self._qkv_same_embed_dim = False

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the heads ``(B, H, N, d)``.

        Args:
            query: Projected, ``(B, H, N, d)``.
            key: Projected, ``(B, H, M, d)``.
            value: Projected, ``(B, H, M, d)``.
            inputs: Query, key and value before projection, ``(B, N|M, C)``.
            bias: Mask bias, broadcastable to ``(B, H, N, M)``.
        """
        raise TypeError(f'{type(self).__name__} computes no attention; use a subclass.')

    def attention_map(self, query: Tensor, key: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Return the attention weights ``(B, H, N, M)`` for analysis."""
        raise TypeError(f'{type(self).__name__} computes no attention; use a subclass.')

    def merge(self, heads: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Return the output ``(B, N, C)`` from the heads ``(B, H, N, d)``."""
        return self.finish(self.out_proj(heads.transpose(1, 2).flatten(2)), query, inputs)

    def finish(self, output: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Return the output ``(B, N, C)`` from the projected heads: the same, unless a gate acts there."""
        return output

    @property
    def finishes(self) -> bool:
        """Whether :meth:`finish` does something, for which the output has to be as wide as the heads together."""
        return False

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend; the arguments are those of ``torch.nn.MultiheadAttention``.

        A row whose keys are all masked gets zeros from the heads, and no gradient.

        Returns:
            The output, and the weights ``(B, N, M)`` or ``(B, H, N, M)`` if ``need_weights``, else None.

        Raises:
            TypeError: An input is no tensor.
            ValueError: Inputs or masks of a wrong shape or dtype.
        """
        if is_causal and attn_mask is None:
            raise ValueError('is_causal needs attn_mask, as in torch.nn.MultiheadAttention.')
        of_query, of_key = ('B N', 'B M') if self.batch_first else ('N B', 'M B')
        check_layout(
            ('query', query, f'{of_query} {self.qdim}'),
            ('key', key, f'{of_key} {self.kdim}'),
            ('value', value, f'{of_key} {self.vdim}'),
        )
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        inputs = (query, key, value)
        q, k, v = self.project(inputs)
        bias, dead = merge_masks(attn_mask, key_padding_mask, query.shape[0], self.num_heads, q.dtype)
        full = (*q.shape[:3], k.shape[2])
        if bias is not None and not is_exporting() and not broadcasts_to(bias.shape, full):
            raise ValueError(
                f'attn_mask and key_padding_mask must fit (B, H, N, M) = {tuple(full)}, got '
                f'{" and ".join(str(tuple(m.shape)) for m in (attn_mask, key_padding_mask) if m is not None)}.'
            )
        scaled = q if self.logit_factor == 1 else q * self.logit_factor
        heads = self.attend(scaled, k, v, inputs, bias)
        if dead is not None:
            heads = heads.masked_fill(dead, 0.0)
        output = self.merge(heads, q, inputs)
        weights = None
        if need_weights:
            weights = self.attention_map(scaled, k, inputs, bias)
            weights = weights if dead is None else weights.masked_fill(dead, 0.0)
            weights = weights.mean(1) if average_attn_weights else weights
        output = output.transpose(0, 1)
        if self.training:  # a dropout that follows draws in the order of memory, which is torch's: tokens first
            output = output.contiguous()
        return output.transpose(0, 1) if self.batch_first else output, weights

    def project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value ``(B, H, N|M, d)``."""
        if self.in_proj_weight is None:  # kdim or vdim
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        else:
            weights = self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (nn.functional.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        query, key, value = (self.split_heads(x) for x in projected)
        return query, key, value

    def split_heads(self, x: Tensor) -> Tensor:
        """Return ``(B, N, H * d)`` as ``(B, H, N, d)``."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    @property
    def like(self) -> dict[str, Any]:
        """Device and dtype, as keyword arguments for what a subclass adds."""
        return dict(device=self.out_proj.weight.device, dtype=self.out_proj.weight.dtype)

    @property
    def _drop(self) -> float:
        return self.dropout if self.training else 0.0


class GatedMultiheadAttention(MultiheadAttention):
    """mmcv's ``MultiheadAttention`` around a :class:`DenseAttention`; a subclass names it in ``core``.

    Takes mmcv's arguments, and those that mmcv hands on to torch's module.

    Args:
        embed_dims: Channels C.
        num_heads: Heads H.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Dropout after the output projection.
        dropout_layer: Dropout or drop path before the identity is added.
        init_cfg: mmengine's initialisation config.
        batch_first: ``(B, N, C)`` in the place of ``(N, B, C)``.
        dropout: mmcv's deprecated name for ``attn_drop`` and the probability in ``dropout_layer`` at once.
        **options: The options of ``core``, and torch's ``bias``, ``add_bias_kv``, ``add_zero_attn``, ``kdim``,
            ``vdim``, ``device`` and ``dtype``, see :class:`DenseAttention`.
    """

    core: type[DenseAttention]

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict | None = KEEP_ALL,
        init_cfg: dict | None = None,
        batch_first: bool = False,
        *,
        dropout: float | None = None,
        **options: Any,
    ) -> None:
        of_torch = {name: options.pop(name) for name in OF_TORCH if name in options}
        super().__init__(
            embed_dims,
            num_heads,
            attn_drop,
            proj_drop,
            dropout_layer and dict(dropout_layer),  # mmcv writes a deprecated dropout into it
            init_cfg=init_cfg,
            batch_first=batch_first,
            **of_torch,
            **({} if dropout is None else dict(dropout=dropout)),
        )
        drop = attn_drop if dropout is None else dropout
        self.attn = self.core(embed_dims, num_heads, drop, **of_torch, **options)

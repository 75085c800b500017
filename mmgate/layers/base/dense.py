"""Gates between the projections of dense attention, and torch's and mmcv's multi-head attention with one.

A dense gate has :meth:`DenseGate.attend`. A host's adapter, a :class:`DenseHost`, projects, calls it and projects
again. The adapter of ``torch.nn.MultiheadAttention`` is here, since mmcv's, PVT's and other modules hold one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.gate import Gate, Sizes
from mmgate.layers.base.gated import GatedModule, gated_class
from mmgate.layers.base.of_mmcv import MultiheadAttention
from mmgate.ops.layout import broadcasts_to, check_layout
from mmgate.ops.masks import merge_masks
from mmgate.ops.tracing import is_exporting

KEEP_ALL = dict(type='Dropout', drop_prob=0.0)  # mmcv's default
Inputs = tuple[Tensor, Tensor, Tensor]  # query, key and value before projection, (B, N|M, C)
OF_TORCH = ('bias', 'add_bias_kv', 'add_zero_attn', 'kdim', 'vdim', 'device', 'dtype')  # what mmcv hands on


class DenseGate(Gate):
    """Base of the gates between the projections of dense attention; a subclass computes the heads in :meth:`attend`.

    Args:
        sizes: Of the host's attention.

    Raises:
        ValueError: The channels are no multiple of the heads, or a head of ``two_streams`` has an odd width.

    Attributes:
        two_streams: Whether the halves of a head attend separately.
        beyond_weights: Whether the heads are more than the weights of :meth:`attention_map` times the projected
            values.
        qdim: Channels of the query input.
        kdim: Channels of the key input.
        vdim: Channels of the value input.
    """

    two_streams = False
    beyond_weights = False

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        if self.two_streams and self.head_dim % 2:
            raise ValueError(f'The head width {self.head_dim} must be even, half of it for each stream.')
        self.qdim, self.kdim, self.vdim = sizes.input_widths

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
        """Return the attention weights ``(B, H, N, M)`` for analysis; the arguments are those of :meth:`attend`."""
        raise TypeError(f'{type(self).__name__} computes no attention; use a subclass.')

    def finish(self, output: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Return the output ``(B, N, C)`` from the projected heads: the same, unless a gate acts there."""
        return output

    @property
    def finishes(self) -> bool:
        """Whether :meth:`finish` does something, for which the output has to be as wide as the heads together."""
        return False


class DenseHost(GatedModule):
    """Base of the adapters of dense attention."""

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of a host that names them as mm packages do."""
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn_drop.p)

    @classmethod
    def make_gate(cls, host: Any, gate_type: type[Gate], **options: Any) -> nn.Module:
        """Return the gate for a host, see :meth:`.GatedModule.make_gate`."""
        gate: Any = super().make_gate(host, gate_type, **options)
        sizes = cls.sizes(host)
        refuse_finish(gate, sizes.channels if sizes.output is None else sizes.output)
        return gate

    def attend_gated(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        inputs: Inputs,
        out_proj: Callable[[Tensor], Tensor],
        bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        gate: DenseGate | None = None,
        logit_factor: float = 1.0,
    ) -> Tensor:
        """Attend with the gate between the host's projections.

        Args:
            projected: Query, key and value ``(B, H, N|M, d)``; the value may have another width.
            inputs: What the host made them from, ``(B, N|M, C)``, position embedding included: what gates read.
            out_proj: The host's output projection.
            bias: Added to the logits, broadcastable to ``(B, H, N, M)``; no row -inf throughout.
            attn_mask: See :func:`~mmgate.ops.masks.merge_masks`.
            key_padding_mask: ``(B, M)``; see there.
            gate: The gate, by default the child of that name.
            logit_factor: The host's scale of the logits over ``1 / sqrt(d)``.

        Returns:
            ``(B, N, C)``. A row whose keys are all masked gets zeros from the heads.
        """
        gate = self.gate if gate is None else gate
        query, key, value = projected
        masks, dead = merge_masks(attn_mask, key_padding_mask, query.shape[0], query.shape[1], query.dtype)
        if masks is not None:
            bias = masks if bias is None else bias + masks
        scaled = query if logit_factor == 1 else query * logit_factor
        heads = gate.attend(scaled, key, value, inputs, bias)
        if dead is not None:
            heads = heads.masked_fill(dead, 0.0)
        return gate.finish(out_proj(gate.merge_heads(heads)), query, inputs)


def refuse_finish(gate: DenseGate, width: int) -> None:
    """Raise ValueError if ``gate`` acts on a host's output of another ``width`` than that of the heads together."""
    if gate.finishes and width != gate.embed_dims:
        raise ValueError(
            'the gate acts after an output projection as wide as the heads, but this one goes from '
            f'{gate.embed_dims} to {width} channels.'
        )


def refuse_scale(host: Any) -> str | None:
    """Return that ``host`` scales its logits by another number than ``1 / sqrt(d)``, which a gate would lose."""
    default = (host.embed_dims // host.num_heads) ** -0.5
    return None if host.scale == default else f'this {type(host).__name__} has another qk_scale than 1 / sqrt(d)'


class GatedTorchAttention(DenseHost):
    """Adapter of ``torch.nn.MultiheadAttention``.

    Attention weights are not returned unless ``need_weights`` is set: they are the N x M maps that gates avoid.
    """

    embed_dim: int
    num_heads: int
    batch_first: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    out_proj: nn.Linear

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the sizes of torch's module."""
        return Sizes(
            host.embed_dim, host.num_heads, inputs=(host.embed_dim, host.kdim, host.vdim), dropout=host.dropout
        )

    @classmethod
    def refuses(cls, host: Any, gate: Any) -> str | None:
        """Refuse a key that torch would append: no input belongs to it, so that a gate has nothing to read."""
        if host.bias_k is not None or host.add_zero_attn:
            return 'no input belongs to the key that add_bias_kv or add_zero_attn appends; leave them at False'
        return None

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # torch's encoder layers ask for this before a fused path in eval mode that skips a module's forward
        return False

    @_qkv_same_embed_dim.setter
    def _qkv_same_embed_dim(self, value: bool) -> None:
        vars(self)['_qkv_same_embed_dim'] = value

    def _reset_parameters(self) -> None:
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = apart if self.in_proj_weight is None else (self.in_proj_weight,)
        for weight in weights:
            nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)

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
            ('query', query, f'{of_query} {self.embed_dim}'),
            ('key', key, f'{of_key} {self.kdim}'),
            ('value', value, f'{of_key} {self.vdim}'),
        )
        if not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        inputs = (query, key, value)
        q, k, v = self.project(inputs)
        self._check_masks(attn_mask, key_padding_mask, q, k)
        output = self.attend_gated(
            (q, k, v), inputs, self.out_proj, attn_mask=attn_mask, key_padding_mask=key_padding_mask
        )
        weights = None
        if need_weights:
            bias, dead = merge_masks(attn_mask, key_padding_mask, query.shape[0], self.num_heads, q.dtype)
            weights = self.gate.attention_map(q, k, inputs, bias)
            weights = weights if dead is None else weights.masked_fill(dead, 0.0)
            weights = weights.mean(1) if average_attn_weights else weights
        output = output.transpose(0, 1)
        if self.training:  # a dropout that follows draws in the order of memory, which is torch's: tokens first
            output = output.contiguous()
        return output.transpose(0, 1) if self.batch_first else output, weights

    def project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return query, key and value ``(B, H, N|M, d)``."""
        apart = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)  # of kdim or vdim
        weights = apart if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        query, key, value = (self.gate.split_heads(x) for x in projected)
        return query, key, value

    def _check_masks(self, attn_mask: Tensor | None, key_padding_mask: Tensor | None, q: Tensor, k: Tensor) -> None:
        masks = [mask for mask in (attn_mask, key_padding_mask) if mask is not None]
        if not masks or is_exporting():
            return
        bias, _ = merge_masks(attn_mask, key_padding_mask, q.shape[0], self.num_heads, q.dtype)
        full = (*q.shape[:3], k.shape[2])
        if bias is not None and not broadcasts_to(bias.shape, full):
            shapes = ' and '.join(str(tuple(mask.shape)) for mask in masks)
            raise ValueError(f'attn_mask and key_padding_mask must fit (B, H, N, M) = {tuple(full)}, got {shapes}.')


class GatedMultiheadAttention(MultiheadAttention):
    """mmcv's ``MultiheadAttention`` with a gate in the module that it holds; a subclass names the gate.

    It takes mmcv's arguments, and those that mmcv hands on to torch's module.

    Args:
        embed_dims: Channels C.
        num_heads: Heads H.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Dropout after the output projection.
        dropout_layer: Dropout or drop path before the identity is added.
        init_cfg: mmengine's initialisation config.
        batch_first: ``(B, N, C)`` instead of ``(N, B, C)``.
        dropout: mmcv's deprecated name for ``attn_drop`` and the probability in ``dropout_layer`` at once.
        **options: The options of the gate, and torch's ``bias``, ``add_bias_kv``, ``add_zero_attn``, ``kdim``,
            ``vdim``, ``device`` and ``dtype``.

    Attributes:
        gate_type: The gate's class.
    """

    gate_type: type[DenseGate]

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
        make_gated(self.attn, self.gate_type, **options)

    def init_weights(self) -> None:
        """Initialise as mmcv does, then the gate; detectors call this after a xavier pass over everything."""
        super().init_weights()
        gate: Any = self.attn.gate
        gate.init_weights()


def make_gated(host: nn.MultiheadAttention, gate_type: type[DenseGate], **options: Any) -> nn.MultiheadAttention:
    """Gate a module of torch's that belongs to no model yet, and return it.

    Args:
        host: The module.
        gate_type: The gate's class.
        **options: Of the gate.

    Raises:
        ValueError: The gate does not fit.
    """
    gate: Any = GatedTorchAttention.make_gate(host, gate_type, **options)
    gate.to(device=host.out_proj.weight.device, dtype=host.out_proj.weight.dtype)
    gate.reset_gate()
    host.__class__ = gated_class(GatedTorchAttention, type(host))
    host.add_module('gate', gate)
    return host

"""Base classes of gates in dense attention (between its projections), and multi-head attention with such a gate.

A dense gate has :meth:`DenseGate.attend`. The adapter of its host, a :class:`DenseAdapter`, computes the host's query,
key and value projections, calls the gate, and applies the host's output projection. The adapter of
``torch.nn.MultiheadAttention`` is here, because mmcv's, PVT's and other attentions hold such a module.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.adapter import Adapter, is_off
from mmgate.errors import ConfigError
from mmgate.gate import Gate, Sizes
from mmgate.gates.base.mmcv_or_torch import MultiheadAttention
from mmgate.gates.base.named import attention_named, gate_alone
from mmgate.notes import note, with_note
from mmgate.ops.layout import broadcasts_to, check_layout
from mmgate.ops.masks import merge_masks
from mmgate.ops.tracing import is_exporting

# Query, key and value before projection, (B, N|M, C) each.
Inputs = tuple[Tensor, Tensor, Tensor]
NO_INPUT = 'no input belongs to the key that add_bias_kv or add_zero_attn appends; leave them at False.'


class DenseGate(Gate):
    """Base class of gates in dense attention; a subclass computes gate and attention in :meth:`attend`.

    The host keeps its projections. By itself it is softmax attention without a gate, with which vanilla attention is
    recorded.

    Args:
        sizes: Sizes of the host's attention.

    Raises:
        ConfigError: The channels are no multiple of the heads, or no gate fits the host.

    Attributes:
        qdim: Channels of the query input.
        kdim: Channels of the key input.
        vdim: Channels of the value input.
        logit_factor: Factor by which the host's logits exceed those of the usual scale ``1 / sqrt(d)``.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        if sizes.why_no_gate and not is_vanilla(self):
            raise ConfigError(sizes.why_no_gate)
        self.qdim, self.kdim, self.vdim = sizes.input_widths
        usual = (sizes.query_width or self.head_dim) ** -0.5
        scale = sizes.scale or usual
        self.logit_factor = 1.0 if scale == usual else scale / usual

    def scaled(self, query: Tensor) -> Tensor:
        """Scale projected queries, or what a gate adds to them, so that the host's logits are ``q k / sqrt(d)``."""
        return query if self.logit_factor == 1 else query * self.logit_factor

    def attend(self, query: Tensor, key: Tensor, value: Tensor, inputs: Inputs, bias: Tensor | None) -> Tensor:
        """Compute attention with the gate, between the projections; return the heads ``(B, H, N, d)``.

        Args:
            query: Projected queries ``(B, H, N, d)``, :meth:`scaled`.
            key: Projected keys ``(B, H, M, d)``.
            value: Projected values ``(B, H, M, d)``.
            inputs: Query, key and value before projection, ``(B, N|M, C)``.
            bias: Bias of the logits, broadcastable to ``(B, H, N, M)``, -inf where a key is masked; or None.

        Figures draw the weights ``(B, H, N, M)`` and the values ``(B, H, M, d)`` that they multiply, if the method
        notes them as ``'attention'`` and ``'values'``. torch's module returns the weights that are noted.
        """
        note(self, 'attention', lambda: softmax_map(query, key, bias))
        note(self, 'values', value)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, dropout_p=self.drop_rate)

    def finish(self, output: Tensor, query: Tensor, inputs: Inputs) -> Tensor:
        """Return the output after the output projection; a gate that acts there overrides this to change it.

        Args:
            output: Heads after the output projection, ``(B, N, C)``.
            query: Projected queries ``(B, H, N, d)``, not scaled.
            inputs: Query, key and value before projection.
        """
        return output


def softmax_map(query: Tensor, key: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the weights ``(B, H, N, M)`` of softmax attention, which fused kernels do not form."""
    logits = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
    return (logits if bias is None else logits + bias).softmax(-1)


class WithSizes(Protocol):
    """Protocol of attention modules that name their sizes as mm packages do."""

    embed_dims: int
    num_heads: int
    attn_drop: nn.Dropout


class DenseAdapter(Adapter):
    """Base class of the adapters that let gates into dense attention (softmax between queries and keys)."""

    @classmethod
    def sizes(cls, host: WithSizes) -> Sizes:
        """Read channels, heads, dropout and scale off an attention of the mm packages (the host), for its gate."""
        scale = getattr(host, 'scale', None)
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn_drop.p, scale=scale)

    def attend_gated(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        inputs: Inputs,
        out_proj: Callable[[Tensor], Tensor],
        bias: Tensor | None = None,
        attn_mask: Tensor | None = None,
        key_padding_mask: Tensor | None = None,
        gate: DenseGate | None = None,
    ) -> Tensor:
        """Attend with the gate, given projected queries, keys and values, and apply the output projection.

        Args:
            projected: Projected query, key and value ``(B, H, N|M, d)``; the value may have another width.
            inputs: Tensors ``(B, N|M, C)`` that the host projected, position embedding included. Gates read these.
            out_proj: Output projection of the host.
            bias: Bias of the logits, broadcastable to ``(B, H, N, M)``; no row may be -inf throughout.
            attn_mask: Mask ``(N, M)``, ``(B * H, N, M)`` or ``(B, H|1, N, M)``. As in ``torch.nn.MultiheadAttention``,
                a bool mask is True where a key is hidden, the opposite of ``F.scaled_dot_product_attention``; a float
                mask is added to the logits.
            key_padding_mask: Mask of keys ``(B, M)``, with the same meaning.
            gate: Gate to use, by default the child ``gate``.

        Returns:
            ``(B, N, C)``. The heads are 0 in a row whose keys are all masked.
        """
        query = projected[0]
        masks, all_masked = merge_masks(attn_mask, key_padding_mask, query.shape[0], query.shape[1], query.dtype)
        if masks is not None:
            bias = masks if bias is None else bias + masks
        return self.attend_merged(projected, inputs, out_proj, bias, all_masked, gate)

    def attend_merged(
        self,
        projected: tuple[Tensor, Tensor, Tensor],
        inputs: Inputs,
        out_proj: Callable[[Tensor], Tensor],
        bias: Tensor | None,
        all_masked: Tensor | None,
        gate: DenseGate | None = None,
    ) -> Tensor:
        """Attend as :meth:`attend_gated` does, given what :func:`.merge_masks` returns."""
        gate = self.gate if gate is None else gate
        query, key, value = projected
        heads = gate.attend(gate.scaled(query), key, value, inputs, bias)
        if all_masked is not None:
            heads = heads.masked_fill(all_masked, 0.0)
        return gate.finish(out_proj(gate.merge_heads(heads)), query, inputs)


def is_vanilla(gate: Any) -> bool:
    """Return True for attention without a gate, with which a vanilla host is recorded."""
    return type(gate) is DenseGate


class TorchAttentionAdapter(DenseAdapter):
    """Adapter that lets dense gates into ``torch.nn.MultiheadAttention``.

    As in torch, attention weights are returned unless ``need_weights=False``. They are N x M maps, which the gates'
    operators otherwise keep out of memory; mmcv's attention and others around torch's drop them, and get none.
    """

    embed_dim: int
    num_heads: int
    batch_first: bool
    in_proj_weight: Tensor | None
    in_proj_bias: Tensor | None
    out_proj: nn.Linear

    @classmethod
    def sizes(cls, host: nn.MultiheadAttention) -> Sizes:  # type: ignore[override]
        """Read channels, heads and dropout off torch's module (the host), for its gate."""
        appends = host.bias_k is not None or host.add_zero_attn
        return Sizes(
            host.embed_dim,
            host.num_heads,
            inputs=(host.embed_dim, host.kdim, host.vdim),
            dropout=host.dropout,
            why_no_gate=NO_INPUT if appends else '',
        )

    @property
    def _is_wrapped(self) -> bool:
        """True inside the attention of mmcv and others, which take the output alone and say so by no argument."""
        return 'attn' in self.gating.inner.split('.')

    @property
    def _qkv_same_embed_dim(self) -> bool:
        # In eval mode torch's encoder layers take a fused path, which skips the forward of a module that has this.
        return is_off(self) and self.in_proj_weight is not None

    def _reset_parameters(self) -> None:
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else (self.in_proj_weight,)
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
        need_weights: bool | None = None,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend with the gate; arguments and results are those of ``torch.nn.MultiheadAttention``, or unbatched.

        The heads are 0 in a row whose keys are all masked, and give it no gradient. ``need_weights`` is True by
        default, but False inside mmcv's attention and others around torch's.

        Returns:
            The output, and the weights ``(B, N, M)`` or ``(B, H, N, M)``, without dropout; or None for the weights if
            ``need_weights=False`` or if the gate notes none in its :meth:`.DenseGate.attend`.

        Raises:
            TypeError: An input is no tensor.
            ValueError: Inputs or masks of a wrong shape or dtype.
        """
        if is_causal and attn_mask is None:
            raise ValueError('is_causal needs attn_mask, as in torch.nn.MultiheadAttention.')
        if isinstance(query, Tensor) and query.dim() == 2:
            check_layout(
                ('query', query, f'N {self.embed_dim}'),
                ('key', key, f'M {self.kdim}'),
                ('value', value, f'M {self.vdim}'),
            )
            axis = 0 if self.batch_first else 1
            padding = None if key_padding_mask is None else key_padding_mask[None]
            query, key, value = (x.unsqueeze(axis) for x in (query, key, value))
            # Not by self.forward, which others may have wrapped.
            output, weights = TorchAttentionAdapter.forward(
                self, query, key, value, padding, need_weights, attn_mask, average_attn_weights, is_causal
            )
            return output.squeeze(axis), None if weights is None else weights[0]
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
        for _ in range(k.shape[2] - key.shape[1] if is_vanilla(self.gate) else 0):  # which torch has appended
            attn_mask = None if attn_mask is None else F.pad(attn_mask, (0, 1))
            key_padding_mask = None if key_padding_mask is None else F.pad(key_padding_mask, (0, 1))
        bias, all_masked = merge_masks(attn_mask, key_padding_mask, q.shape[0], self.num_heads, q.dtype)
        full = (*q.shape[:3], k.shape[2])
        if bias is not None and not is_exporting() and not broadcasts_to(bias.shape, full):
            masks = (mask for mask in (attn_mask, key_padding_mask) if mask is not None)
            shapes = ' and '.join(str(tuple(mask.shape)) for mask in masks)
            raise ValueError(f'attn_mask and key_padding_mask must fit (B, H, N, M) = {tuple(full)}, got {shapes}.')
        if need_weights is None:
            need_weights = not self._is_wrapped
        attend = partial(self.attend_merged, (q, k, v), inputs, self.out_proj, bias, all_masked)
        output, weights = with_note(self.gate, 'attention', attend) if need_weights else (attend(), None)
        if weights is not None:
            weights = weights if all_masked is None else weights.masked_fill(all_masked, 0.0)
            weights = weights.mean(1) if average_attn_weights else weights
        output = output.transpose(0, 1)
        # A dropout that follows draws its numbers in the order of memory. In torch's module tokens come first there.
        if self.training:
            output = output.contiguous()
        return output.transpose(0, 1) if self.batch_first else output, weights

    def project(self, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
        """Project query, key and value inputs with torch's weights, and split the heads: ``(B, H, N|M, d)``."""
        # Inputs of other widths, kdim or vdim, have separate weights.
        separate = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        weights = separate if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
        biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
        projected = (F.linear(x, w, b) for x, w, b in zip(inputs, weights, biases, strict=True))
        gate = self.gate
        query, key, value = projected
        if is_vanilla(gate):
            key = self._appended(key, self.bias_k)
            value = self._appended(value, self.bias_v)
        return gate.split_heads(query), gate.split_heads(key), gate.split_heads(value)

    def _appended(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """Append to projected keys or values ``(B, M, C)`` what torch appends, which no gate knows an input of."""
        if bias is not None:
            x = torch.cat([x, bias.expand(len(x), 1, -1)], 1)
        return F.pad(x, (0, 0, 0, 1)) if self.add_zero_attn else x


def build_multihead_attention(
    embed_dims: int,
    num_heads: int,
    attn_drop: float = 0.0,
    proj_drop: float = 0.0,
    dropout_layer: dict | None = None,
    *args: Any,
    **options: Any,
) -> nn.Module:
    """Build mmcv's ``MultiheadAttention`` or, without mmcv, the module that replaces it, with mmcv's arguments."""
    # mmcv writes a deprecated ``dropout`` into this dict, whose default its modules share.
    dropout_layer = dict(dropout_layer or dict(type='Dropout', drop_prob=0.0))
    return MultiheadAttention(embed_dims, num_heads, attn_drop, proj_drop, dropout_layer, *args, **options)


def dense_attention(name: str, gate: type[DenseGate]) -> Callable[..., nn.Module]:
    """Register and return a function that builds mmcv's ``MultiheadAttention`` with a gate."""
    return attention_named(
        name, gate, "mmcv's ``MultiheadAttention``", build_multihead_attention, TorchAttentionAdapter, 'attn'
    )


def make_gated(host: nn.MultiheadAttention, gate_type: type[DenseGate], **options: object) -> nn.MultiheadAttention:
    """Gate a ``torch.nn.MultiheadAttention`` that belongs to no model yet, and return it.

    Args:
        host: Module to be gated.
        gate_type: Class of the gate.
        **options: Options of the gate.

    Raises:
        ConfigError: The gate does not fit.
    """
    return gate_alone(host, TorchAttentionAdapter, gate_type, dict(options, type=gate_type, path=''), **options)

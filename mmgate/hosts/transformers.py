"""Adapters that let gates into transformers' attention: by its attention interface, Mask2Former's, deformable."""

from __future__ import annotations

import inspect
import threading
from collections import OrderedDict
from collections.abc import Iterator
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmgate.errors import ConfigError
from mmgate.gates.base.deformable import DeformableAdapter, DeformableGate
from mmgate.gates.base.dense import DenseAdapter, DenseGate, Inputs, is_plain
from mmgate.gates.base.gate import Sizes
from mmgate.gates.base.gating import Record, computed_dtype, gate_module, is_off
from mmgate.hosts.interface import Reading, goes_through_interface, read_forward
from mmgate.hosts.points import points_of, sampled
from mmgate.hosts.table import adapts, full_name
from mmgate.notes import noted
from mmgate.ops.deformable.levels import levels_on
from mmgate.ops.masks import merge_masks

NAME = 'mmgate'  # of the attention implementation
PLAIN_MASKS = ('eager', 'sdpa', NAME)  # implementations with masks of pairs
DEFORMABLE = {
    'deformable_detr': 'DeformableDetr',
    'rt_detr': 'RTDetr',
    'rt_detr_v2': 'RTDetrV2',
    'grounding_dino': 'GroundingDino',
    'mm_grounding_dino': 'MMGroundingDino',
    'lw_detr': 'LwDetr',
    'rf_detr': 'RfDetr',
    'mask2former': 'Mask2FormerPixelDecoderEncoder',
    'oneformer': 'OneFormerPixelDecoderEncoder',
    'd_fine': 'DFine',
    'deimv2': 'Deimv2',
    'omdet_turbo': 'OmDetTurbo',
    'pp_doclayout_v2': 'PPDocLayoutV2',
    'pp_doclayout_v3': 'PPDocLayoutV3',
    'pp_doclayout_v4': 'PPDocLayoutV4',
}
DEFORMABLE_HOSTS = tuple(f'modeling_{model}.{name}MultiscaleDeformableAttention' for model, name in DEFORMABLE.items())


# Inputs of a trial on the device meta: images of so many tokens, in one row or as a map.
SIDE = 16
TRIALS = ((2, SIDE * SIDE), (2, SIDE, SIDE))
POSITIONS = 'position_embeddings'  # the argument of rotary positions, cosines and sines
NUMBERS = ('height', 'width')  # arguments that are the map's sides
ACCELERATE = ('forward', '_old_forward', '_hf_hook')  # attributes of its hooks, which move inputs to their device
_here = threading.local()


class OtherTokensError(ValueError):
    """Error: an attention attends between other tokens than its projections have read, for instance with a cache."""


@dataclass(frozen=True)
class Trial:
    """Result of trying an attention's forward without numbers: its number of heads H and their width d."""

    heads: int
    head_dim: int


class _TrialGate(nn.Module):
    """Stand-in for a gate in a trial run, which keeps the shapes of the heads and computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Size, ...]] = []

    def seen_heads(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Keep the shapes of query, key and value, and return an empty output ``(B, N, H, d)``."""
        self.seen.append((query.shape, key.shape, value.shape))
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[-1]))


_TRIED: dict[Any, Trial | str] = {}


def try_on_meta(host: Any) -> Trial:
    """Try an attention's forward on the device ``meta`` and return its heads and their width; the result is cached.

    Modules of one class and of the same sizes are tried once.

    Raises:
        ConfigError: The host does not fit.
    """
    sizes = [(name, tuple(parameter.shape)) for name, parameter in host.named_parameters()]
    numbers = [(name, repr(one)) for name, one in vars(host).items() if isinstance(one, (int, float, str, tuple))]
    key = (type(host), *sizes, *sorted(pair for pair in numbers if pair[0] != 'training'))
    if key not in _TRIED:
        try:
            _TRIED[key] = _try(host)
        except ConfigError as error:
            _TRIED[key] = str(error)
    found = _TRIED[key]
    if isinstance(found, str):
        raise ConfigError(found)
    return found


def _try(host: Any) -> Trial:
    reading = read_forward(host)
    name = f'A {type(host).__name__}'
    if not hasattr(getattr(host, 'config', None), '_attn_implementation'):
        raise ConfigError(f'{name} has no config that names its attention function.')
    reason = 'has not called its attention function'
    for arguments in _arguments(host, reading):
        copied = _on_meta(host)
        gate = _TrialGate()
        gate_module(copied, GatedInterfaceAttention, gate, Record(GatedInterfaceAttention, '', {}))
        copied.after_gating(copied)
        try:
            with torch.no_grad():
                copied(**arguments)
        except OtherTokensError as error:
            reason = f'attends between other tokens than it projects: {error}'
            continue
        except Exception as error:  # whatever a forward may raise on arguments of other shapes
            reason = f'does not run in a trial ({type(error).__name__}: {str(error).strip().splitlines()[0][:200]})'
            continue
        if gate.seen:
            query, key, value = gate.seen[0]
            if key[1] != query[1] or value[1] != query[1]:
                raise ConfigError(
                    f'{name} has {key[1]} heads of keys and {value[1]} of values for {query[1]} of queries.'
                )
            if value[-1] != query[-1]:
                raise ConfigError(f'{name} has heads of {query[-1]} channels, and of {value[-1]} for values.')
            return Trial(query[1], query[-1])
    raise ConfigError(f'{name} {reason}.')


def _arguments(host: Any, reading: Reading) -> Iterator[dict[str, Any]]:
    """Yield arguments with which an attention's forward may be tried, for one shape of its input after the other."""
    dtype = computed_dtype(host) or torch.get_default_dtype()
    widths = {
        name: host.get_submodule(projection).in_features
        for projection in reversed(reading.projections)
        for name in reading.arguments[projection]
        if name not in NUMBERS
    }
    unknown = [name for name in reading.required if name not in (*widths, *NUMBERS, POSITIONS)]
    if unknown:
        raise ConfigError(f'A {type(host).__name__} needs {" and ".join(unknown)}, which a trial cannot make.')
    rotary = POSITIONS in inspect.signature(type(host).forward).parameters and POSITIONS not in widths
    for shape in TRIALS:
        given: dict[str, Any] = {name: SIDE for name in NUMBERS if name in reading.required}
        for name in reading.required:
            if name in widths:
                given[name] = torch.empty((*shape, widths[name]), device='meta', dtype=dtype)
        if POSITIONS not in reading.required:
            yield given
        width: Any = getattr(host, 'head_dim', getattr(host, 'attention_head_size', None))
        for tokens in ((SIDE * SIDE,), (SIDE,), (1, SIDE * SIDE)) if rotary and width else ():
            angles = torch.empty((*tokens, width), device='meta', dtype=dtype)
            yield {**given, POSITIONS: (angles, angles)}


def _on_meta(host: Any) -> Any:
    """Return a copy of a module on the device ``meta`` (shapes without values), in eval mode, without hooks."""
    memo: dict[int, Any] = {id(host.config): host.config}
    for parameter in host.parameters():
        memo[id(parameter)] = nn.Parameter(torch.empty_like(parameter, device='meta'), requires_grad=False)
    memo.update({id(buffer): torch.empty_like(buffer, device='meta') for buffer in host.buffers()})
    for module in host.modules():
        for name, value in vars(module).items():
            # Neither what hooks hold nor a weight that pruning has computed can always be copied.
            if '_hooks' in name or name in ACCELERATE:
                memo[id(value)] = OrderedDict()
            elif isinstance(value, Tensor):
                memo[id(value)] = torch.empty_like(value, device='meta')
    try:
        copied = deepcopy(host, memo).eval()
    except Exception as error:  # whatever an attribute may raise
        raise ConfigError(
            f'A {type(host).__name__} cannot be copied for a trial ({type(error).__name__}: {error}).'
        ) from error
    for module in copied.modules():
        for name in ACCELERATE:
            vars(module).pop(name, None)
    return copied


@adapts(DenseGate)
class GatedInterfaceAttention(DenseAdapter):
    """Adapter that lets dense gates into attention that calls transformers' attention interface.

    The attention function of such a module becomes ours.

    Its hosts are recognised by the source of their forward, see :mod:`.interface`, and by the shapes of heads in a
    trial without numbers. A gate reads what the projections of query, key and value have read, which they note while
    the host runs.
    """

    returns_weights = False

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Find out the sizes of an attention module (the host) by its projections and a trial run without numbers."""
        reading = read_forward(host)
        found = try_on_meta(host)
        query, key, value = (host.get_submodule(name).in_features for name in reading.projections)
        dropout = host
        for name in reading.dropout:
            dropout = getattr(dropout, name)
        if isinstance(dropout, nn.Dropout):
            dropout = dropout.p
        kind = type(host).__name__
        reason = f'{kind} rotates their halves together or changes them otherwise, by {", ".join(reading.changes)}'
        return Sizes(
            found.heads * found.head_dim,
            found.heads,
            inputs=(query, key, value),
            output=host.get_submodule(reading.output).out_features,
            dropout=float(dropout) if reading.dropout else 0.0,
            whole_heads=reason if reading.changes else '',
        )

    @classmethod
    def recognises(cls, kind: type[nn.Module]) -> bool:
        """Return True if attention modules of a class call transformers' attention interface."""
        return goes_through_interface(kind)

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError if the host does something else than its source and a trial run without numbers tell."""
        try_on_meta(host)

    def after_gating(self, model: nn.Module) -> None:
        """Let this module call our attention function, and register hooks that keep the inputs of its projections."""
        notes = self.gating.notes
        reading = read_forward(self)
        notes['projections'] = reading.projections
        notes['output'] = reading.output
        notes['vanilla config'] = vars(self)['config']
        notes['config'] = copy(vars(self)['config'])
        notes['config']._attn_implementation = NAME
        self._hook_projections()

    @property
    def config(self) -> Any:
        """The model's config, which names our attention function while the gate is on."""
        return self.gating.notes['vanilla config' if is_off(self) else 'config']

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend with the gate; the arguments are the host's, and no attention weights are returned.

        Without a gate they are, where the host returns them.
        """
        if is_plain(self.gate):  # a copy of the host, see mmgate.recording, which no hook has to tell its inputs
            own = vars(self)['config']
            if own._attn_implementation not in PLAIN_MASKS:  # whose masks it would misread: the host runs as it is
                self.gating.notes['config'] = own
                return super().forward(*args, **kwargs)
            self.returns_weights = own._attn_implementation == 'eager'
            self.gating.notes['config'] = copy(own)
            self.config._attn_implementation = NAME
            return super().forward(*args, **kwargs)
        # A copy that DataParallel makes has copies of the projections, with their hooks.
        if not getattr(self, '_is_replica', False):
            self._follow_projections()
        before = getattr(_here, 'call', None)
        _here.call = {}
        try:
            return super().forward(*args, **kwargs)
        finally:
            _here.call = before

    def _replicate_for_data_parallel(self) -> Any:
        self._follow_projections()
        return super()._replicate_for_data_parallel()

    def _follow_projections(self) -> None:
        """Move the hooks to layers that others have put around a projection since, or taken off, as PEFT does."""
        if any(getattr(self, name) is not layer for name, layer in self.gating.notes['hooked'].items()):
            self._unhook_projections()
            self._hook_projections()

    def _hook_projections(self) -> None:
        """Register hooks that keep the inputs of the projections, and that let a gate act on the output projection."""
        notes = self.gating.notes
        names = dict.fromkeys(notes['projections'])
        notes['hooked'] = {name: getattr(self, name) for name in (*names, notes['output'])}
        for name in names:
            hook = partial(note_input, name)
            self.gating.handles.append(getattr(self, name).register_forward_pre_hook(hook))
        self.gating.handles.append(getattr(self, notes['output']).register_forward_hook(finish_output))

    def _unhook_projections(self) -> None:
        """Remove the hooks of :meth:`_hook_projections` from the projections."""
        for hook in self.gating.handles:
            hook.remove()
        self.gating.handles.clear()

    def noted_inputs(self, query: Tensor, key: Tensor) -> Inputs:
        """Return the inputs of the query, key and value projections in this call, ``(B, N|M, C)``, which gates read.

        Raises:
            OtherTokensError: The keys are more than those that this call has projected, as with a cache, or queries
                are pooled.
        """
        if is_plain(self.gate):  # which reads none
            return (query, key, key)
        found = []
        for name, heads in zip(self.gating.notes['projections'], (query, key, key), strict=True):
            x = _here.call[name]
            tokens = (heads.shape[0], heads.shape[2])
            if x.numel() != tokens[0] * tokens[1] * x.shape[-1]:
                raise OtherTokensError(
                    f'{tokens[0]} x {tokens[1]} heads, but {x.numel() // x.shape[-1]} tokens projected by {name}. '
                    'A gate reads what belongs to each head, so call the model without a cache and without pooled '
                    'queries'
                )
            found.append(x if x.shape[:-1] == tokens else x.reshape(*tokens, x.shape[-1]))
        return found[0], found[1], found[2]


def note_input(name: str, projection: Any, args: tuple[Tensor, ...]) -> None:
    """Keep a projection's input until the gated attention has been computed; a forward pre-hook."""
    call = getattr(_here, 'call', None)
    if call is not None:
        call[name] = args[0]


def finish_output(projection: Any, args: tuple[Tensor, ...], output: Tensor) -> Tensor:
    """Let the gate change the output of the output projection; a forward hook, for gates that act there."""
    call = getattr(_here, 'call', None)
    if call is None or 'finish' not in call:  # in a trial there is no gate
        return output
    gate, query, inputs = call['finish']
    tokens = output.reshape(*inputs[0].shape[:2], output.shape[-1])
    return gate.finish(tokens, query, inputs).view_as(output)


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the gate of a module or, without one, as ``'sdpa'``; called by transformers' attention interface.

    Query ``(B, H, N, d)``, key and value ``(B, H, M, d)``, and a mask broadcastable to ``(B, H, N, M)``, bool (False
    masks) or added, become heads ``(B, N, H, d)``, and None for the weights. A gate drops what its host's constructor
    was told to.

    Raises:
        ValueError: A mask of another implementation (flash or flex attention).
    """
    if not isinstance(module, GatedInterfaceAttention) or is_off(module):
        return sdpa_attention_forward(
            module,
            query,
            key,
            value,
            attention_mask,
            dropout=dropout,
            scaling=scaling,
            is_causal=is_causal,
            **kwargs,
        )
    if isinstance(module.gate, _TrialGate):  # whose masks may be of another number of tokens
        module.noted_inputs(query, key)
        return module.gate.seen_heads(query, key, value), None
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4):
        raise ValueError(
            "a gated attention takes the masks of 'sdpa' and 'eager'; load the model with attn_implementation='sdpa', "
            f"or call model.set_attn_implementation('{NAME}')."
        )
    causal = getattr(module, 'is_causal', True) if is_causal is None else is_causal  # as 'sdpa' has it
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = ~attention_mask
    bias, dead = merge_masks(attention_mask, None, query.shape[0], query.shape[1], query.dtype)
    scaled = query
    if scaling is not None and scaling != query.shape[-1] ** -0.5:
        scaled = query * (scaling * query.shape[-1] ** 0.5)
    inputs = module.noted_inputs(query, key)
    if not is_plain(module.gate):
        _here.call['finish'] = (module.gate, query, inputs)
    attend = partial(module.gate.attend, scaled, key, value, inputs, bias)
    heads, weights = noted(module.gate, 'attention', attend) if module.returns_weights else (attend(), None)
    heads = heads if dead is None else heads.masked_fill(dead, 0.0)
    return heads.transpose(1, 2).contiguous(), weights


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without it a model of this implementation gets no masks


@adapts(DenseGate, 'modeling_mask2former.Mask2FormerAttention')
class GatedMask2FormerAttention(DenseAdapter):
    """Adapter that lets dense gates into the self-attention of transformers' Mask2Former decoder.

    It does not call the attention interface.
    """

    q_proj: nn.Module
    k_proj: nn.Module
    v_proj: nn.Module
    out_proj: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes (channels, heads, levels, points) off an attention module (the host), for its gate."""
        return Sizes(host.embed_dim, host.num_heads, dropout=host.dropout)

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None = None,
        position_embeddings: Tensor | None = None,
        key_value_states: Tensor | None = None,
        key_value_position_embeddings: Tensor | None = None,
        output_attentions: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend from ``(N, B, C)`` to ``(M, B, C)``, or to itself, with the gate; a mask is added to the logits.

        Positions are added to queries, and to keys. Returns ``(N, B, C)``, and the weights ``(B, H, N, M)`` or None.
        """
        value = hidden_states if key_value_states is None else key_value_states
        positions = position_embeddings if key_value_states is None else key_value_position_embeddings
        key = value if positions is None else value + positions
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        inputs = (query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1))  # (B, N|M, C)
        projections = (self.q_proj, self.k_proj, self.v_proj)
        q, k, v = (self.gate.split_heads(project(x)) for project, x in zip(projections, inputs, strict=True))
        bias, dead = merge_masks(attention_mask, None, q.shape[0], q.shape[1], q.dtype)
        attend = partial(self.attend_merged, (q, k, v), inputs, self.out_proj, bias, dead)
        output, weights = noted(self.gate, 'attention', attend) if output_attentions else (attend(), None)
        return output.transpose(0, 1), weights


@adapts(DeformableGate, *DEFORMABLE_HOSTS)
class GatedMultiscaleDeformableAttention(DeformableAdapter):
    """Adapter that lets gates into transformers' multi-scale deformable attentions (Deformable DETR and others).

    A gate reads the query with its position.
    """

    n_heads: int
    n_levels: int
    sampling_offsets: nn.Module
    attention_weights: nn.Module

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes (channels, heads, levels, points) off an attention module (the host), for its gate."""
        return Sizes(host.d_model, host.n_heads, levels=host.n_levels, points=points_of(host))

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for a host that does not sample bilinearly."""
        method = getattr(host, 'method', getattr(host, 'decoder_method', 'default'))
        if method != 'default':
            kind = full_name(type(host))
            raise ConfigError(f'it samples bilinearly, but this {kind} has decoder_method={method!r}.')

    def forward(
        self,
        hidden_states: Tensor,
        *,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor,
        position_embeddings: Tensor | None = None,
        reference_points: Tensor,
        spatial_shapes: Tensor | None = None,
        spatial_shapes_list: Any = None,
        level_start_index: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Tensor]:
        """Attend from queries ``(B, Q, C)`` to the levels in ``encoder_hidden_states`` ``(B, S, C)``, with the gate.

        Args:
            hidden_states: The queries.
            attention_mask: ``(B, S)`` bool, False where there is padding; in Mask2Former and OneFormer True.
            encoder_hidden_states: The levels.
            position_embeddings: Added to the queries.
            reference_points: ``(B, Q, L|1, 2)`` as (x, y), or ``(B, Q, L|1, 4)`` as (x, y, w, h), in 0 to 1.
            spatial_shapes: ``(L, 2)`` as (height, width), if there is no list.
            spatial_shapes_list: The same as a list.
            level_start_index: ``(L,)``, if there is no list; of levels side by side by default.
            **kwargs: What layers hand to every attention; not used, as in transformers.

        Returns:
            ``(B, Q, C)``, and the weights ``(B, Q, H, L, P)``, in RT-DETRv2, D-FINE and DEIMv2 ``(B, Q, H, N)`` of all
            N points of a head.

        Raises:
            ValueError: Neither ``spatial_shapes`` nor a list of them.
        """
        query = hidden_states if position_embeddings is None else hidden_states + position_embeddings
        value = self.value_proj(encoder_hidden_states) if hasattr(self, 'value_proj') else encoder_hidden_states
        if attention_mask is not None:
            padding = attention_mask if self.mask_is_padding else ~attention_mask
            value = value.masked_fill(padding[..., None], 0.0)
        value = value.unflatten(-1, (self.n_heads, -1))  # (B, S, H, d)
        if spatial_shapes_list is not None:
            # As in transformers, the list decides. Tensors are made once for all layers, so that none of them waits.
            spatial_shapes, level_start_index = levels_on(value.device, spatial_shapes_list)
        if spatial_shapes is None:
            raise ValueError('spatial_shapes or spatial_shapes_list is needed by deformable attention.')
        if level_start_index is None:
            areas = spatial_shapes.prod(-1)
            level_start_index = areas.cumsum(0) - areas
        offsets, logits = sampled(self, query, reference_points)
        sampling = (query, value, spatial_shapes, level_start_index, offsets, logits, reference_points)
        output, weights = noted(self.gate, 'weights', partial(self.sample, *sampling))
        assert weights is not None  # sample notes them
        output = self.output_proj(output) if hasattr(self, 'output_proj') else output
        return output, weights.flatten(3) if hasattr(self, 'offset_scale') else weights

    @property
    def mask_is_padding(self) -> bool:
        """Return True if True means padding in the masks of this model; in other models it means a valid pixel."""
        return any(base.__name__.startswith(('Mask2Former', 'OneFormer')) for base in type(self).__mro__)

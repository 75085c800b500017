"""Adapters that let dense gates into attention of transformers that calls its attention interface.

The host's own ``forward`` runs, and calls our attention function, so that rotary positions, norms and the like stay the
host's. A gate reads what the host projects: arguments of that forward, of which :class:`Form` knows the names. The
classes of transformers are in :mod:`.interface_classes`, each with its form and a hash of the source that it was seen
in.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import textwrap
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface, __version__
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from mmgate.adapter import host_class, is_off
from mmgate.errors import ConfigError, full_name
from mmgate.gate import Sizes
from mmgate.gates.base.dense import DenseAdapter, DenseGate, Inputs, is_vanilla
from mmgate.hosts.interface_classes import CLASSES, WRITTEN_WITH
from mmgate.hosts.table import adapts
from mmgate.notes import with_note
from mmgate.ops.masks import merge_masks

NAME = 'mmgate'  # of the attention implementation
PLAIN_MASKS = ('eager', 'sdpa', NAME)  # implementations with masks of pairs
# The names by which transformers calls the same thing; of a host, the first one counts that it has.
PROJECTIONS = (('q_proj', 'k_proj', 'v_proj'), ('query', 'key', 'value'), ('qkv', 'qkv', 'qkv'))
OUTPUTS = ('o_proj', 'out_proj', 'projection', 'proj', 'output')
HEAD_DIMS = ('head_dim', 'attention_head_size')
HEADS = ('num_heads', 'num_attention_heads', 'n_heads')
DROPOUTS = ('attention_dropout', 'dropout', 'dropout_p', 'dropout_prob')
SCALES = ('scaling', 'scale')
_of_thread = threading.local()


@dataclass(frozen=True)
class Form:
    """Names by which the ``forward`` of an attention class takes what it projects.

    Attributes:
        query: Argument with the queries' tokens.
        key: Argument with the keys' tokens; where it is None or there is none, they are the queries'.
        value: Argument with the values' tokens; where there is none, they are the keys'.
        query_position: Argument that is added to the queries' tokens before their projection.
        key_position: Argument that is added to the keys' tokens.
        projections: Names of the children that project query, key and value, by default the first of
            :data:`PROJECTIONS` that the host has. The same name three times is one child for all three.
        output: Name of the child that projects the heads, by default the first of :data:`OUTPUTS` that the host has.
        why_whole_heads: As in :class:`.Sizes`: why a gate may neither split heads nor add queries.
    """

    query: str = 'hidden_states'
    key: str = ''
    value: str = ''
    query_position: str = ''
    key_position: str = ''
    projections: tuple[str, str, str] | None = None
    output: str = ''
    why_whole_heads: str = ''

    def inputs(self, given: Mapping[str, Any]) -> Inputs:
        """Return what query, key and value are projected from, given the arguments of the forward by name."""
        query = given[self.query]
        key = query if given.get(self.key) is None else given[self.key]
        value = key if given.get(self.value) is None else given[self.value]
        return _added(query, given.get(self.query_position)), _added(key, given.get(self.key_position)), value

    def projections_of(self, host: nn.Module) -> tuple[str, str, str]:
        """Return the names of a host's projections of query, key and value.

        Raises:
            ConfigError: It does not have them.
        """
        known = PROJECTIONS if self.projections is None else (self.projections,)
        found = next((names for names in known if all(hasattr(host, name) for name in names)), None)
        if found is None:
            listed = ' or '.join(', '.join(dict.fromkeys(names)) for names in known)
            raise ConfigError(f'this {full_name(type(host))} has no projections {listed}.')
        return found


def _added(tokens: Tensor, position: Tensor | None) -> Tensor:
    return tokens if position is None else tokens + position


class _Call:
    """Inputs of the gated attention that runs in this thread, and its projected queries, for the gate's ``finish``."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.query: Tensor | None = None


class _Config:
    """A config that names our attention function, and is the host's in all else."""

    _attn_implementation = NAME

    def __init__(self, config: Any) -> None:
        vars(self)['_config'] = config

    def __getattr__(self, name: str) -> Any:
        # A copy asks before it has it.
        if name == '_config':
            raise AttributeError(name)
        return getattr(self._config, name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(self._config, name, value)

    def __reduce__(self) -> tuple[Any, ...]:
        return _Config, (self._config,)


class InterfaceAdapter(DenseAdapter):
    """Base class of adapters for attention that calls transformers' attention interface.

    An adapter says by its ``form`` which arguments its hosts project. Its hosts return no attention weights, like
    transformers' fused functions.
    """

    form: ClassVar[Form] = Form()

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read the sizes of an attention module (the host) off its projections, for its gate."""
        names = cls.form.projections_of(host)
        query, key, value = (getattr(host, name) for name in names)
        channels = query.out_features // (3 if len(set(names)) == 1 else 1)
        head_dim = _first_of(host, HEAD_DIMS)
        if head_dim is None:
            heads = _first_of(host, HEADS)
            if heads is None:
                raise ConfigError(f'this {full_name(type(host))} has none of {", ".join((*HEAD_DIMS, *HEADS))}.')
            head_dim = channels // heads
        output = cls.form.output or next((name for name in OUTPUTS if hasattr(host, name)), '')
        dropout = _first_of(host, DROPOUTS)
        return Sizes(
            channels,
            channels // head_dim,
            inputs=(query.in_features, key.in_features, value.in_features),
            output=getattr(host, output).out_features if output else 0,
            dropout=float(getattr(dropout, 'p', dropout) or 0.0),
            # A gate that adds queries needs it, for which such a host is none.
            scale=None if cls.form.why_whole_heads else _first_of(host, SCALES),
            why_whole_heads=cls.form.why_whole_heads,
        )

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError if the source of the host's forward is not the one that the table knows.

        Or if heads share keys, or if the model makes masks for flash or flex attention.
        """
        host_type: Any = type(host)
        form, known = CLASSES.get(_name_in_table(host_type), ('', ''))
        # An adapter of somebody's own for a class of the table answers for it.
        if FORMS.get(form) is cls and fingerprint(host_type) != known:
            raise ConfigError(
                f'the forward of {full_name(host_type)} in transformers {__version__} is not the one that the table of '
                f'mmgate has seen in {WRITTEN_WITH}. If it projects the same arguments, declare it by a subclass: '
                f'@mmgate.adapts(mmgate.DenseGate, {host_type.__name__}) class Mine({cls.__name__}), see '
                'docs/hosts.md.'
            )
        implementation = host.config._attn_implementation
        if implementation not in PLAIN_MASKS:
            raise ConfigError(
                f'it attends by {implementation!r}, whose masks this adapter does not know; call '
                f"model.set_attn_implementation('{NAME}') before."
            )
        names = cls.form.projections_of(host)
        widths = [getattr(host, name).out_features for name in names]
        if len(set(widths)) > 1:
            raise ConfigError(
                f'a gate needs as many heads of keys as of queries, but the projections of this '
                f'{full_name(host_type)} have {", ".join(map(str, widths))} channels.'
            )

    @property
    def config(self) -> Any:
        """The model's config, which names our attention function while the gate is on."""
        config = vars(self)['config']
        return config if is_off(self) else _Config(config)

    @config.setter
    def config(self, config: Any) -> None:
        vars(self)['config'] = config._config if isinstance(config, _Config) else config

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Attend with the gate; the arguments are the host's, and no attention weights are returned."""
        host: Any = host_class(self)
        given = {**dict(zip(_arguments(host), args, strict=False)), **kwargs}
        before = getattr(_of_thread, 'call', None)
        _of_thread.call = call = _Call(self.form.inputs(given))
        try:
            returned = super().forward(*args, **kwargs)
        finally:
            _of_thread.call = before
        if call.query is None:
            raise RuntimeError(f'{full_name(host)} has not called the attention function of its config.')
        output, *others = returned if isinstance(returned, tuple) else (returned,)
        tokens = output.reshape(*call.inputs[0].shape[:2], -1)
        output = self.gate.finish(tokens, call.query, call.inputs).view_as(output)
        return (output, *others) if isinstance(returned, tuple) else output


def attend(
    module: DenseAdapter,
    projected: tuple[Tensor, Tensor, Tensor],
    inputs: Inputs,
    attention_mask: Tensor | None,
    scaling: float | None,
) -> tuple[Tensor, Tensor | None]:
    """Attend with the gate of a module, by the masks and the scale of transformers.

    Args:
        module: A gated module.
        projected: Query, key and value ``(B, H, N|M, d)``.
        inputs: What they are projected from, ``(B, N|M, C)``.
        attention_mask: Mask that broadcasts to ``(B, H, N, M)``, bool (True may be attended to) or added.
        scaling: Scale of the logits; ``1 / sqrt(d)`` by default.

    Returns:
        Heads ``(B, N, H, d)``, and None for the weights; these for attention without a gate, with which a vanilla host
        is recorded, if the host returns them.

    Raises:
        ValueError: A mask of another implementation (flash or flex attention).
    """
    if attention_mask is not None and not (isinstance(attention_mask, Tensor) and attention_mask.dim() == 4):
        raise ValueError(
            "a gated attention takes the masks of 'sdpa' and 'eager'; load the model with attn_implementation='sdpa', "
            f"or call model.set_attn_implementation('{NAME}')."
        )
    query, key, value = projected
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        attention_mask = ~attention_mask
    bias, all_masked = merge_masks(attention_mask, None, query.shape[0], query.shape[1], query.dtype)
    usual = query.shape[-1] ** -0.5
    scaled = query if scaling in (None, usual) else query * (scaling / usual)
    run = partial(module.gate.attend, scaled, key, value, inputs, bias)
    returns = is_vanilla(module.gate) and vars(module)['config']._attn_implementation == 'eager'
    heads, weights = with_note(module.gate, 'attention', run) if returns else (run(), None)
    heads = heads if all_masked is None else heads.masked_fill(all_masked, 0.0)
    return heads.transpose(1, 2).contiguous(), weights


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

    Query ``(B, H, N, d)``, key and value ``(B, H, M, d)`` become heads ``(B, N, H, d)``, and None for the weights. A
    gate drops what its host's constructor was told to.

    Raises:
        ValueError: The keys are more than the tokens that this call has projected, as with a cache.
    """
    if not isinstance(module, InterfaceAdapter) or is_off(module):
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
    causal = getattr(module, 'is_causal', True) if is_causal is None else is_causal  # as 'sdpa' has it
    if attention_mask is None and causal and query.shape[2] > 1:
        attention_mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device).tril()
        attention_mask = attention_mask[None, None]
    call = _of_thread.call
    of_query, of_key, of_value = call.inputs
    call.inputs = (_tokens(of_query, query), _tokens(of_key, key), _tokens(of_value, key))
    call.query = query
    return attend(module, (query, key, value), call.inputs, attention_mask, scaling)


def _tokens(x: Tensor, heads: Tensor) -> Tensor:
    """Return what heads ``(B, H, N, d)`` were projected from, such as a map ``(B, h, w, C)``, as ``(B, N, C)``."""
    shape = (heads.shape[0], heads.shape[2], x.shape[-1])
    if x.numel() != shape[0] * shape[1] * shape[2]:
        raise ValueError(
            f'{shape[0]} x {shape[1]} heads, but {x.numel() // x.shape[-1]} tokens were projected in this call. A gate '
            'reads what belongs to each head, so call the model without a cache and without pooled queries.'
        )
    return x if x.shape == shape else x.reshape(shape)


def _first_of(host: Any, names: tuple[str, ...]) -> Any:
    """Return the first of these attributes that a host has, or None."""
    return next((getattr(host, name) for name in names if hasattr(host, name)), None)


@cache
def _arguments(host_type: Any) -> tuple[str, ...]:
    """Return the names of the arguments that a class's forward takes by position."""
    return tuple(inspect.signature(host_type.forward).parameters)[1:]


@cache
def fingerprint(host_type: Any) -> str:
    """Return a hash of the source of a class's forward, or an empty text if there is no source."""
    try:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(host_type.forward)))
    except OSError:
        return ''
    return hash_of(ast.parse(source).body[0])


def hash_of(forward: ast.stmt) -> str:
    """Return a hash of a function's code that its annotations, decorators, comments and docstring do not change.

    It is the same in every version of Python.
    """
    assert isinstance(forward, ast.FunctionDef)
    body = forward.body[1:] if ast.get_docstring(forward) else forward.body
    return hashlib.sha256(_written([forward.args, *body]).encode()).hexdigest()[:8]


def _written(node: Any) -> str:
    """Write a syntax tree as a text, without what versions of Python differ in."""
    if isinstance(node, list):
        return ' '.join(map(_written, node))
    if not isinstance(node, ast.AST):
        return repr(node)
    left_out = ('annotation', 'returns', 'ctx', 'kind', 'type_comment')
    parts = {name: value for name, value in ast.iter_fields(node) if name not in left_out and value not in (None, [])}
    return f'{type(node).__name__}({" ".join(f"{name}={_written(value)}" for name, value in parts.items())})'


def _name_in_table(host_type: type[nn.Module]) -> str:
    return f'{host_type.__module__.rpartition(".")[2]}.{host_type.__qualname__}'


def _of_form(form: str) -> list[str]:
    """Return the names of the classes in the table that have a form."""
    return [name for name, (of, _) in CLASSES.items() if of == form]


WHOLE = 'the host rotates, scales or normalises the heads that it has projected'


@adapts(DenseGate, *_of_form('self'))
class SelfAttention(InterfaceAdapter):
    """Adapter for attention between the tokens ``hidden_states``."""


@adapts(DenseGate, *_of_form('rotated_self'))
class RotatedSelfAttention(InterfaceAdapter):
    """The same with rotary positions, or norms of heads."""

    form = Form(why_whole_heads=WHOLE)


@adapts(DenseGate, *_of_form('positioned_self'))
class PositionedSelfAttention(InterfaceAdapter):
    """Adapter for attention between ``hidden_states``, with positions that are added to queries and keys."""

    form = Form(query_position='position_embeddings', key_position='position_embeddings')


@adapts(DenseGate, *_of_form('positioned_cross'))
class PositionedCrossAttention(InterfaceAdapter):
    """Adapter for attention to ``key_value_states``, with positions of both that are added to queries and keys."""

    form = Form(
        key='key_value_states',
        query_position='position_embeddings',
        key_position='encoder_position_embeddings',
    )


@adapts(DenseGate, *_of_form('key_value'))
class KeyValueAttention(InterfaceAdapter):
    """Adapter for attention to ``key_value_states``, or between ``hidden_states`` without them."""

    form = Form(key='key_value_states')


@adapts(DenseGate, *_of_form('encoder'))
class EncoderAttention(InterfaceAdapter):
    """Adapter for attention to ``encoder_hidden_states``, or between ``hidden_states`` without them."""

    form = Form(key='encoder_hidden_states')


@adapts(DenseGate, *_of_form('rotated_encoder'))
class RotatedEncoderAttention(InterfaceAdapter):
    """The same with rotary positions."""

    form = Form(key='encoder_hidden_states', why_whole_heads=WHOLE)


@adapts(DenseGate, *_of_form('three'))
class ThreeInputAttention(InterfaceAdapter):
    """Adapter for attention of ``query`` to ``key`` and ``value``."""

    form = Form('query', 'key', 'value')


@adapts(DenseGate, *_of_form('rotated_three'))
class RotatedThreeInputAttention(InterfaceAdapter):
    """The same with rotary positions."""

    form = Form('query', 'key', 'value', why_whole_heads=WHOLE)


@adapts(DenseGate, *_of_form('pooled_self'))
class PooledSelfAttention(InterfaceAdapter):
    """Adapter for attention that pools its queries in some layers, which are refused."""

    @classmethod
    def check(cls, host: Any) -> None:
        """Raise ConfigError for a host that pools its queries, whose gate would have more tokens than queries."""
        super().check(host)
        if host.query_stride:
            raise ConfigError(f'this {full_name(type(host))} pools its queries, query_stride={host.query_stride}.')


FORMS: dict[str, type[InterfaceAdapter]] = {
    'self': SelfAttention,
    'rotated_self': RotatedSelfAttention,
    'positioned_self': PositionedSelfAttention,
    'positioned_cross': PositionedCrossAttention,
    'key_value': KeyValueAttention,
    'encoder': EncoderAttention,
    'rotated_encoder': RotatedEncoderAttention,
    'three': ThreeInputAttention,
    'rotated_three': RotatedThreeInputAttention,
    'pooled_self': PooledSelfAttention,
}

AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)  # without it a model of this implementation gets no masks

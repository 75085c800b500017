"""Base classes of attention over an H x W map of tokens (Agent, SAGA, linear), and of its adapters."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import isqrt
from threading import get_ident
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Proxy

from mmgate._environment import log
from mmgate.errors import ConfigError
from mmgate.layers.base.gate import Gate, Sizes, StateDict
from mmgate.layers.base.gated import GatedModule
from mmgate.layers.base.mmcv_or_torch import build_dropout
from mmgate.layers.base.named import attention_named
from mmgate.layers.parts.options import integer, number
from mmgate.notes import note
from mmgate.ops.layout import check_layout
from mmgate.ops.tracing import is_compiling

# Height and width.
Size = tuple[int, int]
# The note of a gated module with the size of its map, by thread.
MAPS = 'maps'


class MapGate(Gate):
    """Base class of gates that replace the attention over a map's tokens; a subclass mixes them in :meth:`mix`.

    The host keeps its projections. By itself it is softmax attention over all tokens.

    Position terms in a checkpoint of another resolution are resized on loading, as a forward pass resizes them
    for a map of another size.

    Args:
        sizes: Sizes of the host's attention.
        class_token: True if a class token comes before the map's tokens (DeiT), or the number of tokens that do: a
            class token and the registers of DINOv2.

    Raises:
        ConfigError: The channels are no multiple of the heads, or ``class_token`` is no number of tokens.

    Attributes:
        class_tokens: Number of tokens before the map's, as ``class_token`` says.
        map_size: Height and width of the map in pre-training, or None. In a ViT, whose call does not name the map, it
            is the first guess of :meth:`map_of`.
        scale: Factor of the logits.
        shifted: True if the host's windows are shifted, as in Swin's odd blocks.
    """

    def __init__(self, sizes: Sizes, *, class_token: bool | int = False) -> None:
        super().__init__(sizes)
        tokens = int(class_token) if isinstance(class_token, bool) else class_token
        self.class_tokens = integer('class_token', tokens, least=0)
        self.scale = sizes.scale or self.head_dim**-0.5
        self.shifted = sizes.shifted
        self.map_size = sizes.map_size

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Mix the tokens of a map: attend with projected queries, keys and values, up to the output projection.

        Args:
            x: Tokens before projection ``(B, N, C)``.
            q: Projected queries ``(B, N, C)``, the class token first if there is one.
            k: Projected keys ``(B, N, C)``.
            v: Projected values ``(B, N, C)``.
            hw_shape: Height and width of the map, ``N = class_tokens + H W``.

        Figures draw what it notes: ``'attention'`` ``(B, H, N, N)``, ``'values'``, ``'agents'``, ``'kv'``, and as
        ``'geometry'`` the layout of the tokens, see :mod:`mmgate.analysis.probes.places`.
        """
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        note(self, 'attention', lambda: (q @ k.transpose(-1, -2) * self.scale).softmax(-1))
        note(self, 'values', v)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop_rate, scale=self.scale)
        return self.merge_heads(heads)

    def map_of(self, tokens: int) -> Size:
        """Guess height and width of a map from its number of tokens, class token included.

        The map of pre-training is taken if it has as many tokens, and else a square.
        """
        tokens -= self.class_tokens
        if self.map_size is not None and tokens == self.map_size[0] * self.map_size[1]:
            return self.map_size
        side = isqrt(tokens)
        return side, side

    def after_class_token(self, x: Tensor) -> Tensor:
        """Put a zero for the class token, if there is one, before values of the map's tokens ``(B, h w, C)``."""
        return F.pad(x, (0, 0, self.class_tokens, 0)) if self.class_tokens else x

    def resize_loaded(self, state_dict: StateDict, prefix: str) -> list[str]:
        """Resize position terms in a state dict to this gate's shapes; return the names of those resized."""
        return []

    def _load_from_state_dict(self, state_dict: StateDict, prefix: str, *args: object, **kwargs: object) -> None:
        resized = self.resize_loaded(state_dict, prefix)
        if resized:
            name = prefix.rstrip('.') or type(self).__name__
            log(f'{name}: {", ".join(resized)} resized to {self.resized_to()}')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def resized_to(self) -> str:
        """Return, in words for the log, the map size to which :meth:`resize_loaded` resizes."""
        return f'a map of {self.map_size}'


def _check_tokens(x: Tensor, hw_shape: Size, class_tokens: int = 0) -> None:
    """Raise ValueError unless the number of tokens in ``x`` is that of a map of height and width ``hw_shape``."""
    height, width = hw_shape
    if x.shape[1] != class_tokens + height * width:
        extra = f' and {class_tokens} class token{"s" * (class_tokens > 1)}' if class_tokens else ''
        raise ValueError(f'{x.shape[1]} tokens do not make a map of {height} x {width}{extra}.')


class MapHost(GatedModule):
    """Base class of the adapters that let attention over a map replace a host's attention between its projections."""

    gate: MapGate

    @classmethod
    def map_of_images(cls, model: Any, image: Size) -> tuple[Size, int] | None:
        """Return the map that a model cuts images into, and the number of tokens before it; None if it does not say.

        Args:
            model: The nearest module around the host with a ``patch_embed``.
            image: Height and width of the images.
        """
        return None

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values, all ``(B, N, C)``, with the host's layers, by default ``qkv``."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return q, k, v

    def finish(self, x: Tensor) -> Tensor:
        """Turn mixed tokens ``(B, N, C)`` into the output, with the host's output projection and dropouts."""
        return self.dropout_layer(self.proj_drop(self.proj(x)))

    def attend_gated(self, x: Tensor, hw_shape: Size | None, identity: Tensor | float | None = None) -> Tensor:
        """Attend over the tokens of a map with the gate: project, mix, project the output, add ``identity``.

        Args:
            x: Tokens ``(B, N, C)``.
            hw_shape: Height and width of the map; None for the guess of :meth:`MapGate.map_of`.
            identity: Tensor or number that is added to the output, as PVT and Twins do; None to add nothing.

        Returns:
            ``(B, N, C)``.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape, or its tokens do not make the map.
        """
        gate = self.gate
        # Twins adds the number 0.0.
        added = identity if isinstance(identity, Tensor) else None
        check_layout(('x', x, f'B N {gate.embed_dims}'), ('identity', added, f'B N {gate.embed_dims}'), filled='N')
        height, width = gate.map_of(x.shape[1]) if hw_shape is None else tuple(hw_shape)
        _check_tokens(x, (height, width), gate.class_tokens)
        q, k, v = self.project(x)
        out = self.finish(gate.mix(x, q, k, v, (height, width)))
        return out if identity is None else identity + out


class UntoldMapHost(MapHost):
    """Base class of the adapters for a ViT's attention, whose call does not give the size of the map.

    A hook on the patch embedding around the host notes the map of each image.

    Attributes:
        noted_map: Height and width of the map that the patch embedding has returned last, or None.
    """

    noted_map: Size | None = None

    @classmethod
    def embedded_map(cls, embedding: Any, args: Any, output: Any) -> Size | None:
        """Return the size of the map that a call of the patch embedding cut an image into; None if it does not say."""
        raise TypeError(f'{cls.__name__} does not say what its patch embedding returns.')

    def after_gating(self, model: nn.Module) -> None:
        """Register the hook on the patch embedding around this attention."""
        embedding = getattr(embedder_around(model, self.gating.name), 'patch_embed', None)
        if isinstance(embedding, nn.Module):
            self.gating.handles.append(embedding.register_forward_hook(partial(note_map, self)))

    def attend_on_noted_map(self, x: Tensor) -> Tensor:
        """Attend over the tokens ``(B, N, C)`` of a map, with the gate.

        The map has the size that was noted in this thread, else in any. If that does not fit, it has the size of
        pre-training, or else is a square.
        """
        tokens = x.shape[1] - self.gate.class_tokens
        noted = self.noted_map
        if not is_compiling():
            noted = self.gating.notes.get(MAPS, {}).get(get_ident(), noted)
        fits = noted is not None and noted[0] * noted[1] == tokens
        return self.attend_gated(x, noted if fits else None)


def note_map(gated: Any, embedding: nn.Module, args: Any, output: Any) -> None:
    """Tell a gated attention, whose gate may be off, the size of the map that its patch embedding returns; a hook.

    Raises:
        ConfigError: torch.fx traces the patch embedding, in whose graph there is no hook.
    """
    if any(isinstance(one, Proxy) for one in (*args, output)):
        name = type(embedding).__name__
        raise ConfigError(
            f'torch.fx cannot look into {name}, whose call tells a gate the size of its map. Make it a leaf module of '
            f"the tracer (is_leaf_module; leaf_modules=[{name}] of torchvision's create_feature_extractor; "
            f"timm's register_notrace_module({name})), or take features by forward hooks."
        )
    noted = gated.gating.adapter.embedded_map(embedding, args, output)
    if noted is not None:
        gated.noted_map = noted
        # DataParallel runs each copy of the model in another thread, and all copies have this one record.
        if not is_compiling():
            gated.gating.notes.setdefault(MAPS, {})[get_ident()] = noted


def embedder_around(model: nn.Module, name: str) -> nn.Module | None:
    """Return the nearest module around a module of a model that has a ``patch_embed``, or None."""
    names = name.split('.')
    around = (model.get_submodule('.'.join(names[:count])) for count in range(len(names) - 1, -1, -1))
    return next((part for part in around if hasattr(part, 'patch_embed')), None)


class MapAttention(nn.Module):
    """Softmax attention over a map as a module with projections; a subclass, or a gate, mixes the tokens otherwise.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        qkv_bias: True for a bias in the projections of query, key and value.
        qk_scale: Factor of the logits; ``1 / sqrt(d)`` by default.
        attn_drop: Probability of dropping an attention weight.
        proj_drop: Probability of dropout after the output projection.
        dropout_layer: Config of the dropout or drop path before the identity is added.

    Raises:
        ConfigError: ``embed_dims`` is no multiple of ``num_heads``, or ``attn_drop`` no probability.
    """

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        qkv_bias: bool = True,
        qk_scale: float | None = None,
        attn_drop: float = 0.0,
        proj_drop: float = 0.0,
        dropout_layer: dict | None = None,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ConfigError(f'embed_dims={embed_dims} is not a multiple of num_heads={num_heads}.')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.attn_drop = number('attn_drop', attn_drop, least=0, most=1)
        self.head_dim = embed_dims // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)
        self.dropout_layer = build_dropout(dropout_layer) if dropout_layer else nn.Identity()

    def init_weights(self) -> None:
        """Do nothing: parameters keep the initial values of the model around. A gate in the module starts here."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Mix the projected tokens of a map, ``(B, N, C)``; the arguments are those of :meth:`MapGate.mix`."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, N, d)
        dropout = self.attn_drop if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, hw_shape: Size) -> Tensor:
        """Attend over the tokens ``(B, N, C)`` of a map of height and width ``hw_shape``.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape, or its tokens do not make the map.
        """
        check_layout(('x', x, f'B N {self.embed_dims}'), filled='N')
        _check_tokens(x, hw_shape)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.dropout_layer(self.proj_drop(self.proj(self.mix(x, q, k, v, hw_shape))))


class GatedMapAttention(MapHost):
    """Adapter that lets attention over a map into :class:`MapAttention`."""

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and dropout off an attention module (the host), for its gate."""
        bias = host.qkv.bias is not None
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn_drop, scale=host.scale, bias=bias)

    def forward(self, x: Tensor, hw_shape: Size | None = None, identity: Tensor | float | None = None) -> Tensor:
        """Attend over the tokens of a map, see :meth:`attend_gated`; a ViT gives no ``hw_shape``."""
        return self.attend_gated(x, hw_shape, identity)


def map_attention(name: str, gate: type[MapGate]) -> Callable[..., nn.Module]:
    """Register and return a function that builds :class:`MapAttention` with a gate."""
    return attention_named(name, gate, ':class:`.MapAttention`', MapAttention, GatedMapAttention)

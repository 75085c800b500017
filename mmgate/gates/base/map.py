"""Base classes of attention over an H x W map of tokens (Agent, SAGA, linear), and of its adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from mmgate._environment import log
from mmgate.adapter import Adapter
from mmgate.errors import ConfigError, OptionError
from mmgate.gate import Gate, Sizes, StateDict
from mmgate.gates.base.mmcv_or_torch import build_dropout
from mmgate.gates.base.named import attention_named
from mmgate.gates.parts.options import height_and_width, integer, number
from mmgate.notes import note
from mmgate.ops.layout import check_layout

# Height and width.
HeightWidth = tuple[int, int]
# Side of most images in pre-training, and the option that says it, as an example in messages.
IMAGE_SIDE = 224
EXAMPLE = f'image_size={IMAGE_SIDE}'


class MapGate(Gate):
    """Base class of gates that replace the attention over a map's tokens; a subclass mixes them in :meth:`mix`.

    The host keeps its projections. By itself it is softmax attention over all tokens.

    Position terms in a checkpoint of another resolution are resized on loading, as a forward pass resizes them
    for a map of another size.

    Args:
        sizes: Sizes of the host's attention.

    Raises:
        ConfigError: The channels are no multiple of the heads.

    Attributes:
        class_tokens: Number of tokens before the map's: a class token, the registers of DINOv2.
        map_size: Height and width of the map in pre-training, of which position terms have their shapes; None for a
            gate without such terms. A map may have any other size.
        host_map: Height and width of the map that the model around keeps, or None. A ViT's call of its attention does
            not name the map: there it is this one.
        scale: Factor of the logits.
        shifted: True if the host's windows are shifted, as in Swin's odd blocks.
    """

    map_size: HeightWidth | None = None

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes)
        self.class_tokens = sizes.class_tokens
        self.host_map = sizes.host_map
        self.scale = sizes.scale or self.head_dim**-0.5
        self.shifted = sizes.shifted

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Mix the tokens of a map: attend with projected queries, keys and values, up to the output projection.

        Args:
            x: Tokens before projection ``(B, N, C)``.
            q: Projected queries ``(B, N, C)``, the class token first if there is one.
            k: Projected keys ``(B, N, C)``.
            v: Projected values ``(B, N, C)``.
            hw_shape: Height and width of the map, ``N = class_tokens + H W``.

        Figures draw what it notes: ``'attention'`` ``(B, H, N, N)``, ``'values'``, ``'agents'``, ``'kv'``, and as
        ``'geometry'`` the layout of the tokens, see :mod:`mmgate.analysis.probes.recording`.
        """
        q, k, v = (self.split_heads(t) for t in (q, k, v))
        note(self, 'attention', lambda: (q @ k.transpose(-1, -2) * self.scale).softmax(-1))
        note(self, 'values', v)
        heads = F.scaled_dot_product_attention(q, k, v, dropout_p=self.drop_rate, scale=self.scale)
        return self.merge_heads(heads)

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


def pretraining_map(sizes: Sizes, map_size: HeightWidth | None, image_size: int | HeightWidth | None) -> HeightWidth:
    """Return the map in pre-training: as a rule says it, else the one that the model around the attention keeps.

    It gives parameters their shapes. An optimizer takes them before the first forward pass, which cannot be waited for.

    Args:
        sizes: Sizes of the host's attention.
        map_size: The map, height and width, or None.
        image_size: The images, side or height and width, or None.

    Raises:
        OptionError: Nothing of this tells the map; the message has the option to write.
        ConfigError: An option is no size.
    """
    if map_size is not None:
        return height_and_width('map_size', map_size)
    if image_size is not None and sizes.stride is not None:
        return map_of_image(image_size, sizes.stride)
    if image_size is None and sizes.host_map is not None:
        return sizes.host_map
    if sizes.stride is not None:
        raise OptionError(
            'it needs the size of the images in pre-training, which this model does not keep. Write '
            f'{EXAMPLE} into the rule, their side or (height, width); this map is image_size / {sizes.stride}.'
        )
    raise OptionError(
        'it needs the map in pre-training, and neither the attention nor the model around it tells its stride, for '
        "image_size. Write map_size=(14, 14), the images' height and width over the stride."
    )


def map_of_image(image_size: int | Sequence[int], stride: int) -> HeightWidth:
    """Return the map of an image, its side or (height, width); a part of a patch at the border counts as a whole."""
    sides = image_size if isinstance(image_size, Sequence) else (image_size, image_size)
    height, width = height_and_width('image_size', sides)
    return -(-height // stride), -(-width // stride)


def _check_tokens(x: Tensor, hw_shape: HeightWidth, class_tokens: int = 0) -> None:
    """Raise ValueError unless the number of tokens in ``x`` is that of a map of height and width ``hw_shape``."""
    height, width = hw_shape
    if x.shape[1] != class_tokens + height * width:
        extra = f' and {class_tokens} class token{"s" * (class_tokens > 1)}' if class_tokens else ''
        raise ValueError(f'{x.shape[1]} tokens do not make a map of {height} x {width}{extra}.')


class MapAdapter(Adapter):
    """Base class of the adapters that let attention over a map replace a host's attention between its projections."""

    gate: MapGate

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Project tokens to queries, keys and values, all ``(B, N, C)``, with the host's layers, by default ``qkv``."""
        q, k, v = self.qkv(x).chunk(3, -1)
        return q, k, v

    def finish(self, x: Tensor) -> Tensor:
        """Turn mixed tokens ``(B, N, C)`` into the output, with the host's output projection and dropouts."""
        return self.dropout_layer(self.proj_drop(self.proj(x)))

    def attend_gated(
        self, x: Tensor, hw_shape: HeightWidth | None = None, identity: Tensor | float | None = None
    ) -> Tensor:
        """Attend over the tokens of a map with the gate: project, mix, project the output, add ``identity``.

        Args:
            x: Tokens ``(B, N, C)``.
            hw_shape: Height and width of the map; None for the one that the model around keeps.
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
        if hw_shape is None:
            height, width = _host_map(gate, x)
        else:
            height, width = hw_shape
            _check_tokens(x, (height, width), gate.class_tokens)
        q, k, v = self.project(x)
        out = self.finish(gate.mix(x, q, k, v, (height, width)))
        return out if identity is None else identity + out


def _host_map(gate: MapGate, x: Tensor) -> HeightWidth:
    """Return the map that the model around a gate keeps, if the tokens ``(B, N, C)`` are its tokens, all of them.

    Raises:
        ValueError: They are others, or no map was told.
    """
    if gate.host_map is None:
        raise ValueError(
            f"{type(gate).__name__} was told no map: hand hw_shape to attend_gated, or let the adapter's "
            'sizes_from_model return the host_map that the model keeps.'
        )
    height, width = gate.host_map
    if x.shape[1] != gate.class_tokens + height * width:
        raise ValueError(
            f'{x.shape[1]} tokens are not the {gate.class_tokens} + {height} x {width} of the image size that the '
            f'model was built for. Its calls do not name the map, so that {type(gate).__name__} takes images of that '
            'size alone, and all of their tokens. Build the model for the size of these images, such as '
            'img_size=(height, width), gate it, and load the checkpoint then.'
        )
    return gate.host_map


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
        class_tokens: Number of tokens before the map's, such as a class token.

    Raises:
        ConfigError: ``embed_dims`` is no multiple of ``num_heads``, ``attn_drop`` no probability, or ``class_tokens``
            no number of tokens.
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
        class_tokens: int = 0,
    ) -> None:
        super().__init__()
        if embed_dims % num_heads:
            raise ConfigError(f'embed_dims={embed_dims} is not a multiple of num_heads={num_heads}.')
        self.embed_dims = embed_dims
        self.num_heads = num_heads
        self.attn_drop = number('attn_drop', attn_drop, least=0, most=1)
        self.class_tokens = integer('class_tokens', class_tokens, least=0)
        self.head_dim = embed_dims // num_heads
        self.scale = qk_scale or self.head_dim**-0.5
        self.qkv = nn.Linear(embed_dims, 3 * embed_dims, bias=qkv_bias)
        self.proj = nn.Linear(embed_dims, embed_dims)
        self.proj_drop = nn.Dropout(proj_drop)
        self.dropout_layer = build_dropout(dropout_layer) if dropout_layer else nn.Identity()

    def init_weights(self) -> None:
        """Do nothing: parameters keep the initial values of the model around. A gate in the module starts here."""

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Mix the projected tokens of a map, ``(B, N, C)``; the arguments are those of :meth:`MapGate.mix`."""
        q, k, v = (t.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for t in (q, k, v))  # (B, H, N, d)
        dropout = self.attn_drop if self.training else 0.0
        return F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, scale=self.scale).transpose(1, 2).flatten(2)

    def forward(self, x: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend over the tokens ``(B, N, C)`` of a map of height and width ``hw_shape``.

        Raises:
            TypeError: ``x`` is no tensor.
            ValueError: ``x`` has another shape, or its tokens do not make the map.
        """
        check_layout(('x', x, f'B N {self.embed_dims}'), filled='N')
        _check_tokens(x, hw_shape, self.class_tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        return self.dropout_layer(self.proj_drop(self.proj(self.mix(x, q, k, v, hw_shape))))


class MapAttentionAdapter(MapAdapter):
    """Adapter that lets attention over a map into :class:`MapAttention`."""

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Read channels, heads and dropout off an attention module (the host), for its gate."""
        return Sizes(
            host.embed_dims,
            host.num_heads,
            dropout=host.attn_drop,
            scale=host.scale,
            bias=host.qkv.bias is not None,
            class_tokens=host.class_tokens,
        )

    def forward(self, x: Tensor, hw_shape: HeightWidth, identity: Tensor | float | None = None) -> Tensor:
        """Attend over the tokens of a map, see :meth:`attend_gated`."""
        return self.attend_gated(x, hw_shape, identity)


def map_attention(name: str, gate: type[MapGate], *, force: bool = False) -> Callable[..., nn.Module]:
    """Register and return a function that builds :class:`MapAttention` with a gate.

    Args:
        name: The registered name, by which rules name the gate, too.
        gate: Class of the gate.
        force: True replaces what is registered under the name.
    """
    return attention_named(name, gate, ':class:`.MapAttention`', MapAttention, MapAttentionAdapter, force=force)


class SoftmaxGate(MapGate):
    """Plain softmax attention over all tokens of an H x W map, and its class token if there is one, as a baseline.

    ``softmax(Q K^T / sqrt(d)) V``

    Agent and linear attention differ from this baseline in the attention only, while PVT's own attention also reduces
    the keys' map and Swin's divides the map into windows. The cost is O(N^2 d) operations, in torch's fused attention.
    """


SoftmaxAttention = map_attention('SoftmaxAttention', SoftmaxGate)

"""Agent attention."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.ops.agent_attention import agent_attention, interpolation_matrix
from mmgate.ops.library import is_compiling
from mmgate.registry import MODELS

from .gml import check_option
from .map_attention import MapAttention
from .start import OwnStart
from .stripes import merge_stripes, split_stripes

BLOCK = 7  # side of the maps in an_bias and na_bias
CACHED_SIZES = 16  # map sizes whose bias factors an evaluation keeps
AGENTS = ('pooled', 'static')
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')


@MODELS.register_module()
class AgentAttention(OwnStart, MapAttention):
    """Agent attention over an H x W map: ``softmax(Q A^T / sqrt(d) + B2) softmax(A K^T / sqrt(d) + B1) V + DWC(V)``.

    The agent tokens A are the queries averaged over a grid of ``sqrt(agent_num)`` cells a side. Both biases are sums of
    a 7 x 7 map per head and agent, and a row and a column term: parameters of the sizes of pre-training
    (``pretrain_agent_num``, ``map_size``), resized bilinearly, map and agent grid, to what a forward pass meets.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        map_size: Height and width of the map in pre-training.
        agent_num: Agent tokens n in use, a square number. Dense prediction takes more than pre-training.
        pretrain_agent_num: Agents in the biases' shapes, a square number; ``agent_num`` by default.
        agents: ``'pooled'`` from the queries (default), or ``'static'``: learnt, the same for every image (Table 7).
        bias: Add B1 and B2 (Table 6).
        dwc: Add the convolved values (Table 6).
        window: Side of square windows that attend each by itself, with agents of its own (Table 3); the whole map by
            default, and where it is no larger. The map is padded with zeros to whole windows.
        class_token: Whether a class token stands before the map's tokens (DeiT). It takes part in both attentions with
            biases of its own, ``ac_bias`` and ``ca_bias``, but neither in the pooling nor in the convolution.
        **kwargs: ``qkv_bias``, ``qk_scale``, ``attn_drop``, ``proj_drop`` and ``dropout_layer`` of
            :class:`~mmgate.layers.map_attention.MapAttention`.

    In evaluation without gradients the resized factors of the biases are kept per map size, ``n (8 H + W)`` numbers a
    head each; a changed parameter, ``load_state_dict`` and ``train`` discard them. The biases themselves, ``n H W`` a
    head, exist one layer at a time.

    Raises:
        ValueError: A number of agents that is no square, an unknown kind of agents, windows beside a class token,
            or ``embed_dims`` no multiple of ``num_heads``.

    The biases start normal with deviation 0.02 and the convolution as torch's, whatever a host's ``init_weights`` does.

    Source: Agent attention, Eq. 6, tables 3, 6 and 7, appendix A; the shapes of the biases are those of the authors'
    checkpoints.
    """

    own = ('dwc', 'agent_tokens', *BIASES, *CLASS_BIASES)

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        map_size: tuple[int, int],
        agent_num: int = 49,
        pretrain_agent_num: int | None = None,
        agents: str = 'pooled',
        bias: bool = True,
        dwc: bool = True,
        window: int | None = None,
        class_token: bool = False,
        **kwargs: Any,
    ) -> None:
        check_option('agents', agents, AGENTS)
        if window is not None and class_token:
            raise ValueError('window and class_token exclude each other: a class token lies in no window.')
        super().__init__(embed_dims, num_heads, **kwargs)
        pretrain_agent_num = agent_num if pretrain_agent_num is None else pretrain_agent_num
        for name, number in (('agent_num', agent_num), ('pretrain_agent_num', pretrain_agent_num)):
            if number < 1 or isqrt(number) ** 2 != number:
                raise ValueError(f'{name}={number} must be a square number: agents lie on a square grid.')
        self.grid, self.pretrain_grid = isqrt(agent_num), isqrt(pretrain_agent_num)
        height, width = int(map_size[0]), int(map_size[1])
        if window is not None:
            height, width = min(window, height), min(window, width)
        self.map_size: tuple[int, int] = (height, width)
        self.class_tokens, self.window, n = int(class_token), window, pretrain_agent_num
        self.dwc = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims) if dwc else None
        self.agent_tokens = nn.Parameter(torch.empty(1, n, embed_dims)) if agents == 'static' else None
        self.an_bias = nn.Parameter(torch.empty(num_heads, n, BLOCK, BLOCK))
        self.na_bias = nn.Parameter(torch.empty(num_heads, n, BLOCK, BLOCK))
        self.ah_bias = nn.Parameter(torch.empty(1, num_heads, n, height, 1))
        self.aw_bias = nn.Parameter(torch.empty(1, num_heads, n, 1, width))
        self.ha_bias = nn.Parameter(torch.empty(1, num_heads, height, 1, n))
        self.wa_bias = nn.Parameter(torch.empty(1, num_heads, 1, width, n))
        if class_token:
            self.ac_bias = nn.Parameter(torch.empty(1, num_heads, n, 1))
            self.ca_bias = nn.Parameter(torch.empty(1, num_heads, 1, n))
        if not bias:
            for name in (*BIASES, *CLASS_BIASES):
                setattr(self, name, None)
        self._factors: dict[tuple[int, int], tuple[_Factors, _Factors]] = {}
        self._cached: list[tuple[tuple[Any, ...], Tensor]] = []  # what the factors were made from
        self.reset_start()

    def reset_start(self) -> None:
        """Draw the biases from a normal distribution of deviation 0.02, truncated at 2, and the convolution anew."""
        if self.dwc is not None:
            self.dwc.reset_parameters()
        for name in (*BIASES, *CLASS_BIASES, 'agent_tokens'):
            if getattr(self, name, None) is not None:
                nn.init.trunc_normal_(getattr(self, name), std=0.02)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend through the agents and add the convolved values, in each window if there are windows."""
        window = (min(self.window or hw_shape[0], hw_shape[0]), min(self.window or hw_shape[1], hw_shape[1]))
        if window != hw_shape:
            q, k, v = (split_stripes(t, hw_shape, window) for t in (q, k, v))
            return merge_stripes(self._mix(q, k, v, window), hw_shape, window)
        return self._mix(q, k, v, hw_shape)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        agents = self._agents(q, hw_shape)
        bias1, bias2 = (None, None) if self.an_bias is None else self.biases(hw_shape)
        q, k, values, agents = (self.split_heads(t) for t in (q, k, v, agents))
        out = agent_attention(q, k, values, agents, bias1, bias2, scale=self.scale, dropout=self._drop)  # (B, H, N, d)
        out = out.transpose(1, 2).flatten(2)
        if self.dwc is None:
            return out
        values = (
            v[:, self.class_tokens :].transpose(1, 2).unflatten(-1, hw_shape)
        )  # (B, C, h, w), channels last in memory
        return out + self.behind_class_token(self.dwc(values).flatten(2).transpose(1, 2))

    def _agents(self, q: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Return the agent tokens ``(B, n, C)``, their channels next to each other, as fused attention needs them."""
        if self.agent_tokens is None:
            grid = q[:, self.class_tokens :].transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w)
            agents = F.adaptive_avg_pool2d(grid, self.grid)
        else:
            agents = self.agent_tokens.transpose(1, 2).unflatten(-1, (self.pretrain_grid, self.pretrain_grid))
            if self.grid != self.pretrain_grid:
                agents = F.interpolate(agents, size=(self.grid, self.grid), mode='bilinear')
            agents = agents.expand(len(q), -1, -1, -1).to(q.dtype)
        return agents.flatten(2).transpose(1, 2).contiguous()

    def biases(self, hw_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return B1 ``(1, H, n, N)`` and B2 ``(1, H, N, n)`` for a map of ``hw_shape``, the class token first."""
        key = (int(hw_shape[0]), int(hw_shape[1]))
        caches = not self.training and not torch.is_grad_enabled() and not is_compiling()
        if caches:
            self._discard_stale_factors()
        factors = self._factors.get(key) if caches else None
        if factors is None:
            rows, columns = self.ha_bias[0, :, :, 0].transpose(1, 2), self.wa_bias[0, :, 0].transpose(1, 2)
            with _without_autocast(self.an_bias):  # the same factors in and out of autocast
                factors = (
                    self._factorise(self.an_bias, self.ah_bias[0, ..., 0], self.aw_bias[0, :, :, 0], hw_shape),
                    self._factorise(self.na_bias, rows, columns, hw_shape),
                )
            if caches:
                while len(self._factors) >= CACHED_SIZES:
                    self._factors.pop(next(iter(self._factors)))
                self._factors[key] = factors
        (map1, rows1, columns1, resize), (map2, rows2, columns2, _) = factors
        # B1 (H, n, h, w) = map1 (H, n, h, 7) resize (7, w) + rows + columns, the rows as an eighth term of the product
        ones = resize.new_ones(1, resize.shape[1])
        basis = torch.cat([resize, ones])  # (8, w)
        terms1 = torch.cat([map1, rows1[..., None]], -1).flatten(0, 1)  # (H n, h, 8)
        bias1 = torch.baddbmm(columns1.flatten(0, 1)[:, None], terms1, basis.expand(len(terms1), -1, -1))
        # B2 (H, h, w, n) = resize^T (w, 7) map2 (H, h, 7, n) + rows + columns
        terms2 = torch.cat([map2, rows2[..., None]], -1).permute(0, 2, 3, 1).flatten(0, 1)  # (H h, 8, n)
        columns2 = columns2.transpose(1, 2).repeat_interleave(hw_shape[0], 0)  # (H h, w, n)
        bias2 = torch.baddbmm(columns2, basis.t().expand(len(terms2), -1, -1), terms2)
        heads, agents = self.num_heads, self.grid**2
        bias1, bias2 = bias1.view(1, heads, agents, -1), bias2.view(1, heads, -1, agents)
        if not self.class_tokens:
            return bias1, bias2
        of_keys, of_queries = (self._resize_agents(b.view(heads, -1, 1)) for b in (self.ac_bias, self.ca_bias))
        of_keys, of_queries = of_keys.to(bias1.dtype)[None], of_queries.to(bias2.dtype).transpose(1, 2)[None]
        return torch.cat([of_keys, bias1], -1), torch.cat([of_queries, bias2], -2)

    def _resize_agents(self, x: Tensor) -> Tensor:
        """Resize ``(H, n, x)`` of pre-training to the agents in use."""
        if self.pretrain_grid == self.grid:
            return x
        agents, side = interpolation_matrix(self.pretrain_grid, self.grid, x), self.pretrain_grid
        x = x.view(self.num_heads, side, side, -1)
        return torch.einsum('ia,jb,habx->hijx', agents, agents, x).reshape(self.num_heads, self.grid**2, -1)

    def _factorise(self, block: Tensor, rows: Tensor, columns: Tensor, hw_shape: tuple[int, int]) -> _Factors:
        """Resize a bias along its agents and its rows: ``(H, n, h, 7)``, ``(H, n, h)``, ``(H, n, w)`` and ``(7, w)``.

        A bilinear resize is one small matrix an axis, so the axes may come in any order, and what is constant along an
        axis stays so.
        """
        resize = {
            (source, target): interpolation_matrix(source, target, block)
            for source, target in (
                *((BLOCK, size) for size in hw_shape),
                *zip(self.map_size, hw_shape, strict=True),
            )
        }
        block = self._resize_agents(block.flatten(2)).unflatten(-1, (BLOCK, BLOCK))  # (H, n, 7, 7)
        rows, columns = self._resize_agents(rows), self._resize_agents(columns)
        height, width = hw_shape
        return (
            resize[BLOCK, height] @ block,
            rows @ resize[self.map_size[0], height].t(),
            columns @ resize[self.map_size[1], width].t(),
            resize[BLOCK, width].t(),
        )

    def _discard_stale_factors(self) -> None:
        """Empty the cache if a parameter is another tensor, was moved, converted or written to, or holds other numbers.

        ``.half()`` and ``.cuda()`` keep the parameter and its counter. So does a write through ``.data``, which
        comparing numbers finds on the CPU; on a GPU that would wait for all work in flight.
        """
        parameters = [getattr(self, name) for name in BIASES]
        marks = [(id(p), p._version, p.device, p.dtype) for p in parameters]
        fresh = marks == [mark for mark, _ in self._cached] and all(
            p.device.type != 'cpu' or torch.equal(p, numbers)
            for p, (_, numbers) in zip(parameters, self._cached, strict=True)
        )
        if not fresh:
            self._factors.clear()
            self._cached = [(mark, p.detach().clone()) for mark, p in zip(marks, parameters, strict=True)]

    def train(self, mode: bool = True) -> AgentAttention:
        """Set the mode and discard the cached bias factors."""
        self._cached.clear()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._cached.clear()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_factors': {}, '_cached': []}  # a copied or pickled layer starts without a cache

    def extra_repr(self) -> str:
        """Sizes for ``print(module)``."""
        return (
            f'agents={self.grid}x{self.grid}, pretrained={self.pretrain_grid}x{self.pretrain_grid}, map={self.map_size}'
        )


def _without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    kind = like.device.type
    return nullcontext() if kind == 'meta' else torch.autocast(kind, enabled=False)


_Factors = tuple[Tensor, Tensor, Tensor, Tensor]

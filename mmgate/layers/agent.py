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

from .map_attention import MapAttention
from .start import OwnStart

BLOCK = 7  # side of the maps in an_bias and na_bias
CACHED_SIZES = 16  # map sizes whose bias factors an evaluation keeps
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
        class_token: Whether a class token stands before the map's tokens (DeiT). It takes part in both attentions with
            biases of its own, ``ac_bias`` and ``ca_bias``, but neither in the pooling nor in the convolution.
        **kwargs: ``qkv_bias``, ``qk_scale``, ``attn_drop``, ``proj_drop`` and ``dropout_layer`` of
            :class:`~mmgate.layers.map_attention.MapAttention`.

    In evaluation without gradients the resized factors of the biases are kept per map size, ``n (8 H + W)`` numbers a
    head each; a changed parameter, ``load_state_dict`` and ``train`` discard them. The biases themselves, ``n H W`` a
    head, exist one layer at a time.

    Raises:
        ValueError: A number of agents that is no square, or ``embed_dims`` no multiple of ``num_heads``.

    The biases start normal with deviation 0.02 and the convolution as torch's, whatever a host's ``init_weights`` does.

    Source: Agent attention, Eq. 6 and appendix A; the shapes of the biases are those of the authors' checkpoints.
    """

    own = ('dwc', *BIASES, *CLASS_BIASES)

    def __init__(
        self,
        embed_dims: int,
        num_heads: int,
        *,
        map_size: tuple[int, int],
        agent_num: int = 49,
        pretrain_agent_num: int | None = None,
        class_token: bool = False,
        **kwargs: Any,
    ) -> None:
        super().__init__(embed_dims, num_heads, **kwargs)
        pretrain_agent_num = agent_num if pretrain_agent_num is None else pretrain_agent_num
        for name, number in (('agent_num', agent_num), ('pretrain_agent_num', pretrain_agent_num)):
            if number < 1 or isqrt(number) ** 2 != number:
                raise ValueError(f'{name}={number} must be a square number: agents lie on a square grid.')
        self.grid, self.pretrain_grid = isqrt(agent_num), isqrt(pretrain_agent_num)
        height, width = int(map_size[0]), int(map_size[1])
        self.map_size: tuple[int, int] = (height, width)
        self.class_tokens, n = int(class_token), pretrain_agent_num
        self.dwc = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims)
        self.an_bias = nn.Parameter(torch.empty(num_heads, n, BLOCK, BLOCK))
        self.na_bias = nn.Parameter(torch.empty(num_heads, n, BLOCK, BLOCK))
        self.ah_bias = nn.Parameter(torch.empty(1, num_heads, n, height, 1))
        self.aw_bias = nn.Parameter(torch.empty(1, num_heads, n, 1, width))
        self.ha_bias = nn.Parameter(torch.empty(1, num_heads, height, 1, n))
        self.wa_bias = nn.Parameter(torch.empty(1, num_heads, 1, width, n))
        if class_token:
            self.ac_bias = nn.Parameter(torch.empty(1, num_heads, n, 1))
            self.ca_bias = nn.Parameter(torch.empty(1, num_heads, 1, n))
        self._factors: dict[tuple[int, int], tuple[_Factors, _Factors]] = {}
        self._cached: list[tuple[tuple[Any, ...], Tensor]] = []  # what the factors were made from
        self.reset_start()

    def reset_start(self) -> None:
        """Draw the biases from a normal distribution of deviation 0.02, truncated at 2, and the convolution anew."""
        self.dwc.reset_parameters()
        for name in BIASES + CLASS_BIASES * self.class_tokens:
            nn.init.trunc_normal_(getattr(self, name), std=0.02)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend through the agents and add the convolved values."""
        first = self.class_tokens
        grid = q[:, first:].transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w)
        agents = F.adaptive_avg_pool2d(grid, self.grid).flatten(2).transpose(1, 2)  # (B, n, C)
        agents = agents.contiguous()  # fused attention needs channels next to each other
        bias1, bias2 = self.biases(hw_shape)
        q, k, values, agents = (self.split_heads(t) for t in (q, k, v, agents))
        out = agent_attention(q, k, values, agents, bias1, bias2, scale=self.scale, dropout=self._drop)  # (B, H, N, d)
        local = self.dwc(v[:, first:].transpose(1, 2).unflatten(-1, hw_shape))  # (B, C, h, w), channels last in memory
        local = local.flatten(2).transpose(1, 2)
        return out.transpose(1, 2).flatten(2) + (F.pad(local, (0, 0, first, 0)) if first else local)

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

"""The two biases of agent attention: maps per head and agent from small factors, resized to what a pass meets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from mmgate.layers.base.map import MapAttention
from mmgate.ops.agent_attention import interpolation_matrix
from mmgate.ops.library import is_compiling

from .resizing import resize_axis

BLOCK = 7  # side of the maps in an_bias and na_bias
CACHED_SIZES = 16  # map sizes whose bias factors an evaluation keeps
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')
AXES = {'ah_bias': 3, 'aw_bias': 4, 'ha_bias': 2, 'wa_bias': 3}  # which runs along the map


class AgentBiases(MapAttention):
    """Base of :class:`~mmgate.layers.agent.AgentAttention` that holds its biases.

    In evaluation without gradients the resized factors of the biases are kept per map size, ``n (8 H + W)`` numbers a
    head each; a changed parameter, ``load_state_dict`` and ``train`` discard them. The biases themselves, ``n H W`` a
    head, exist one layer at a time.

    Attributes:
        grid: Side of the grid of agents in use.
        pretrain_grid: Side of the grid of agents in the biases' shapes.
        map_size: Height and width of the map in pre-training, likewise.
    """

    grid: int
    pretrain_grid: int
    map_size: tuple[int, int]
    an_bias: nn.Parameter
    na_bias: nn.Parameter
    ah_bias: nn.Parameter
    aw_bias: nn.Parameter
    ha_bias: nn.Parameter
    wa_bias: nn.Parameter
    ac_bias: nn.Parameter
    ca_bias: nn.Parameter

    def make_biases(self, n: int, *, bias: bool, class_token: bool) -> None:
        """Create the parameters, or None in their places.

        Args:
            n: Agents in their shapes.
            bias: Whether there are any.
            class_token: Whether there are those of a class token.
        """
        heads, (height, width) = self.num_heads, self.map_size
        shapes: dict[str, tuple[int, ...]] = dict(
            an_bias=(heads, n, BLOCK, BLOCK),
            na_bias=(heads, n, BLOCK, BLOCK),
            ah_bias=(1, heads, n, height, 1),
            aw_bias=(1, heads, n, 1, width),
            ha_bias=(1, heads, height, 1, n),
            wa_bias=(1, heads, 1, width, n),
        )
        if class_token:
            shapes.update(ac_bias=(1, heads, n, 1), ca_bias=(1, heads, 1, n))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if bias else None)
        self._factors: dict[tuple[int, int], tuple[_Factors, _Factors]] = {}
        self._cached: list[tuple[tuple[Any, ...], Tensor]] = []  # what the factors were made from

    def adopt(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Resize rows and columns of another resolution, too."""
        resized = super().adopt(state_dict, prefix)
        for name, axis in AXES.items():
            own, value = getattr(self, name), state_dict.get(prefix + name)
            if own is not None and value is not None and value.dim() == own.dim():
                state_dict[prefix + name] = resize_axis(value, axis, own.shape[axis])
                resized += [name] * (state_dict[prefix + name] is not value)
        return resized

    def biases(self, hw_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return B1 ``(1, H, n, N)`` and B2 ``(1, H, N, n)`` for a map of ``hw_shape``, the class token first."""
        caches = not self.training and not torch.is_grad_enabled() and not is_compiling()
        if caches:
            self._discard_stale_factors()
        factors = self._factors.get(hw_shape) if caches else None  # sizes of a graph may be symbols, which are no keys
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
                self._factors[hw_shape] = factors
        (map1, rows1, columns1, resize), (map2, rows2, columns2, _) = factors
        # B1 (H, n, h, w) = map1 (H, n, h, 7) resize (7, w) + rows + columns, the rows as an eighth term of the product
        ones = resize.new_ones(1, resize.shape[1])
        basis = torch.cat([resize, ones])  # (8, w)
        terms1 = torch.cat([map1, rows1[..., None]], -1).flatten(0, 1)  # (H n, h, 8)
        bias1 = torch.baddbmm(columns1.flatten(0, 1)[:, None], terms1, basis.expand(len(terms1), -1, -1))
        # B2 (H, h, w, n) = resize^T (w, 7) map2 (H, h, 7, n) + rows + columns
        terms2 = torch.cat([map2, rows2[..., None]], -1).permute(0, 2, 3, 1).flatten(0, 1)  # (H h, 8, n)
        columns2 = columns2.transpose(1, 2)[:, None].expand(-1, hw_shape[0], -1, -1).flatten(0, 1)  # (H h, w, n)
        bias2 = torch.baddbmm(columns2, basis.t().expand(terms2.shape[0], -1, -1), terms2)
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
        height, width = (interpolation_matrix(BLOCK, size, block) for size in hw_shape)
        sides = zip(self.map_size, hw_shape, strict=True)
        along = [interpolation_matrix(source, size, block) for source, size in sides]
        block = self._resize_agents(block.flatten(2)).unflatten(-1, (BLOCK, BLOCK))  # (H, n, 7, 7)
        rows, columns = self._resize_agents(rows), self._resize_agents(columns)
        return height @ block, rows @ along[0].t(), columns @ along[1].t(), width.t()

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

    def train(self, mode: bool = True) -> AgentBiases:
        """Set the mode and discard the cached bias factors."""
        self._cached.clear()
        return super().train(mode)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        self._cached.clear()
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, '_factors': {}, '_cached': []}  # a copied or pickled layer starts without a cache


def _without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    kind = like.device.type
    return nullcontext() if kind == 'meta' else torch.autocast(kind, enabled=False)


_Factors = tuple[Tensor, Tensor, Tensor, Tensor]

"""The two biases of agent attention: maps per head and agent from small factors, resized to what a pass meets."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from mmgate.layers.base.map import MapGate
from mmgate.layers.parts.resizing import resize_axis
from mmgate.ops.agent_attention import interpolation_matrix
from mmgate.ops.autocast import without_autocast

BLOCK = 7  # side of the maps in an_bias and na_bias
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')
AXES = {'ah_bias': 3, 'aw_bias': 4, 'ha_bias': 2, 'wa_bias': 3}  # which runs along the map


class AgentBiases(MapGate):
    """Base of :class:`~mmgate.layers.agent.AgentGate` that holds its biases.

    Attributes:
        grid: Side of the grid of agents in use.
        pretrain_grid: Side of the grid of agents in the biases' shapes.
        map_size: Height and width of the map in pre-training.
        bias_size: Those in the biases' shapes: of the map, or of a window.
    """

    grid: int
    pretrain_grid: int
    map_size: tuple[int, int]
    bias_size: tuple[int, int]
    an_bias: nn.Parameter
    na_bias: nn.Parameter
    ah_bias: nn.Parameter
    aw_bias: nn.Parameter
    ha_bias: nn.Parameter
    wa_bias: nn.Parameter
    ac_bias: nn.Parameter
    ca_bias: nn.Parameter

    def make_biases(self, bias: bool) -> None:
        """Create the parameters, or None in their places without ``bias``."""
        heads = self.num_heads
        n = self.pretrain_grid**2
        height, width = self.bias_size
        shapes: dict[str, tuple[int, ...]] = dict(
            an_bias=(heads, n, BLOCK, BLOCK),
            na_bias=(heads, n, BLOCK, BLOCK),
            ah_bias=(1, heads, n, height, 1),
            aw_bias=(1, heads, n, 1, width),
            ha_bias=(1, heads, height, 1, n),
            wa_bias=(1, heads, 1, width, n),
        )
        if self.class_tokens:
            shapes.update(ac_bias=(1, heads, n, 1), ca_bias=(1, heads, 1, n))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if bias else None)

    def resize_loaded(self, state_dict: dict[str, Any], prefix: str) -> list[str]:
        """Resize rows and columns of another resolution, too."""
        resized = super().resize_loaded(state_dict, prefix)
        for name, axis in AXES.items():
            own, value = getattr(self, name), state_dict.get(prefix + name)
            if own is not None and value is not None and value.dim() == own.dim():
                state_dict[prefix + name] = resize_axis(value, axis, own.shape[axis])
                resized += [name] * (state_dict[prefix + name] is not value)
        return resized

    def prepare_count(self) -> None:
        """Leave out the resizing of the biases, an interpolation that our layer does as a product."""
        if self.an_bias is not None:
            self.biases = self._unresized  # type: ignore[method-assign]

    def _unresized(self, hw_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        tokens = self.class_tokens + hw_shape[0] * hw_shape[1]
        bias = self.an_bias.new_zeros(1, self.num_heads, self.grid**2, tokens)
        return bias, bias.transpose(2, 3)

    def biases(self, hw_shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return B1 ``(1, H, n, N)`` and B2 ``(1, H, N, n)`` for a map of ``hw_shape``, the class token first."""
        heads, agents = self.num_heads, self.grid**2
        rows1, columns1 = self.ah_bias[0, ..., 0], self.aw_bias[0, :, :, 0]
        rows2, columns2 = self.ha_bias[0, :, :, 0].transpose(1, 2), self.wa_bias[0, :, 0].transpose(1, 2)
        with without_autocast(self.an_bias.device.type):  # the same factors in and out of it
            map1, columns1, basis = self._factors(self.an_bias, rows1, columns1, hw_shape)
            map2, columns2, _ = self._factors(self.na_bias, rows2, columns2, hw_shape)
        # B1 (H n, h, w) = map1 (H n, h, 8) basis (8, w) + columns
        map1, columns1 = map1.flatten(0, 1), columns1.flatten(0, 1)[:, None]
        bias1 = torch.baddbmm(columns1, map1, basis.expand(len(map1), -1, -1)).view(1, heads, agents, -1)
        # B2 (H h, w, n) = basis^T (w, 8) map2 (H h, 8, n) + columns
        map2 = map2.permute(0, 2, 3, 1).flatten(0, 1)
        columns2 = columns2.transpose(1, 2)[:, None].expand(-1, hw_shape[0], -1, -1).flatten(0, 1)
        bias2 = torch.baddbmm(columns2, basis.t().expand(map2.shape[0], -1, -1), map2).view(1, heads, -1, agents)
        if not self.class_tokens:
            return bias1, bias2
        of_keys, of_queries = (self._resize_agents(b.view(heads, -1, 1)) for b in (self.ac_bias, self.ca_bias))
        of_keys, of_queries = of_keys.to(bias1.dtype)[None], of_queries.to(bias2.dtype).transpose(1, 2)[None]
        return torch.cat([of_keys, bias1], -1), torch.cat([of_queries, bias2], -2)

    def _factors(
        self, block: Tensor, rows: Tensor, columns: Tensor, hw_shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return ``(H, n, h, 8)``, ``(H, n, w)`` and ``(8, w)``: a bias is the first times the last plus the second.

        A bilinear resize is one small matrix an axis, so the axes may come in any order, and what is constant along an
        axis stays so. The rows are an eighth term of the product, which spares a pass over the large result.
        """
        height, width = (interpolation_matrix(BLOCK, size, block) for size in hw_shape)
        down, along = (interpolation_matrix(*sides, block) for sides in zip(self.bias_size, hw_shape, strict=True))
        block = height @ self._resize_agents(block.flatten(2)).unflatten(-1, (BLOCK, BLOCK))  # (H, n, h, 7)
        rows, columns = self._resize_agents(rows) @ down.t(), self._resize_agents(columns) @ along.t()
        ones = width.new_ones(1, width.shape[0])
        return torch.cat([block, rows[..., None]], -1), columns, torch.cat([width.t(), ones])

    def _resize_agents(self, x: Tensor) -> Tensor:
        """Resize ``(H, n, x)`` of pre-training to the agents in use."""
        if self.pretrain_grid == self.grid:
            return x
        agents, side = interpolation_matrix(self.pretrain_grid, self.grid, x), self.pretrain_grid
        x = x.view(self.num_heads, side, side, -1)
        return torch.einsum('ia,jb,habx->hijx', agents, agents, x).reshape(self.num_heads, self.grid**2, -1)

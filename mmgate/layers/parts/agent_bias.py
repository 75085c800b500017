"""The two position biases of agent attention, resized to any map and to any number of agent tokens."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmgate.layers.base.gate import StateDict
from mmgate.layers.base.map import MapGate, Size
from mmgate.layers.parts.resizing import resize_axis
from mmgate.ops.agent import interpolation_matrix
from mmgate.ops.autocast import without_autocast

# Side of the maps in an_bias and na_bias.
BLOCK = 7
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')
# Axis of a row or column bias that runs along the map.
AXES = {'ah_bias': 3, 'aw_bias': 4, 'ha_bias': 2, 'wa_bias': 3}


class AgentBiases(MapGate):
    """Base class of :class:`~mmgate.layers.agent.AgentGate`, which holds and resizes its two position biases.

    Each bias is the sum of three parts. Those of B1 are ``an_bias`` (a map), ``ah_bias`` (rows) and ``aw_bias``
    (columns); those of B2 are ``na_bias``, ``ha_bias`` and ``wa_bias``. A class token has ``ac_bias`` and ``ca_bias``.

    Attributes:
        grid: Side of the grid of agents in use.
        pretrain_grid: Side of the grid of agents in the biases' shapes.
        map_size: Height and width of the map in pre-training.
        bias_size: Height and width in the biases' shapes: of the map, or of a window.
    """

    grid: int
    pretrain_grid: int
    map_size: Size
    bias_size: Size
    an_bias: nn.Parameter
    na_bias: nn.Parameter
    ah_bias: nn.Parameter
    aw_bias: nn.Parameter
    ha_bias: nn.Parameter
    wa_bias: nn.Parameter
    ac_bias: nn.Parameter
    ca_bias: nn.Parameter

    def make_biases(self, bias: bool) -> None:
        """Create the parameters of the biases; without ``bias`` their names are registered as None."""
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
            shapes.update(ac_bias=(1, heads, n, self.class_tokens), ca_bias=(1, heads, self.class_tokens, n))
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape)) if bias else None)

    def resize_loaded(self, state_dict: StateDict, prefix: str) -> list[str]:
        """Resize row and column biases in a state dict to this gate's shapes; return the names of those resized."""
        resized = super().resize_loaded(state_dict, prefix)
        for name, axis in AXES.items():
            own = getattr(self, name)
            value = state_dict.get(prefix + name)
            if own is None or value is None or value.dim() != own.dim():
                continue
            state_dict[prefix + name] = resize_axis(value, axis, own.shape[axis])
            if state_dict[prefix + name] is not value:
                resized.append(name)
        return resized

    def prepare_count(self) -> None:
        """Leave the resizing of the biases out of a count of operations; see :meth:`.Gate.prepare_count`."""
        if self.an_bias is not None:
            self.biases = self._unresized  # type: ignore[method-assign]

    def _unresized(self, hw_shape: Size) -> tuple[Tensor, Tensor]:
        """Return zeros of the shapes that :meth:`biases` returns, without the products that resize."""
        tokens = self.class_tokens + hw_shape[0] * hw_shape[1]
        bias = self.an_bias.new_zeros(1, self.num_heads, self.grid**2, tokens)
        return bias, bias.transpose(2, 3)

    def biases(self, hw_shape: Size) -> tuple[Tensor, Tensor]:
        """Return both position biases for a map of size ``hw_shape``: B1 ``(1, H, n, N)`` and B2 ``(1, H, N, n)``.

        The class token comes first.
        """
        heads = self.num_heads
        agents = self.grid**2
        rows1 = self.ah_bias[0, ..., 0]  # (H, n, h)
        columns1 = self.aw_bias[0, :, :, 0]  # (H, n, w)
        rows2 = self.ha_bias[0, :, :, 0].transpose(1, 2)  # (H, n, h)
        columns2 = self.wa_bias[0, :, 0].transpose(1, 2)  # (H, n, w)
        # Under autocast the factors are computed as without it.
        with without_autocast(self.an_bias.device.type):
            map1, columns1, basis = self._factors(self.an_bias, rows1, columns1, hw_shape)
            map2, columns2, _ = self._factors(self.na_bias, rows2, columns2, hw_shape)
        # B1 (H n, h, w) = map1 (H n, h, 8) basis (8, w) + columns
        map1 = map1.flatten(0, 1)
        columns1 = columns1.flatten(0, 1)[:, None]
        bias1 = torch.baddbmm(columns1, map1, basis.expand(len(map1), -1, -1)).view(1, heads, agents, -1)
        # B2 (H h, w, n) = basis^T (w, 8) map2 (H h, 8, n) + columns
        map2 = map2.permute(0, 2, 3, 1).flatten(0, 1)
        columns2 = columns2.transpose(1, 2)[:, None].expand(-1, hw_shape[0], -1, -1).flatten(0, 1)
        bias2 = torch.baddbmm(columns2, basis.t().expand(map2.shape[0], -1, -1), map2).view(1, heads, -1, agents)
        if not self.class_tokens:
            return bias1, bias2
        class_key = self._resize_agents(self.ac_bias[0]).to(bias1.dtype)  # (H, n, class tokens)
        class_query = self._resize_agents(self.ca_bias[0].transpose(1, 2).contiguous()).to(bias2.dtype)
        class_query = class_query.transpose(1, 2)  # (H, class tokens, n)
        return torch.cat([class_key[None], bias1], -1), torch.cat([class_query[None], bias2], -2)

    def _factors(self, block: Tensor, rows: Tensor, columns: Tensor, hw_shape: Size) -> tuple[Tensor, Tensor, Tensor]:
        """Return the three factors of a resized bias: ``(H, n, h, 8)``, ``(H, n, w)`` and ``(8, w)``.

        The bias is the first times the last, plus the second. A bilinear resize multiplies each axis by a small matrix,
        so the axes may come in any order, and values that are constant along an axis stay so. The rows are an eighth
        term of the product, which saves a pass over the large result.

        Args:
            block: Map of the bias ``(H, n, 7, 7)``.
            rows: Row bias ``(H, n, h)`` of pre-training.
            columns: Column bias ``(H, n, w)`` of pre-training.
            hw_shape: Height and width of the present map.
        """
        height = interpolation_matrix(BLOCK, hw_shape[0], block)
        width = interpolation_matrix(BLOCK, hw_shape[1], block)
        of_rows = interpolation_matrix(self.bias_size[0], hw_shape[0], block)
        of_columns = interpolation_matrix(self.bias_size[1], hw_shape[1], block)
        block = height @ self._resize_agents(block.flatten(2)).unflatten(-1, (BLOCK, BLOCK))  # (H, n, h, 7)
        rows = self._resize_agents(rows) @ of_rows.t()
        columns = self._resize_agents(columns) @ of_columns.t()
        ones = width.new_ones(1, width.shape[0])
        return torch.cat([block, rows[..., None]], -1), columns, torch.cat([width.t(), ones])

    def _resize_agents(self, x: Tensor) -> Tensor:
        """Resize a bias ``(H, n, x)`` from the agents of pre-training to the number of agents in use."""
        if self.pretrain_grid == self.grid:
            return x
        side = self.pretrain_grid
        agents = interpolation_matrix(side, self.grid, x)
        x = x.view(self.num_heads, side, side, -1)
        return torch.einsum('ia,jb,habx->hijx', agents, agents, x).reshape(self.num_heads, self.grid**2, -1)

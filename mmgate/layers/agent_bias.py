"""The two biases of agent attention: maps per head and agent from small factors, resized to what a pass meets."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.map import MapAttention
from mmgate.ops.agent_attention import interpolation_matrix

from .resizing import resize_axis

BLOCK = 7  # side of the maps in an_bias and na_bias
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')
AXES = {'ah_bias': 3, 'aw_bias': 4, 'ha_bias': 2, 'wa_bias': 3}  # which runs along the map


class AgentBiases(MapAttention):
    """Base of :class:`~mmgate.layers.agent.AgentAttention` that holds its biases.

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
        rows, columns = self.ha_bias[0, :, :, 0].transpose(1, 2), self.wa_bias[0, :, 0].transpose(1, 2)
        with _without_autocast(self.an_bias):  # the same terms in and out of autocast
            height, width = (interpolation_matrix(BLOCK, size, self.an_bias) for size in hw_shape)
            sides = zip(self.map_size, hw_shape, strict=True)
            along = [interpolation_matrix(source, size, self.an_bias) for source, size in sides]
            terms1, columns1 = self._terms(
                self.an_bias, self.ah_bias[0, ..., 0], self.aw_bias[0, :, :, 0], height, along
            )
            terms2, columns2 = self._terms(self.na_bias, rows, columns, height, along)
            basis = torch.cat([width.t(), width.new_ones(1, width.shape[0])])  # (8, w)
        # B1 (H, n, h, w) = terms1^T (H, n, h, 8) basis (8, w) + columns1
        terms1 = terms1.flatten(0, 1).transpose(1, 2)  # (H n, h, 8)
        bias1 = torch.baddbmm(columns1.flatten(0, 1)[:, None], terms1, basis.expand(len(terms1), -1, -1))
        # B2 (H, h, w, n) = basis^T (w, 8) terms2 (H, h, 8, n) + columns2
        terms2 = terms2.permute(0, 3, 2, 1).flatten(0, 1)  # (H h, 8, n)
        columns2 = columns2.transpose(1, 2)[:, None].expand(-1, hw_shape[0], -1, -1).flatten(0, 1)  # (H h, w, n)
        bias2 = torch.baddbmm(columns2, basis.t().expand(len(terms2), -1, -1), terms2)
        heads, agents = self.num_heads, self.grid**2
        bias1, bias2 = bias1.view(1, heads, agents, -1), bias2.view(1, heads, -1, agents)
        if not self.class_tokens:
            return bias1, bias2
        of_keys, of_queries = (self._resize_agents(b.view(heads, -1, 1)) for b in (self.ac_bias, self.ca_bias))
        of_keys, of_queries = of_keys.to(bias1.dtype)[None], of_queries.to(bias2.dtype).transpose(1, 2)[None]
        return torch.cat([of_keys, bias1], -1), torch.cat([of_queries, bias2], -2)

    def _terms(
        self, block: Tensor, rows: Tensor, columns: Tensor, height: Tensor, along: list[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Resize a bias along agents and rows: a map's 7 columns and the rows ``(H, n, 8, h)``, columns ``(H, n, w)``.

        A bilinear resize is one small matrix an axis, so the axes may come in any order, and what is constant along an
        axis stays so.
        """
        rows, columns = F.linear(rows, along[0]), F.linear(columns, along[1])  # (H, n, h), (H, n, w)
        terms = torch.cat([F.linear(block.transpose(2, 3), height), rows[:, :, None]], 2)
        if self.pretrain_grid == self.grid:
            return terms, columns
        sizes = [8 * rows.shape[-1], columns.shape[-1]]
        terms, columns = self._resize_agents(torch.cat([terms.flatten(2), columns], -1)).split(sizes, -1)
        return terms.unflatten(-1, (8, -1)), columns

    def _resize_agents(self, x: Tensor) -> Tensor:
        """Resize ``(H, n, x)`` of pre-training to the agents in use."""
        if self.pretrain_grid == self.grid:
            return x
        axis = interpolation_matrix(self.pretrain_grid, self.grid, x)
        return torch.kron(axis, axis) @ x


def _without_autocast(like: Tensor) -> AbstractContextManager[Any]:
    kind = like.device.type
    return nullcontext() if kind == 'meta' else torch.autocast(kind, enabled=False)

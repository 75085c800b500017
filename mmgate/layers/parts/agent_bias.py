"""The two position biases of agent attention, resized to any map and to any number of agent tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from mmgate.layers.base.gate import StateDict
from mmgate.layers.base.map import MapGate, Size
from mmgate.layers.parts.resizing import resize_axis
from mmgate.ops.agent import grid_interpolation_matrix, interpolation_matrix, keeps_constants
from mmgate.ops.autocast import autocast_dtype, without_autocast

# Side of the maps in an_bias and na_bias.
BLOCK = 7
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')
# Axis of a row or column bias that runs along the map.
AXES = {'ah_bias': 3, 'aw_bias': 4, 'ha_bias': 2, 'wa_bias': 3}

Factors = tuple[Tensor, Tensor, Tensor]


class Kept(NamedTuple):
    """Factors of the biases, and what they were computed from.

    Attributes:
        hw_shape: Height and width of the map.
        dtype: Autocast's dtype, or None.
        versions: torch's count of changes of each parameter.
        parameters: The parameters.
        values: Their memory, which is not used for other tensors as long as it is kept here.
        factors: The factors.
    """

    hw_shape: Size
    dtype: torch.dtype | None
    versions: list[int]
    parameters: list[Tensor]
    values: list[Tensor]
    factors: Factors


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
    _kept: Kept | None = None

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

    def train(self, mode: bool = True) -> AgentBiases:
        """Switch between training and evaluation, and forget what was interpolated."""
        self._kept = None
        return super().train(mode)

    def biases(self, hw_shape: Size) -> tuple[Tensor, Tensor]:
        """Return both position biases for a map of size ``hw_shape``: B1 ``(1, H, n, N)`` and B2 ``(1, H, N, n)``.

        The class token comes first.

        In evaluation without gradients, the small factors of the biases are interpolated once for a size of map, and
        again after a parameter changed. A change in place through ``parameter.data``, which torch does not count, shows
        after the next ``train()`` or ``eval()``.
        """
        terms, columns, basis = self._factors_once(hw_shape)
        basis = basis.expand(len(terms) // 2, -1, -1)
        # Each bias (H n, h, w) = terms (H n, h, 8) basis (8, w) + columns (H n, 1, w)
        shape = 1, self.num_heads, self.grid**2, hw_shape[0] * hw_shape[1]
        bias1, bias2 = (
            torch.baddbmm(added, factor, basis).view(shape)
            for added, factor in zip(columns.chunk(2), terms.chunk(2), strict=True)
        )
        bias2 = bias2.transpose(2, 3).contiguous()
        if not self.class_tokens:
            return bias1, bias2
        class_key = self._resize_agents(self.ac_bias[0]).to(bias1.dtype)  # (H, n, class tokens)
        class_query = self._resize_agents(self.ca_bias[0].transpose(1, 2)).to(bias2.dtype)
        class_query = class_query.transpose(1, 2)  # (H, class tokens, n)
        return torch.cat([class_key[None], bias1], -1), torch.cat([class_query[None], bias2], -2)

    def _factors_once(self, hw_shape: Size) -> Factors:
        """Return :meth:`_factors`, kept from the last call if size and parameters are still those."""
        if self.training or torch.is_grad_enabled() or not keeps_constants(self.an_bias):
            return self._factors(hw_shape)
        parameters = [getattr(self, name) for name in BIASES]
        # Tensors of inference mode do not count their changes.
        if any(one.is_inference() for one in parameters):
            return self._factors(hw_shape)
        dtype = autocast_dtype(self.an_bias.device.type)
        versions = [one._version for one in parameters]
        kept = self._kept
        if (
            kept is None
            or (kept.hw_shape, kept.dtype, kept.versions) != (hw_shape, dtype, versions)
            or any(
                now is not then or now.data_ptr() != values.data_ptr()
                for now, then, values in zip(parameters, kept.parameters, kept.values, strict=True)
            )
        ):
            # A later call may need a gradient, for which torch refuses tensors of inference mode.
            with torch.inference_mode(False), torch.no_grad():
                terms, columns, basis = (one.to(dtype or one.dtype) for one in self._factors(hw_shape))
                values = [one.detach() for one in parameters]
            kept = Kept(hw_shape, dtype, versions, parameters, values, (terms, columns, basis))
            self._kept = kept
        return kept.factors

    def _factors(self, hw_shape: Size) -> Factors:
        """Return both resized biases as factors, B1's before B2's: ``(2 H n, h, 8)``, ``(2 H n, 1, w)``, ``(8, w)``.

        A bias is the first times the last, plus the second. A bilinear resize multiplies each axis by a small matrix,
        so the axes may come in any order, and values that are constant along an axis stay so. The rows are an eighth
        term of the product, which saves a pass over the large result.

        Under autocast they are computed as without it.
        """
        height, width = hw_shape
        map_height, map_width = self.bias_size
        with without_autocast(self.an_bias.device.type):
            # In each bias (H, n, .) the map, the rows and the columns, side by side
            packed1 = torch.cat([self.an_bias.flatten(2), self.ah_bias[0, ..., 0], self.aw_bias[0, :, :, 0]], -1)
            rows2 = self.ha_bias[0, :, :, 0].transpose(1, 2)
            columns2 = self.wa_bias[0, :, 0].transpose(1, 2)
            packed2 = torch.cat([self.na_bias.flatten(2), rows2, columns2], -1)
            packed = self._resize_agents(torch.cat([packed1, packed2])).flatten(0, 1)  # (2 H n, 49 + rows + columns)
            block, rows, columns = packed.split([BLOCK**2, map_height, map_width], -1)
            block = block.unflatten(-1, (BLOCK, BLOCK))
            to_height = interpolation_matrix(BLOCK, height, block)
            block = torch.bmm(to_height.expand(len(block), -1, -1), block)  # (2 H n, h, 7)
            # A comparison would fix the size in a graph that is for maps of any size.
            known = keeps_constants(block)
            if not (known and map_height == height):
                rows = rows @ interpolation_matrix(map_height, height, rows).t()
            if not (known and map_width == width):
                columns = columns @ interpolation_matrix(map_width, width, columns).t()
            basis = interpolation_matrix(BLOCK, width, block, ones=True).t()
            return torch.cat([block, rows[..., None]], -1), columns[:, None], basis

    def _resize_agents(self, x: Tensor) -> Tensor:
        """Resize a bias ``(H, n, x)`` from the agents of pre-training to the number of agents in use."""
        if self.pretrain_grid == self.grid:
            return x
        matrix = grid_interpolation_matrix(self.pretrain_grid, self.grid, x)
        return torch.bmm(matrix.expand(len(x), -1, -1), x)

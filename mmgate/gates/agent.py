"""Agent attention: softmax attention in two steps through a few agent tokens, at a cost linear in the tokens."""

from __future__ import annotations

from math import isqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.gate import Sizes, StateDict
from mmgate.gates.base.map import HeightWidth, MapGate, map_attention, pretraining_map
from mmgate.notes import note
from mmgate.ops.agent import agent_attention, grid_interpolation_matrix, interpolation_matrix, keeps_constants
from mmgate.ops.autocast import without_autocast

from .parts.options import check_option, integer, number
from .parts.resizing import resize_axis
from .parts.stripes import merge_stripes, split_stripes

# Side of the maps in an_bias and na_bias.
BLOCK = 7
BIASES = ('an_bias', 'na_bias', 'ah_bias', 'aw_bias', 'ha_bias', 'wa_bias')
CLASS_BIASES = ('ac_bias', 'ca_bias')
# Axis of a row or column bias that runs along the map.
AXES = {'ah_bias': 3, 'aw_bias': 4, 'ha_bias': 2, 'wa_bias': 3}

Factors = tuple[Tensor, Tensor, Tensor]


class AgentGate(MapGate):
    """Agent attention over an H x W map: ``softmax(Q A^T / sqrt(d) + B2) softmax(A K^T / sqrt(d) + B1) V + DWC(V)``.

    The agent tokens A are the queries, averaged over a grid of ``sqrt(agent_num)`` cells a side. Both biases are sums
    of three terms per head and agent: a 7 x 7 map, rows and columns. In B1 these are ``an_bias``, ``ah_bias`` and
    ``aw_bias``, in B2 ``na_bias``, ``ha_bias`` and ``wa_bias``. They have the sizes of pre-training
    (``pretrain_agent_num``, ``map_size``). A forward pass resizes them bilinearly to its map and its grid of agents.
    Rows and columns in a checkpoint of another map are resized on loading.

    Args:
        sizes: Sizes of the host's attention.
        map_size: Height and width of the map in pre-training, by default that of ``image_size``.
        image_size: Side, or height and width, of the images in pre-training; by default those of the map that the model
            around the host keeps. Without ``bias`` neither is needed.
        agent_num: Number n of agent tokens, a square number. Dense prediction takes more than pre-training.
        pretrain_agent_num: Number of agents in the biases' shapes, a square number; ``agent_num`` by default.
        agents: ``'pooled'`` (default) for agents pooled from the queries, ``'static'`` for learnt ones, which are the
            same for every image (Table 7).
        bias: True adds B1 and B2 (Table 6).
        dwc: True adds the convolved values (Table 6).
        value_factor: Factor of the values that are added to the output; Stable Diffusion takes 0.075 instead of the
            convolution (Eq. 9, k).
        broadcast_scale: Factor of the logits of queries and agents, ``qk_scale`` by default; Stable Diffusion takes
            ``d ** -0.15`` (Table 12).
        window: Side of square windows, each with separate agents (Table 3). By default, and for a map that is no
            larger, the whole map attends. Where Swin shifts its windows, these are shifted by half a window.

    The map is padded with zeros to whole windows, and rolled where they are shifted. A window at the border then holds
    tokens of opposite sides, which attend to each other, as in the authors' code: their agent attention receives Swin's
    mask and does not use it.

    A class token takes part in both attentions, with the biases ``ac_bias`` and ``ca_bias``, but not in the pooling and
    the convolution.

    Raises:
        ConfigError: A number of agents is no square, the option ``agents`` is unknown, there are windows and a class
            token, or an option is of another type than it should be.
        OptionError: The biases need the map, and neither the rule nor the model around the host tells it.

    Attributes:
        grid: Side of the grid of agents in use.
        pretrain_grid: Side of the grid of agents in the biases' shapes.
        bias_size: Height and width in the biases' shapes: of the map in pre-training, or of a window; with
            ``bias`` alone.

    The biases start normal with deviation 0.02, the convolution as torch's.

    Source: Agent attention, Eq. 6 and 9, tables 3, 6, 7, 11 and 12, appendix A; the biases have the shapes of the
    authors' checkpoints.
    """

    undecayed = (*BIASES, *CLASS_BIASES)
    bias_size: HeightWidth
    an_bias: nn.Parameter
    na_bias: nn.Parameter
    ah_bias: nn.Parameter
    aw_bias: nn.Parameter
    ha_bias: nn.Parameter
    wa_bias: nn.Parameter
    ac_bias: nn.Parameter
    ca_bias: nn.Parameter

    def __init__(
        self,
        sizes: Sizes,
        *,
        map_size: tuple[int, int] | None = None,
        image_size: int | tuple[int, int] | None = None,
        agent_num: int = 49,
        pretrain_agent_num: int | None = None,
        agents: str = 'pooled',
        bias: bool = True,
        dwc: bool = True,
        value_factor: float = 0.0,
        broadcast_scale: float | None = None,
        window: int | None = None,
    ) -> None:
        check_option('agents', agents, ('pooled', 'static'))
        super().__init__(sizes)
        self.value_factor = number('value_factor', value_factor)
        self.broadcast_scale = None if broadcast_scale is None else number('broadcast_scale', broadcast_scale, above=0)
        self.window = None if window is None else integer('window', window)
        if window is not None and self.class_tokens:
            raise ConfigError('window does not go with a class token, which lies in no window.')
        pretrain_agent_num = agent_num if pretrain_agent_num is None else pretrain_agent_num
        for name, count in (('agent_num', agent_num), ('pretrain_agent_num', pretrain_agent_num)):
            if isqrt(integer(name, count)) ** 2 != count:
                raise ConfigError(f'{name}={count} must be a square number: agents lie on a square grid.')
        self.grid = isqrt(agent_num)
        self.pretrain_grid = isqrt(pretrain_agent_num)
        self.dwc = nn.Conv2d(self.embed_dims, self.embed_dims, 3, padding=1, groups=self.embed_dims) if dwc else None
        static = torch.empty(1, pretrain_agent_num, self.embed_dims)
        self.agent_tokens = nn.Parameter(static) if agents == 'static' else None
        for name in (*BIASES, *CLASS_BIASES):
            self.register_parameter(name, None)
        if bias:
            self._make_biases(pretraining_map(sizes, map_size, image_size))

    def _make_biases(self, map_size: HeightWidth) -> None:
        """Create the parameters of the biases for a map in pre-training."""
        self.map_size = map_size
        self.bias_size, _ = self.window_of(map_size)
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
            self.register_parameter(name, nn.Parameter(torch.empty(shape)))

    def reset(self) -> None:
        """Initialise the biases from a truncated normal distribution (std 0.02) and the convolution as torch does."""
        if self.dwc is not None:
            self.dwc.reset_parameters()
        for name in (*BIASES, *CLASS_BIASES, 'agent_tokens'):
            parameter = getattr(self, name)
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend through the agent tokens and add the convolved values, in each window if there are windows."""
        window, shift = self.window_of(hw_shape)
        whole = window == hw_shape
        if not self.class_tokens:  # which have no place on the map
            note(self, 'geometry', lambda: torch.tensor([*hw_shape, 1] if whole else [*hw_shape, *window, shift[0]]))
        if whole:
            return self._mix(q, k, v, hw_shape, hw_shape)
        q, k, v = (self._split_windows(t, hw_shape) for t in (q, k, v))
        mixed = merge_stripes(self._mix(q, k, v, window, hw_shape), hw_shape, window)
        return _roll(mixed, hw_shape, shift)

    def window_of(self, hw_shape: HeightWidth) -> tuple[HeightWidth, HeightWidth]:
        """Return height and width of the windows on a map, and the rows and columns by which they are shifted.

        The one window of a map that is no larger is the map itself.
        """
        height, width = hw_shape
        rows = min(self.window or height, height)
        columns = min(self.window or width, width)
        if self.shifted and (rows, columns) != hw_shape:
            return (rows, columns), (rows // 2, columns // 2)
        return (rows, columns), (0, 0)

    def _split_windows(self, x: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Cut the tokens ``(B, h w, C)`` of a map into windows, shifted if the host's are: ``(B nW, N, C)``."""
        window, (down, right) = self.window_of(hw_shape)
        return split_stripes(_roll(x, hw_shape, (-down, -right)), hw_shape, window)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, window: HeightWidth, hw_shape: HeightWidth) -> Tensor:
        """Attend through the agents over a whole map, or over the windows of a map, of the size ``window``.

        It notes the product of the two softmaxes, ``(B, H, N, N)``, or ``(B nW, H, N, N)`` in windows, and the weights
        with which agents attend to the map, ``(B, H, n, h, w)``; agents with the same number in their windows share a
        map.
        """
        agents = self._agents(q, window)
        bias1, bias2 = (None, None) if self.an_bias is None else self.biases(window)
        q, k, values, agents = (self.split_heads(t) for t in (q, k, v, agents))

        def of_agents() -> Tensor:
            logits = agents @ k.transpose(-1, -2) * self.scale
            return (logits if bias1 is None else logits + bias1).softmax(-1)  # (B nW, H, n, N)

        def of_tokens() -> Tensor:
            logits = q @ agents.transpose(-1, -2) * (self.broadcast_scale or self.scale)
            return (logits if bias2 is None else logits + bias2).softmax(-1)

        note(self, 'attention', lambda: of_tokens() @ of_agents())
        note(self, 'agents', lambda: self._on_map(of_agents()[..., self.class_tokens :], hw_shape))
        out = agent_attention(
            q,
            k,
            values,
            agents,
            bias1,
            bias2,
            scale=self.scale,
            broadcast_scale=self.broadcast_scale,
            dropout=self.drop_rate,
        )  # (B, H, N, d)
        out = out.transpose(1, 2).flatten(2)
        if self.value_factor:
            out = out + self.value_factor * v
        if self.dwc is None:
            return out
        values = v[:, self.class_tokens :].transpose(1, 2).unflatten(-1, window)  # (B, C, h, w), channels last
        return out + self.after_class_token(self.dwc(values).flatten(2).transpose(1, 2))

    def _on_map(self, weights: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Put weights of the agents ``(B nW, H, n, N)`` of all windows of a map on it: ``(B, H, n, h, w)``."""
        window, shift = self.window_of(hw_shape)
        if window == hw_shape:
            return weights.unflatten(-1, hw_shape)
        merged = merge_stripes(weights.flatten(1, 2).transpose(1, 2), hw_shape, window)  # (B, h w, H n)
        on_map = merged.transpose(1, 2).unflatten(-1, hw_shape).unflatten(1, weights.shape[1:3])
        return on_map.roll(shift, (-2, -1))

    def _agents(self, q: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Return the agent tokens ``(B, n, C)``: queries averaged over a grid, or learnt tokens.

        They are contiguous, as torch's fused attention needs them.
        """
        if self.agent_tokens is None:
            grid = q[:, self.class_tokens :].transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w)
            agents = F.adaptive_avg_pool2d(grid, self.grid)
        else:
            agents = self.agent_tokens.transpose(1, 2).unflatten(-1, (self.pretrain_grid, self.pretrain_grid))
            if self.grid != self.pretrain_grid:
                agents = F.interpolate(agents, size=(self.grid, self.grid), mode='bilinear')
            agents = agents.expand(q.shape[0], -1, -1, -1).to(q.dtype)
        return agents.flatten(2).transpose(1, 2).contiguous()

    def resized_to(self) -> str:
        """Return, in words for the log, the map or window size to which loaded biases are resized."""
        return super().resized_to() if self.bias_size == self.map_size else f'windows of {self.bias_size}'

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

    def biases(self, hw_shape: HeightWidth) -> tuple[Tensor, Tensor]:
        """Return both position biases for a map of size ``hw_shape``: B1 ``(1, H, n, N)`` and B2 ``(1, H, N, n)``.

        The class token comes first.
        """
        terms, columns, basis = self._factors(hw_shape)
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

    def _factors(self, hw_shape: HeightWidth) -> Factors:
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


AgentAttention = map_attention('AgentAttention', AgentGate)


def _roll(x: Tensor, hw_shape: HeightWidth, shift: HeightWidth) -> Tensor:
    """Roll the tokens ``(B, h w, C)`` of a map down and right by ``shift``; what leaves the map enters opposite."""
    return x.unflatten(1, hw_shape).roll(shift, (1, 2)).flatten(1, 2) if any(shift) else x

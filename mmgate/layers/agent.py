"""Agent attention: softmax attention in two steps through a few agent tokens, at a cost linear in the tokens."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.errors import ConfigError
from mmgate.layers.base.gate import Sizes
from mmgate.layers.base.map import GatedMapAttention, Size
from mmgate.ops.agent import agent_attention
from mmgate.registry import MODELS

from .parts.agent_bias import BIASES, CLASS_BIASES, AgentBiases
from .parts.options import check_option
from .parts.stripes import merge_stripes, split_stripes


class AgentGate(AgentBiases):
    """Agent attention over an H x W map: ``softmax(Q A^T / sqrt(d) + B2) softmax(A K^T / sqrt(d) + B1) V + DWC(V)``.

    The agent tokens A are the queries, averaged over a grid of ``sqrt(agent_num)`` cells a side. Both biases are sums
    of three terms per head and agent: a 7 x 7 map, a row and a column. Their parameters have the sizes of pre-training
    (``pretrain_agent_num``, ``map_size``). A forward pass resizes them bilinearly to its map and its grid of agents.
    Rows and columns in a checkpoint of another map are resized on loading.

    Args:
        sizes: Sizes of the host's attention.
        map_size: Height and width of the map in pre-training.
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
        window: Side of square windows. Each window attends by itself, with separate agents (Table 3). By default, and
            for a map that is no larger, the whole map attends. The map is padded with zeros to whole windows. Where
            Swin shifts its windows, these are shifted as well, by half a window: the map is rolled, so that a window at
            the border holds tokens of opposite sides. These attend to each other, as in the authors' code, whose agent
            attention receives Swin's mask and does not use it.
        **kwargs: Arguments of :class:`~mmgate.layers.base.map.MapGate`. A class token takes part in both attentions,
            with the biases ``ac_bias`` and ``ca_bias``, but not in the pooling and the convolution.

    Raises:
        ValueError: A number of agents is no square, the kind of agents is unknown, or there are windows and a class
            token.

    The biases start normal with deviation 0.02, the convolution as torch's.

    Source: Agent attention, Eq. 6 and 9, tables 3, 6, 7, 11 and 12, appendix A; the shapes of the biases are those of
    the authors' checkpoints.
    """

    undecayed = (*BIASES, *CLASS_BIASES)

    def __init__(
        self,
        sizes: Sizes,
        *,
        map_size: tuple[int, int],
        agent_num: int = 49,
        pretrain_agent_num: int | None = None,
        agents: str = 'pooled',
        bias: bool = True,
        dwc: bool = True,
        value_factor: float = 0.0,
        broadcast_scale: float | None = None,
        window: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_option('agents', agents, ('pooled', 'static'))
        super().__init__(sizes, **kwargs)
        if window is not None and self.class_tokens:
            raise ConfigError('window and class_token exclude each other: a class token lies in no window.')
        pretrain_agent_num = agent_num if pretrain_agent_num is None else pretrain_agent_num
        for name, number in (('agent_num', agent_num), ('pretrain_agent_num', pretrain_agent_num)):
            if number < 1 or isqrt(number) ** 2 != number:
                raise ConfigError(f'{name}={number} must be a square number: agents lie on a square grid.')
        self.grid = isqrt(agent_num)
        self.pretrain_grid = isqrt(pretrain_agent_num)
        height = int(map_size[0])
        width = int(map_size[1])
        self.map_size = (height, width)
        self.bias_size = self.map_size if window is None else (min(window, height), min(window, width))
        self.window = window
        self.value_factor = value_factor
        self.broadcast_scale = broadcast_scale
        self.dwc = nn.Conv2d(self.embed_dims, self.embed_dims, 3, padding=1, groups=self.embed_dims) if dwc else None
        static = torch.empty(1, pretrain_agent_num, self.embed_dims)
        self.agent_tokens = nn.Parameter(static) if agents == 'static' else None
        self.make_biases(bias)

    def reset_gate(self) -> None:
        """Initialise the biases from a truncated normal distribution (std 0.02) and the convolution as torch does."""
        if self.dwc is not None:
            self.dwc.reset_parameters()
        for name in (*BIASES, *CLASS_BIASES, 'agent_tokens'):
            parameter = getattr(self, name, None)
            if parameter is not None:
                nn.init.trunc_normal_(parameter, std=0.02)

    def resized_to(self) -> str:
        """Return, in words for the log, the map or window size to which loaded biases are resized."""
        return super().resized_to() if self.bias_size == self.map_size else f'windows of {self.bias_size}'

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend through the agent tokens and add the convolved values, in each window if there are windows."""
        window, shift = self.window_of(hw_shape)
        if window == hw_shape:
            return self._mix(q, k, v, hw_shape)
        q, k, v = (self._split_windows(t, hw_shape) for t in (q, k, v))
        mixed = merge_stripes(self._mix(q, k, v, window), hw_shape, window)
        return _roll(mixed, hw_shape, shift)

    def window_of(self, hw_shape: Size) -> tuple[Size, Size]:
        """Return height and width of the windows on a map, and the rows and columns by which they are shifted.

        The one window of a map that is no larger is the map itself.
        """
        height, width = hw_shape
        rows = min(self.window or height, height)
        columns = min(self.window or width, width)
        if self.shifted and (rows, columns) != hw_shape:
            return (rows, columns), (rows // 2, columns // 2)
        return (rows, columns), (0, 0)

    def map_readings(self) -> tuple[str, ...]:
        """Return the names of what :meth:`read_map` can return for figures.

        There is no geometry with a class token, which has no place on the map.
        """
        return ('attention', 'agents') if self.class_tokens else ('attention', 'agents', 'geometry')

    def read_map(self, name: str, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Return attention maps, agent maps or the layout of tokens, for figures; other arguments as in :meth:`mix`.

        Args:
            name: ``'attention'``: the product of the two softmaxes, ``(B, H, N, N)``, or ``(B nW, H, N, N)`` in
                windows. ``'agents'``: the weights with which agents attend to the map, ``(B, H, n, h, w)``; agents with
                the same number in their windows share a map. ``'geometry'``: ``(height, width, 1)``, or ``(height,
                width, window height, window width, shift)``.
            x: Tokens.
            q: Queries.
            k: Keys.
            v: Values.
            hw_shape: Height and width of the map.
        """
        window, shift = self.window_of(hw_shape)
        if name == 'geometry':
            return torch.tensor([*hw_shape, 1] if window == hw_shape else [*hw_shape, *window, shift[0]])
        if window != hw_shape:
            q, k = (self._split_windows(t, hw_shape) for t in (q, k))
        bias1, bias2 = (0.0, 0.0) if self.an_bias is None else self.biases(window)
        q, k, agents = (self.split_heads(t) for t in (q, k, self._agents(q, window)))
        first = (agents @ k.transpose(-1, -2) * self.scale + bias1).softmax(-1)  # (B nW, H, n, N)
        if name == 'attention':
            second = q @ agents.transpose(-1, -2) * (self.broadcast_scale or self.scale) + bias2
            return second.softmax(-1) @ first
        first = first[..., self.class_tokens :]
        if window == hw_shape:
            return first.unflatten(-1, hw_shape)
        merged = merge_stripes(first.flatten(1, 2).transpose(1, 2), hw_shape, window)  # (B, h w, H n)
        on_map = merged.transpose(1, 2).unflatten(-1, hw_shape).unflatten(1, first.shape[1:3])
        return on_map.roll(shift, (-2, -1))

    def _split_windows(self, x: Tensor, hw_shape: Size) -> Tensor:
        """Cut the tokens ``(B, h w, C)`` of a map into windows, shifted if the host's are: ``(B nW, N, C)``."""
        window, (down, right) = self.window_of(hw_shape)
        return split_stripes(_roll(x, hw_shape, (-down, -right)), hw_shape, window)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: Size) -> Tensor:
        """Attend through the agents over a whole map, or over windows, of height and width ``hw_shape``."""
        agents = self._agents(q, hw_shape)
        bias1, bias2 = (None, None) if self.an_bias is None else self.biases(hw_shape)
        q, k, values, agents = (self.split_heads(t) for t in (q, k, v, agents))
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
        values = v[:, self.class_tokens :].transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w), channels last
        return out + self.after_class_token(self.dwc(values).flatten(2).transpose(1, 2))

    def _agents(self, q: Tensor, hw_shape: Size) -> Tensor:
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


@MODELS.register_module()
class AgentAttention(GatedMapAttention):
    """Agent attention as a module with projections; rules name this class as their ``type``.

    It takes the options of :class:`AgentGate`.
    """

    gate_type = AgentGate


def _roll(x: Tensor, hw_shape: Size, shift: Size) -> Tensor:
    """Roll the tokens ``(B, h w, C)`` of a map down and right by ``shift``; what leaves the map enters opposite."""
    return x.unflatten(1, hw_shape).roll(shift, (1, 2)).flatten(1, 2) if any(shift) else x

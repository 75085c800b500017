"""Agent attention."""

from __future__ import annotations

from math import isqrt
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from mmgate.layers.base.init import GateInit
from mmgate.ops.agent_attention import agent_attention
from mmgate.registry import MODELS

from .agent_bias import BIASES, CLASS_BIASES, AgentBiases
from .gml import check_option
from .stripes import merge_stripes, split_stripes


@MODELS.register_module()
class AgentAttention(GateInit, AgentBiases):
    """Agent attention over an H x W map: ``softmax(Q A^T / sqrt(d) + B2) softmax(A K^T / sqrt(d) + B1) V + DWC(V)``.

    The agent tokens A are the queries averaged over a grid of ``sqrt(agent_num)`` cells a side. Both biases are sums of
    a 7 x 7 map per head and agent, and a row and a column term: parameters of the sizes of pre-training
    (``pretrain_agent_num``, ``map_size``), resized bilinearly, map and agent grid, to what a forward pass meets; rows
    and columns of a checkpoint from another map are resized on loading.

    Args:
        map_size: Height and width of the map in pre-training.
        agent_num: Agent tokens n in use, a square number. Dense prediction takes more than pre-training.
        pretrain_agent_num: Agents in the biases' shapes, a square number; ``agent_num`` by default.
        agents: ``'pooled'`` from the queries (default), or ``'static'``: learnt, the same for every image (Table 7).
        bias: Add B1 and B2 (Table 6).
        dwc: Add the convolved values (Table 6).
        value_factor: Add the values times this; 0.075 in the place of the convolution in Stable Diffusion (Eq. 9, k).
        broadcast_scale: Factor of the logits of queries and agents, ``qk_scale`` by default; Stable Diffusion takes
            ``d ** -0.15`` (Table 12).
        window: Side of square windows that attend each by itself, with agents of its own (Table 3); the whole map by
            default, and where it is no larger. The map is padded with zeros to whole windows. In the place of Swin's
            shifted windows these are shifted as well, by half of one: the map is rolled, so that a window at its border
            holds tokens of both sides. They see each other, as in the authors' code, whose agent attention is given a
            mask and leaves it out.
        **kwargs: Those of :class:`~mmgate.layers.base.map.MapAttention`, as ``embed_dims`` and ``num_heads`` are. A
            class token takes part in both attentions with biases of its own, ``ac_bias`` and ``ca_bias``, but neither
            in the pooling nor in the convolution.

    Raises:
        ValueError: A number of agents that is no square, an unknown kind of agents, or windows beside a class token.

    The biases start normal with deviation 0.02 and the convolution as torch's.

    Source: Agent attention, Eq. 6 and 9, tables 3, 6, 7, 11 and 12, appendix A; the shapes of the biases are those of
    the authors' checkpoints.
    """

    gate_parameters = ('dwc', 'agent_tokens', *BIASES, *CLASS_BIASES)
    undecayed = (*BIASES, *CLASS_BIASES)

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
        value_factor: float = 0.0,
        broadcast_scale: float | None = None,
        window: int | None = None,
        **kwargs: Any,
    ) -> None:
        check_option('agents', agents, ('pooled', 'static'))
        super().__init__(embed_dims, num_heads, **kwargs)
        if window is not None and self.class_tokens:
            raise ValueError('window and class_token exclude each other: a class token lies in no window.')
        pretrain_agent_num = agent_num if pretrain_agent_num is None else pretrain_agent_num
        for name, number in (('agent_num', agent_num), ('pretrain_agent_num', pretrain_agent_num)):
            if number < 1 or isqrt(number) ** 2 != number:
                raise ValueError(f'{name}={number} must be a square number: agents lie on a square grid.')
        self.grid, self.pretrain_grid = isqrt(agent_num), isqrt(pretrain_agent_num)
        height, width = int(map_size[0]), int(map_size[1])
        self.map_size = self.bias_size = (height, width)
        if window is not None:
            self.bias_size = (min(window, height), min(window, width))
        self.window, self.value_factor, self.broadcast_scale = window, value_factor, broadcast_scale
        self.dwc = nn.Conv2d(embed_dims, embed_dims, 3, padding=1, groups=embed_dims) if dwc else None
        static = torch.empty(1, pretrain_agent_num, embed_dims)
        self.agent_tokens = nn.Parameter(static) if agents == 'static' else None
        self.make_biases(bias)
        self.reset_gate()

    def reset_gate(self) -> None:
        """Draw the biases from a normal distribution of deviation 0.02, truncated at 2, and the convolution anew."""
        if self.dwc is not None:
            self.dwc.reset_parameters()
        for name in (*BIASES, *CLASS_BIASES, 'agent_tokens'):
            if getattr(self, name, None) is not None:
                nn.init.trunc_normal_(getattr(self, name), std=0.02)

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend through the agents and add the convolved values, in each window if there are windows."""
        window = (min(self.window or hw_shape[0], hw_shape[0]), min(self.window or hw_shape[1], hw_shape[1]))
        if window == hw_shape:
            return self._mix(q, k, v, hw_shape)
        shift = (window[0] // 2, window[1] // 2) if self.shifted else (0, 0)
        q, k, v = (split_stripes(_roll(t, hw_shape, (-shift[0], -shift[1])), hw_shape, window) for t in (q, k, v))
        return _roll(merge_stripes(self._mix(q, k, v, window), hw_shape, window), hw_shape, shift)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        agents = self._agents(q, hw_shape)
        bias1, bias2 = (None, None) if self.an_bias is None else self.biases(hw_shape)
        q, k, values, agents = (self.split_heads(t) for t in (q, k, v, agents))
        scales: dict[str, Any] = dict(scale=self.scale, broadcast_scale=self.broadcast_scale)
        out = agent_attention(q, k, values, agents, bias1, bias2, **scales, dropout=self._drop)  # (B, H, N, d)
        out = out.transpose(1, 2).flatten(2)
        if self.value_factor:
            out = out + self.value_factor * v
        if self.dwc is None:
            return out
        values = v[:, self.class_tokens :].transpose(1, 2).unflatten(-1, hw_shape)  # (B, C, h, w), channels last
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
            agents = agents.expand(q.shape[0], -1, -1, -1).to(q.dtype)
        return agents.flatten(2).transpose(1, 2).contiguous()


def _roll(x: Tensor, hw_shape: tuple[int, int], shift: tuple[int, int]) -> Tensor:
    """Return tokens ``(B, h w, C)`` moved down and right by ``shift``, those that leave the map coming in opposite."""
    return x.unflatten(1, hw_shape).roll(shift, (1, 2)).flatten(1, 2) if any(shift) else x

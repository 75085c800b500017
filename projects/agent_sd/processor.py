"""Agent attention in the self-attention of Stable Diffusion's UNet, without training (AgentSD), for diffusers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from diffusers.models.attention import BasicTransformerBlock
from tomesd.merge import bipartite_soft_matching_random2d
from torch import Tensor, nn

from mmgate.ops import agent_attention

EARLY, LATE = 0, 1
ATTRIBUTE = '_agent_sd'  # of the UNet, so that a copy of it has a copy
logger = logging.getLogger('mmgate')
Tokens = Callable[[Tensor], Tensor]  # makes tokens (B, N, C) fewer, or as many as before


def apply_agent_sd(pipe_or_unet: Any, **options: Any) -> AgentSD:
    """Let the full-resolution self-attention of a UNet attend through agents, instead of by any former AgentSD.

    Args:
        pipe_or_unet: A diffusers pipeline with a ``unet``, or a UNet of :class:`BasicTransformerBlock`.
        **options: Of :class:`AgentSD`.

    Returns:
        What is at work; hand its ``on_step_end`` to the pipeline as ``callback_on_step_end``.

    Raises:
        ValueError: Not such a UNet, one that tomesd has patched, or an option out of its range.
    """
    agent_sd = AgentSD(**options)
    unet = _unet(pipe_or_unet)
    remove_agent_sd(unet)
    agent_sd.attach(unet)
    setattr(unet, ATTRIBUTE, agent_sd)
    return agent_sd


def remove_agent_sd(pipe_or_unet: Any) -> None:
    """Give the UNet, or a copy of it, the attention back that it had; one without AgentSD stays as it is."""
    unet = _unet(pipe_or_unet)
    agent_sd = getattr(unet, ATTRIBUTE, None)
    if agent_sd is not None:
        agent_sd.detach()
        delattr(unet, ATTRIBUTE)


def _unet(pipe_or_unet: Any) -> nn.Module:
    unet = getattr(pipe_or_unet, 'unet', pipe_or_unet)
    if not isinstance(unet, nn.Module):
        raise ValueError(f'{type(pipe_or_unet).__name__} is no UNet and has none.')
    return unet


def _refuse_tomesd(block: nn.Module) -> None:
    if type(block).__name__ == 'ToMeBlock':
        raise ValueError(
            'tomesd has patched this UNet, so its tokens are merged before AgentSD can rank them. AgentSD merges them '
            'itself, by the same ratio: call tomesd.remove_patch(pipe).'
        )


class AgentSD:
    """What AgentSD does to one UNet: options, the stage of the schedule, and the hooks that rank tokens.

    Tokens are merged by tomesd. In every square of ``stride`` tokens a side one is a destination, drawn at random, and
    the tokens most similar to a destination merge into it, as measured on the block's input before its norm. Merged
    further in the same order they are the agents. Where the agents are half of the tokens or more, softmax attention
    over the merged tokens stays.

    Args:
        ratio: Share of the tokens that are merged, r of Table 10, in both stages.
        stride: Of the squares, in the early and in the late stage.
        agent_ratio: Share of the tokens that are merged when agents are made, early and late.
        early: Share of the schedule that is the early stage (Table 13 has 0.2, 0.4, 0.6 and 0.8). It is counted in
            timesteps, as schedulers of second order call the UNet twice at some.
        value_factor: k of Eq. 9 (Table 11).
        power: The second softmax's factor is ``(d ** -0.5) ** power`` (Table 12 has 1, 0.5, 0.3 and 0.1).
        max_downsample: Blocks this much coarser than the latents, or less, take part.
        random: Draw destinations; else they are the squares' first tokens, as they are for an odd batch, whose guided
            and unguided half would otherwise not share them.
        seed: Of the draws. They depend on it, on the number of the UNet's call and on the block, and on nothing else,
            so that a block computed once more for its gradients draws the same.

    Raises:
        ValueError: An option out of its range.

    Source: Agent attention, Eq. 9, section 5.4, appendix B.
    """

    def __init__(
        self,
        *,
        ratio: float = 0.4,
        stride: tuple[int, int] = (4, 2),
        agent_ratio: tuple[float, float] = (0.95, 0.5),
        early: float = 0.4,
        value_factor: float = 0.075,
        power: float = 0.3,
        max_downsample: int = 1,
        random: bool = True,
        seed: int = 0,
    ) -> None:
        if not all(0 <= share < 1 for share in (ratio, *agent_ratio)):
            raise ValueError(f'ratio={ratio} and agent_ratio={agent_ratio} must be from 0 to below 1.')
        if not 0 <= early <= 1:
            raise ValueError(
                f'early={early} is a share of the schedule and must be from 0 to 1: 0.4 is 20 of 50 steps.'
            )
        if min(stride) < 2 or max_downsample < 1:
            raise ValueError(f'stride={stride} must be at least 2, max_downsample={max_downsample} 1.')
        self.ratio, self.stride, self.agent_ratio = ratio, stride, agent_ratio
        self.early, self.max_downsample = early, max_downsample
        self.value_factor, self.power = value_factor, power
        self.random, self.seed = random, seed
        self.processors: list[AgentSDProcessor] = []
        self._hooks: list[Any] = []
        self._size: tuple[int, int] = (0, 0)  # of the latents of the UNet's present call
        self.restart()

    def restart(self) -> None:
        """Go back to the first step; needed by hand only where a pipeline was stopped before its last one."""
        self.stage = EARLY if self.early else LATE
        self._calls = 0
        self._last_early: float | None = None  # the least timestep of the early stage, known after the first step

    def on_step_end(self, pipe: Any, step: int, timestep: Any, callback_kwargs: dict[str, Any]) -> dict[str, Any]:
        """Read the schedule for the steps that come next; the signature is that of ``callback_on_step_end``."""
        if step + 1 >= pipe.num_timesteps:
            self.restart()
        elif self._last_early is None:
            schedule = pipe.scheduler.timesteps
            steps = schedule[schedule <= timestep].unique()  # ascending; an image-to-image pipeline begins later
            count = max(round(self.early * len(steps)), 1) if self.early else 0  # the first is early already
            self._last_early = float(steps[-count]) if count else float('inf')
        return callback_kwargs

    def attach(self, unet: nn.Module) -> None:
        """Put processors and hooks in their places; :func:`apply_agent_sd` calls this."""
        blocks = [m for m in unet.modules() if isinstance(m, BasicTransformerBlock) and not m.only_cross_attention]
        if not blocks:
            raise ValueError(f'{type(unet).__name__} has no BasicTransformerBlock that attends to itself.')
        for block in blocks:
            _refuse_tomesd(block)
        self._hooks = [unet.register_forward_pre_hook(self._begin_call, with_kwargs=True)]
        for number, block in enumerate(blocks):
            processor = AgentSDProcessor(self, block.attn1, number)
            self.processors.append(processor)
            self._hooks.append(block.register_forward_pre_hook(processor.rank, with_kwargs=True))

    def detach(self) -> None:
        """Undo :meth:`attach`; a processor that something else has replaced since stays."""
        for hook in self._hooks:
            hook.remove()
        for processor in self.processors:
            if processor.attention.processor is processor:
                processor.attention.set_processor(processor.former)
        self._hooks, self.processors = [], []

    def _begin_call(self, unet: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        sample = args[0] if args else kwargs['sample']
        self._size = (sample.shape[-2], sample.shape[-1])
        self._calls += 1
        if self._last_early is not None:
            timestep = torch.as_tensor(args[1] if len(args) > 1 else kwargs['timestep'])
            self.stage = EARLY if timestep.max() >= self._last_early else LATE
        self._return()

    def _return(self) -> None:
        """Put processors back that attention slicing, for one, has replaced; what replaced them is theirs to call."""
        replaced = [processor for processor in self.processors if processor.attention.processor is not processor]
        for processor in replaced:
            processor.wrap()
        if replaced:
            names = ', '.join(sorted({type(processor.former).__name__ for processor in replaced}))
            logger.warning(
                f'AgentSD stays, although the attention was set to {names}, which computes what goes without agents. '
                'remove_agent_sd(pipe) takes AgentSD off.'
            )

    def merging(self, x: Tensor, block: int) -> tuple[Tokens, Tokens, Tokens | None] | None:
        """Rank the tokens ``(B, N, C)`` that enter a block; return what merges them, undoes it, and makes agents.

        None instead of the last means that softmax attention stays; instead of all, that nothing merges.

        Raises:
            ValueError: Tokens that are no whole map, or one smaller than the stride.
        """
        (height, width), tokens, stride = self._size, x.shape[1], self.stride[self.stage]
        down = 1
        while height * width > tokens:  # the UNet halves its map with padding, so sides round up
            height, width, down = -(-height // 2), -(-width // 2), 2 * down
        if down > self.max_downsample:
            return None
        if height * width != tokens or min(height, width) < stride:
            raise ValueError(f'{tokens} tokens of latents {self._size} are no map, or one below stride={stride}.')
        most = tokens - (height // stride) * (width // stride)  # destinations stay
        merged, agents = (int(tokens * share) for share in (self.ratio, self.agent_ratio[self.stage]))
        draw = self.random and x.shape[0] % 2 == 0

        def matching(number: int) -> tuple[Tokens, Tokens]:
            generator = torch.Generator()
            generator.manual_seed(((self.seed * 1_000_003 + self._calls) * 1_000_003 + block) % 2**63)
            return bipartite_soft_matching_random2d(
                x, width, height, stride, stride, number, no_rand=not draw, generator=generator
            )

        fewer = 2 * (tokens - min(agents, most)) < tokens - min(merged, most)
        return *matching(merged), matching(agents)[0] if fewer else None


class AgentSDProcessor:
    """diffusers' attention processor of one block's self-attention.

    Args:
        agent_sd: The options.
        attention: The block's ``attn1``; its processor until now computes all that goes without agents.
        number: Of the block.
    """

    def __init__(self, agent_sd: AgentSD, attention: Any, number: int) -> None:
        self.agent_sd, self.attention, self.number = agent_sd, attention, number
        self.counts: tuple[int, int, int | None] | None = None  # tokens, merged tokens and agents of the last call
        self._merging: tuple[Tokens, Tokens, Tokens | None] | None = None
        self.wrap()

    def wrap(self) -> None:
        """Become the processor of the attention, around the one that it has."""
        self.former = self.attention.processor
        self.attention.set_processor(self)

    def rank(self, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Rank the input of the block, before its norm; the hook of the block."""
        _refuse_tomesd(block)
        self._merging = self.agent_sd.merging(args[0] if args else kwargs['hidden_states'], self.number)

    def __call__(
        self,
        attn: Any,
        hidden_states: Tensor,
        encoder_hidden_states: Tensor | None = None,
        attention_mask: Tensor | None = None,
        temb: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """Return ``softmax(Q A^T s^power) softmax(A K^T s) V + k V`` of the merged tokens, projected and unmerged."""
        merging, self._merging = self._merging, None
        if temb is not None:  # not every processor knows it
            kwargs['temb'] = temb
        if merging is None:
            return self.former(attn, hidden_states, encoder_hidden_states, attention_mask, **kwargs)
        if attention_mask is not None:
            raise ValueError('AgentSD merges tokens, so it cannot be masked; remove it or the mask.')
        merge, unmerge, gather = merging
        x = merge(hidden_states)  # (B, M, C)
        self.counts = (hidden_states.shape[1], x.shape[1], None)
        if gather is None:
            return unmerge(self.former(attn, x, None, None, **kwargs))
        agents = gather(hidden_states)  # (B, n, C)
        self.counts = (hidden_states.shape[1], x.shape[1], agents.shape[1])
        projected = (attn.to_q(x), attn.to_k(x), attn.to_v(x), attn.to_q(agents))
        q, k, v, a = (t.unflatten(-1, (attn.heads, -1)).transpose(1, 2) for t in projected)  # (B, H, M|n, d)
        scale = q.shape[-1] ** -0.5
        heads = agent_attention(q, k, v, a, scale=scale, broadcast_scale=scale**self.agent_sd.power)
        out = (heads + self.agent_sd.value_factor * v).transpose(1, 2).flatten(2)
        for layer in attn.to_out:
            out = layer(out)
        return unmerge(out)

"""Swin with Agent, SAGA and other attention: mmdet's backbone with the attention of each stage's first blocks gated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmdet.models.backbones.swin import ShiftWindowMSA, SwinTransformer
from torch import Tensor

from mmgate.backbones.presets import PRETRAIN_AGENTS, Options, check_stages, preset, stage_rules
from mmgate.backbones.weights import PublishedWeights
from mmgate.errors import ConfigError
from mmgate.gates.base.map import MapGate
from mmgate.hosts import adapts
from mmgate.swap import swap_attention

SIZES = {
    'tiny': dict(depths=(2, 2, 6, 2), embed_dims=96, num_heads=(3, 6, 12, 24)),
    'small': dict(depths=(2, 2, 18, 2), embed_dims=96, num_heads=(3, 6, 12, 24)),
    'base': dict(depths=(2, 2, 18, 2), embed_dims=128, num_heads=(4, 8, 16, 32)),
}


class _Unshifted:
    """View of a shifted-window attention that does not shift; calls at the same time see the attention unchanged."""

    shift_size = 0

    def __init__(self, attention: ShiftWindowMSA) -> None:
        self._attention = attention

    def __getattr__(self, name: str) -> Any:
        return getattr(self._attention, name)


class UnshiftedWhole(ShiftWindowMSA):
    """Swin's shifted-window attention that does not shift on maps whose smaller side fits into one window.

    Swin's and mmpretrain's classifiers work so (``pad_small_map=False``). mmdet shifts there, too, which cuts a window
    into parts that do not see each other.
    """

    shift_size: int

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend over the tokens ``(B, H W, C)`` of a map of height and width ``hw_shape``."""
        attention = self if self.shift_at(hw_shape) else _Unshifted(self)
        return ShiftWindowMSA.forward(attention, query, hw_shape)

    def shift_at(self, hw_shape: tuple[int, int]) -> int:
        """Return by how many tokens windows are shifted on a map of height and width ``hw_shape``: 0 on small maps."""
        return 0 if min(hw_shape) <= self.window_size else self.shift_size


adapts(MapGate, UnshiftedWhole, like=ShiftWindowMSA)


class Swin(PublishedWeights, SwinTransformer):
    """mmdet's Swin with another attention, over the whole map, in the first blocks of its stages.

    Without ``attention`` it keeps its own windows.

    Args:
        arch: ``'tiny'``, ``'small'`` or ``'base'``.
        attention: As :class:`.pvt.PVT` takes it, and so the next two.
        agent_nums: Agent tokens of each stage.
        pretrain_agent_nums: Agent tokens of each stage in pre-training.
        blocks: Number of blocks of each stage, from its first on, with the attention; by default as many as the
            class has in ``swapped_blocks``, but all where it has none or ``depths`` has fewer.
        pad_small_map: True shifts windows where one of them is as long as the smaller side of the map, as mmdet does;
            False does not, as Swin's classifiers (mmpretrain's name for it). A side that is smaller than a window is
            padded in both, where mmpretrain's classifiers refuse the map.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None, see :func:`.weights.load_pretrained`.
        **overrides: Arguments of mmdet's ``SwinTransformer`` instead of the preset's: ``with_cp``,
            ``frozen_stages``, ``drop_path_rate``, ``out_indices``, ...; ``convert_weights`` makes no difference.

    Raises:
        ConfigError: As :class:`.pvt.PVT`, or more ``blocks`` than a stage has.

    Attributes:
        swapped_blocks: By ``arch``, the default of ``blocks``.
    """

    swapped_blocks: ClassVar[Mapping[str, Sequence[int]]] = {}

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        attention: Options | Sequence[Options] | None = None,
        agent_nums: Sequence[int] | None = None,
        pretrain_agent_nums: Sequence[int] | None = None,
        blocks: Sequence[int] | None = None,
        pad_small_map: bool = True,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(SIZES, arch, overrides)
        depths = fields['depths']
        if blocks is None:
            numbers = self.swapped_blocks.get(arch, depths)
            blocks = [min(number, depth) for number, depth in zip(numbers, depths, strict=False)]
        check_stages(len(depths), blocks=blocks)
        if any(not 0 <= number <= depth for number, depth in zip(blocks, depths, strict=True)):
            raise ConfigError(f'blocks={tuple(blocks)}: stages of {tuple(depths)} blocks do not have as many to swap.')
        rules = stage_rules(
            attention, self.attention_type, self.pretrain_agents, len(depths), agent_nums, pretrain_agent_nums
        )
        super().__init__(**fields, init_cfg=init_cfg)
        self.pretrain_img_size = fields.get('pretrain_img_size', 224)
        for module in self.modules():
            if not pad_small_map and type(module) is ShiftWindowMSA:
                module.__class__ = UnshiftedWhole
        swapped = [
            {'path': [f'stages.{i}.blocks.{j}.attn' for j in range(blocks[i])], **rule}
            for i, rule in enumerate(rules)
            if blocks[i]
        ]
        if swapped:
            swap_attention(self, swapped)
        self._freeze_stages()

    def train(self, mode: bool = True) -> Swin:
        """Set training or evaluation mode; frozen stages stay in evaluation mode."""
        super().train(mode)  # mmdet's returns nothing
        return self


class AgentSwin(Swin):
    """Backbone Swin with agent attention over the whole map in its early blocks; arguments as :class:`Swin`.

    For dense prediction the paper takes ``agent_nums=(81, 144, 196, 49)``.

    Source: Agent attention, table 21, appendix C.2.
    """

    attention_type = 'AgentAttention'
    pretrain_agents = PRETRAIN_AGENTS
    swapped_blocks = {'tiny': (2, 2, 6, 0), 'small': (2, 2, 0, 0), 'base': (2, 2, 2, 0)}


class SAGASwin(Swin):
    """Backbone Swin with SAGA (gated linear attention) over the whole map in stages 1 to 3; see :class:`Swin`.

    Source: SAGA, tables 1 and 2. The window of 56 that its parameter counts imply is the whole map at 224 pixels; on a
    larger image the attention, being linear, still sees the whole map.
    """

    attention_type = 'SAGAAttention'
    swapped_blocks = {'tiny': (2, 2, 6, 0), 'small': (2, 2, 18, 0), 'base': (2, 2, 18, 0)}

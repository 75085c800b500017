"""Swin with agent and SAGA attention: mmdet's backbone with the first blocks of its stages swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmdet.models.backbones.swin import ShiftWindowMSA, SwinTransformer
from torch import Tensor

from mmgate.backbones.fitting import ResizesPositions
from mmgate.backbones.presets import (
    AGENT_SWIN_BLOCKS,
    PRETRAIN_AGENTS,
    SAGA_SWIN_BLOCKS,
    SWIN,
    agent_rules,
    no_attention_dropout,
    per_stage,
    preset,
)
from mmgate.backbones.pretrained import load_pretrained
from mmgate.hosts import adapts
from mmgate.layers.base.map import MapAttention
from mmgate.registry import MODELS
from mmgate.swap import swap_attention
from mmgate.weight_init import gates_in_place


class UnshiftedWhole(ShiftWindowMSA):
    """Shifted windows that do not shift where one of them holds the map, as in Swin's classifiers.

    mmdet shifts there, too, which cuts the one window into four parts that do not see each other.
    """

    shift_size: int

    def forward(self, query: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        """Attend over ``(B, H W, C)`` tokens of a map of ``hw_shape``."""
        shift = self.shift_size
        self.shift_size = self.shift_at(hw_shape)
        try:
            return super().forward(query, hw_shape)
        finally:
            self.shift_size = shift

    def shift_at(self, hw_shape: tuple[int, int]) -> int:
        """Return by how much the windows of a map of ``hw_shape`` are shifted."""
        return 0 if max(hw_shape) <= self.window_size else self.shift_size


adapts(MapAttention, UnshiftedWhole, like=ShiftWindowMSA)


class _LinearSwin(ResizesPositions, SwinTransformer):
    """mmdet's Swin whose first ``blocks[i]`` blocks of stage i see the whole map through ``rules[i]``."""

    def __init__(
        self,
        rules: Sequence[Mapping[str, Any]],
        blocks: Sequence[int],
        *,
        pad_small_map: bool,
        fields: Mapping[str, Any],
        init_cfg: dict | None,
    ) -> None:
        super().__init__(**fields, init_cfg=init_cfg)
        for number, depth in zip(blocks, fields['depths'], strict=True):
            if not 0 <= number <= depth:
                raise ValueError(f'blocks={tuple(blocks)}: a stage of {depth} blocks has no {number} to swap.')
        swapped = [
            {'path': [f'stages.{i}.blocks.{j}.attn' for j in range(number)], **rule}
            for i, (rule, number) in enumerate(zip(rules, blocks, strict=True))
            if number
        ]
        if swapped:
            swap_attention(self, swapped)
        for module in self.modules():
            if not pad_small_map and type(module) is ShiftWindowMSA:
                module.__class__ = UnshiftedWhole
        self._freeze_stages()

    def init_weights(self) -> None:
        """Initialise from scratch, or strictly from the checkpoint of a ``Pretrained`` init_cfg."""
        if self.init_cfg is None:
            super().init_weights()
        else:
            with gates_in_place(self):
                load_pretrained(self, self.init_cfg)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps ``(B, C_i, H_i, W_i)`` of the stages in ``out_indices`` for images ``(B, 3, H, W)``."""
        return tuple(super().forward(x))  # mmpretrain's necks and heads take no list

    def train(self, mode: bool = True) -> _LinearSwin:
        """Set the mode; frozen stages stay in evaluation."""
        super().train(mode)  # mmdet's returns nothing
        return self


def _map_sizes(fields: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return height and width of every stage's map in pre-training."""
    size = fields.get('pretrain_img_size', 224)
    height, width = (size, size) if isinstance(size, int) else size
    patch = fields.get('patch_size', 4)
    return [(height // (patch * 2**i), width // (patch * 2**i)) for i in range(len(fields['depths']))]


@MODELS.register_module()
class AgentSwin(_LinearSwin):
    """Swin with agent attention over the whole map in its early blocks, Swin's own 7 x 7 windows in the others.

    Args:
        arch: ``'tiny'``, ``'small'`` or ``'base'``.
        agent_nums: Agent tokens of each stage; those of pre-training by default. The paper takes (81, 144, 196, 49) for
            dense prediction.
        pretrain_agent_nums: Agent tokens of each stage in pre-training, in the biases' shapes.
        attention: Options of :class:`~mmgate.layers.AgentAttention` for every stage, such as ``dict(bias=False)``.
        blocks: How many blocks of each stage, from its first on, have agent attention; the preset's by default.
        pad_small_map: Whether windows shift where one of them holds the whole map, as mmdet's do; Swin's classifiers do
            not (mmpretrain's name for it).
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of the authors, with agent attention
            or vanilla, and of mmdet and mmseg are recognised, see :func:`.pretrained.load_pretrained`.
        **overrides: Arguments of mmdet's ``SwinTransformer`` in the place of the preset's: ``with_cp``,
            ``frozen_stages``, ``drop_path_rate``, ``out_indices``, ...; ``convert_weights`` makes no difference.

    Raises:
        ValueError: An unknown ``arch``, or numbers that do not fit the stages.

    Source: Agent attention, table 21, appendix C.2.
    """

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        agent_nums: Sequence[int] | None = None,
        pretrain_agent_nums: Sequence[int] = PRETRAIN_AGENTS,
        attention: Mapping[str, Any] | None = None,
        blocks: Sequence[int] | None = None,
        pad_small_map: bool = True,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(SWIN, arch, overrides)
        rules = agent_rules(_map_sizes(fields), agent_nums, pretrain_agent_nums, attention)
        swapped = per_stage('blocks', AGENT_SWIN_BLOCKS[arch] if blocks is None else blocks, len(rules))
        super().__init__(rules, swapped, pad_small_map=pad_small_map, fields=fields, init_cfg=init_cfg)


@MODELS.register_module()
class SAGASwin(_LinearSwin):
    """Swin with SAGA over the whole map in stages 1 to 3, Swin's own windows in stage 4.

    Args:
        arch: ``'tiny'``, ``'small'`` or ``'base'``.
        attention: Options of :class:`~mmgate.layers.SAGAAttention`, such as ``dict(gate=False)``.
        blocks: How many blocks of each stage, from its first on, have SAGA; the preset's by default.
        pad_small_map: Whether windows shift where one of them holds the whole map, as mmdet's do; Swin's classifiers do
            not (mmpretrain's name for it).
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of the authors of Swin, of mmdet and
            mmseg are recognised: a vanilla checkpoint fills what is shared, see :func:`.pretrained.load_pretrained`.
        **overrides: Arguments of mmdet's ``SwinTransformer`` in the place of the preset's.

    Raises:
        ValueError: An unknown ``arch``, numbers that do not fit the stages, or an ``attn_drop_rate``: SAGA has no
            attention weights to drop.

    Source: SAGA, tables 1 and 2. The window of 56 that its parameter counts imply is the whole map at 224 pixels; on a
    larger image the attention, being linear, still sees the whole map.
    """

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        attention: Mapping[str, Any] | None = None,
        blocks: Sequence[int] | None = None,
        pad_small_map: bool = True,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(SWIN, arch, overrides)
        rules = [dict(type='SAGAAttention', map_size=size, **(attention or {})) for size in _map_sizes(fields)]
        no_attention_dropout(fields)
        swapped = per_stage('blocks', SAGA_SWIN_BLOCKS[arch] if blocks is None else blocks, len(fields['depths']))
        super().__init__(rules, swapped, pad_small_map=pad_small_map, fields=fields, init_cfg=init_cfg)

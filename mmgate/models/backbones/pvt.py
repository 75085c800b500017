"""PVT and PVTv2 with agent and SAGA attention: mmdet's backbones with every stage's attention swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmdet.models.backbones.pvt import PVTEncoderLayer, PyramidVisionTransformer, PyramidVisionTransformerV2
from mmdet.models.layers import nlc_to_nchw
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from mmgate.layers.token_ffn import TokenFFN
from mmgate.models.gated import swap_attention
from mmgate.registry import MODELS

from .fitting import ResizesPositions
from .presets import PRETRAIN_AGENTS, PVT, PVT_V2, agent_rules, no_attention_dropout, preset
from .pretrained import load_pretrained

PATCH_NORM_EPS = 1e-5  # of PVT's own patch embeddings, where mmdet has the 1e-6 of the blocks


class _LinearPVT(ResizesPositions, PyramidVisionTransformer):
    """mmdet's PVT without spatial reduction, its attention swapped by one rule a stage.

    ``rules`` lists the rules without their paths.
    """

    convolves = False  # whether the feed-forward networks convolve by default

    def __init__(
        self,
        rules: Sequence[Mapping[str, Any]],
        *,
        frozen_stages: int,
        with_cp: bool,
        fields: Mapping[str, Any],
        init_cfg: dict | None,
    ) -> None:
        stages = len(fields['num_layers'])
        super().__init__(**{'sr_ratios': [1] * stages, 'num_stages': stages, **fields}, init_cfg=init_cfg)
        if not -1 <= frozen_stages <= stages:
            raise ValueError(f'frozen_stages={frozen_stages} must be -1 (none) to {stages}.')
        self.frozen_stages, self.with_cp = frozen_stages, with_cp
        for embed, blocks, _ in self.layers:
            embed.norm.eps = PATCH_NORM_EPS
            for block in blocks:
                if isinstance(block, PVTEncoderLayer) and not fields.get('use_conv_ffn', self.convolves):
                    block.ffn = TokenFFN(block.ffn)
        swap_attention(self, [{'path': f'layers.{i}.1.*.attn', **rule} for i, rule in enumerate(rules)])
        self._freeze_stages()

    def init_weights(self) -> None:
        """Initialise from scratch, or strictly from the checkpoint of a ``Pretrained`` init_cfg."""
        if self.init_cfg is not None:
            load_pretrained(self, self.init_cfg)
        else:
            super().init_weights()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps ``(B, C_i, H_i, W_i)`` of the stages in ``out_indices`` for images ``(B, 3, H, W)``."""
        maps = []
        for i, (embed, blocks, norm) in enumerate(self.layers):
            x, hw_shape = embed(x)
            for block in blocks:
                if self.with_cp and x.requires_grad:
                    x = checkpoint(block, x, hw_shape, use_reentrant=False)
                else:
                    x = block(x, hw_shape)
            x = nlc_to_nchw(norm(x), hw_shape)
            if i in self.out_indices:
                maps.append(x)
        return tuple(maps)  # mmpretrain's necks and heads take no list

    def train(self, mode: bool = True) -> _LinearPVT:
        """Set the mode; frozen stages stay in evaluation."""
        super().train(mode)
        self._freeze_stages()
        return self

    def _freeze_stages(self) -> None:
        for stage in self.layers[: max(self.frozen_stages, 0)]:
            stage.eval().requires_grad_(False)


def _map_sizes(fields: Mapping[str, Any]) -> list[tuple[int, int]]:
    """Return height and width of every stage's map in pre-training."""
    size = fields.get('pretrain_img_size', 224)
    height, width = (size, size) if isinstance(size, int) else size
    sizes = []
    for stride in fields.get('strides', (4, 2, 2, 2)):
        height, width = height // stride, width // stride
        sizes.append((height, width))
    return sizes


@MODELS.register_module()
class AgentPVT(_LinearPVT):
    """PVT with agent attention in every stage and no spatial reduction.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'`` or ``'large'``.
        agent_nums: Agent tokens of each stage; those of pre-training by default. The paper takes (144, 256, 784, 784)
            for dense prediction.
        pretrain_agent_nums: Agent tokens of each stage in pre-training, in the biases' shapes.
        attention: Options of :class:`~mmgate.layers.AgentAttention` for every stage, such as ``dict(bias=False)``.
        frozen_stages: How many stages, from the first on, are not trained; -1 for none.
        with_cp: Recompute the blocks in the backward pass.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of the authors, with agent attention
            or vanilla, and of mmdet are recognised, see :func:`.pretrained.load_pretrained`.
        **overrides: Arguments of mmdet's ``PyramidVisionTransformer`` in the place of the preset's; ``convert_weights``
            makes no difference.

    Raises:
        ValueError: An unknown ``arch``, or numbers that do not fit the stages.

    Source: Agent attention, tables 19 and 20, appendix C.2.
    """

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        agent_nums: Sequence[int] | None = None,
        pretrain_agent_nums: Sequence[int] = PRETRAIN_AGENTS,
        attention: Mapping[str, Any] | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(PVT, arch, overrides)
        rules = agent_rules(_map_sizes(fields), agent_nums, pretrain_agent_nums, attention)
        super().__init__(rules, frozen_stages=frozen_stages, with_cp=with_cp, fields=fields, init_cfg=init_cfg)


@MODELS.register_module()
class SAGAPVT(_LinearPVT):
    """PVT with SAGA in every stage and no spatial reduction.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'`` or ``'large'``.
        attention: Options of :class:`~mmgate.layers.SAGAAttention` for every stage, such as ``dict(gate=False)``.
        frozen_stages: How many stages, from the first on, are not trained; -1 for none.
        with_cp: Recompute the blocks in the backward pass.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of PVT's authors and of mmdet are
            recognised: a vanilla checkpoint fills what is shared, see :func:`.pretrained.load_pretrained`.
        **overrides: Arguments of mmdet's backbone in the place of the preset's.

    Raises:
        ValueError: An unknown ``arch``, or an ``attn_drop_rate``: there are no attention weights to drop.

    Source: SAGA, tables 1 and 2.
    """

    presets: Mapping[str, Mapping[str, Any]] = PVT

    def __init__(
        self,
        arch: str | None = None,
        *,
        attention: Mapping[str, Any] | None = None,
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(self.presets, next(iter(self.presets)) if arch is None else arch, overrides)
        no_attention_dropout(fields)
        rules = [dict(type='SAGAAttention', map_size=size, **(attention or {})) for size in _map_sizes(fields)]
        super().__init__(rules, frozen_stages=frozen_stages, with_cp=with_cp, fields=fields, init_cfg=init_cfg)


@MODELS.register_module()
class SAGAPVTv2(SAGAPVT, PyramidVisionTransformerV2):
    """PVTv2 with SAGA in every stage; ``arch`` is ``'b0'`` or ``'b1'``, the other arguments as :class:`SAGAPVT`."""

    presets, convolves = PVT_V2, True

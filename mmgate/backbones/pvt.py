"""PVT and PVTv2 with agent, SAGA and other attention: mmdet's backbones with every stage's attention swapped."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mmdet.models.backbones.pvt import PVTEncoderLayer, PyramidVisionTransformer, PyramidVisionTransformerV2
from mmdet.models.layers import nlc_to_nchw
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from mmgate.backbones.fitting import ResizesPositions
from mmgate.backbones.presets import PRETRAIN_AGENTS, PVT, PVT_V2, agent_rules, no_attention_dropout, preset
from mmgate.backbones.pretrained import load_pretrained
from mmgate.backbones.token_ffn import TokenFFN
from mmgate.layers.base.init import start_linear
from mmgate.layers.gml import check_option
from mmgate.registry import MODELS
from mmgate.swap import swap_attention
from mmgate.weight_init import gates_in_place

PATCH_NORM_EPS = 1e-5  # of PVT's own patch embeddings, where mmdet has the 1e-6 of the blocks
SR_RATIOS = (8, 4, 2, 1)
INITS = ('host', 'paper')


class _GatedPVT(ResizesPositions, PyramidVisionTransformer):
    """mmdet's PVT, its attention swapped by one rule a stage (``rules``, without their paths), or vanilla without any.

    The vanilla attention, which reduces its keys and values, initialises before it is swapped, so that whatever is in
    its place, what is shared starts with the same numbers.
    """

    convolves = False  # whether the feed-forward networks convolve by default

    def __init__(
        self,
        rules: Sequence[Mapping[str, Any]],
        *,
        init: str,
        frozen_stages: int,
        with_cp: bool,
        fields: Mapping[str, Any],
        init_cfg: dict | None,
    ) -> None:
        check_option('init', init, INITS)
        stages = len(fields['num_layers'])
        super().__init__(**{'sr_ratios': SR_RATIOS[:stages], 'num_stages': stages, **fields}, init_cfg=init_cfg)
        if not -1 <= frozen_stages <= stages:
            raise ValueError(f'frozen_stages={frozen_stages} must be -1 (none) to {stages}.')
        self.init, self.frozen_stages, self.with_cp = init, frozen_stages, with_cp
        for embed, blocks, _ in self.layers:
            embed.norm.eps = PATCH_NORM_EPS
            for block in blocks:
                if isinstance(block, PVTEncoderLayer) and not fields.get('use_conv_ffn', self.convolves):
                    block.ffn = TokenFFN(block.ffn)
        if rules:
            swap_attention(self, [{'path': f'layers.{i}.1.*.attn', **rule} for i, rule in enumerate(rules)])
        self._freeze_stages()

    def init_weights(self) -> None:
        """Initialise from scratch, or strictly from the checkpoint of a ``Pretrained`` init_cfg."""
        if self.init_cfg is not None:
            with gates_in_place(self):
                load_pretrained(self, self.init_cfg)
            return
        super().init_weights()
        if self.init == 'paper':
            self._start_as_the_authors()

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

    def train(self, mode: bool = True) -> _GatedPVT:
        """Set the mode; frozen stages stay in evaluation."""
        super().train(mode)
        self._freeze_stages()
        return self

    def _start_as_the_authors(self) -> None:
        """Draw what mmdet starts otherwise than the authors, whose feed-forward layers and qkv are ``nn.Linear``."""
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                nn.init.trunc_normal_(module.in_proj_weight, std=0.02)
            elif isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
                start_linear(module)
            elif isinstance(module, nn.Conv2d) and not self.convolves:  # PVTv2 draws them as mmdet does
                module.reset_parameters()

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
class AgentPVT(_GatedPVT):
    """PVT with agent attention in every stage and no spatial reduction.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'`` or ``'large'``.
        agent_nums: Agent tokens of each stage; those of pre-training by default. The paper takes (144, 256, 784, 784)
            for dense prediction.
        pretrain_agent_nums: Agent tokens of each stage in pre-training, in the biases' shapes.
        attention: Options of :class:`~mmgate.layers.AgentAttention` for every stage, such as ``dict(bias=False)``.
        init: ``'host'`` (default): what is shared with mmdet's PVT starts as there; ``'paper'``: as in the authors'
            code, every linear layer normal with deviation 0.02. The vanilla partner has the same option.
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
        init: str = 'host',
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(PVT, arch, overrides)
        rules = agent_rules(_map_sizes(fields), agent_nums, pretrain_agent_nums, attention)
        options: dict[str, Any] = dict(init=init, frozen_stages=frozen_stages, with_cp=with_cp)
        super().__init__(rules, **options, fields=fields, init_cfg=init_cfg)


@MODELS.register_module()
class SAGAPVT(_GatedPVT):
    """PVT with SAGA in every stage and no spatial reduction.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'`` or ``'large'``.
        attention: Options of :class:`~mmgate.layers.SAGAAttention` for every stage, such as ``dict(gate=False)``.
        init: ``'host'`` (default): what is shared with mmdet's PVT starts as there; ``'paper'``: as in the authors'
            code, every linear layer normal with deviation 0.02. The vanilla partner has the same option.
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
        init: str = 'host',
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(self.presets, next(iter(self.presets)) if arch is None else arch, overrides)
        no_attention_dropout(fields)
        rules = [dict(type='SAGAAttention', map_size=size, **(attention or {})) for size in _map_sizes(fields)]
        options: dict[str, Any] = dict(init=init, frozen_stages=frozen_stages, with_cp=with_cp)
        super().__init__(rules, **options, fields=fields, init_cfg=init_cfg)


@MODELS.register_module()
class SAGAPVTv2(SAGAPVT, PyramidVisionTransformerV2):
    """PVTv2 with SAGA in every stage; ``arch`` is ``'b0'`` or ``'b1'``, the other arguments as :class:`SAGAPVT`."""

    presets, convolves = PVT_V2, True

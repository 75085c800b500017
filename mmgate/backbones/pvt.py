"""PVT and PVTv2 with Agent, SAGA and other attention: mmdet's backbones with the attention of every stage gated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmdet.models.backbones.pvt import PyramidVisionTransformer, PyramidVisionTransformerV2
from torch import nn

from mmgate.backbones.presets import PRETRAIN_AGENTS, Options, preset, stage_rules
from mmgate.backbones.weights import PublishedWeights
from mmgate.gate import start_linear
from mmgate.gates.parts.options import check_option
from mmgate.swap import swap_attention

PATCH_NORM_EPS = 1e-5  # of PVT's own patch embeddings, where mmdet has the 1e-6 of the blocks
SR_RATIOS = (8, 4, 2, 1)
INITS = ('host', 'paper')
SIZES = {
    'tiny': dict(num_layers=(2, 2, 2, 2)),
    'small': dict(num_layers=(3, 4, 6, 3)),
    'medium': dict(num_layers=(3, 4, 18, 3)),
    'large': dict(num_layers=(3, 8, 27, 3)),
}
SIZES_V2 = {
    'b0': dict(num_layers=(2, 2, 2, 2), embed_dims=32),
    'b1': dict(num_layers=(2, 2, 2, 2), embed_dims=64),
}


class PVT(PublishedWeights, PyramidVisionTransformer):
    """mmdet's PVT whose attention with spatial reduction is replaced by another attention in every stage.

    Without ``attention`` it keeps its own, over a reduced map; with ``attention=dict(type='SoftmaxAttention')`` it has
    the same over the whole map. These are the partners of comparisons.

    The vanilla attention, which reduces its keys and values, is initialised without its gate, so that shared parameters
    start with the same numbers for every attention.

    Args:
        arch: ``'tiny'``, ``'small'``, ``'medium'`` or ``'large'``; of PVTv2 ``'b0'`` or ``'b1'``.
        attention: Options of the attention for every stage, such as ``dict(bias=False)``, or a list of them, one a
            stage. With ``type`` they name another attention, a registered
            :class:`~mmgate.gates.base.map.MapAttentionAdapter`.
        agent_nums: Agent tokens of each stage, of agent attention; by default as many as in pre-training.
        pretrain_agent_nums: Agent tokens of each stage in pre-training, in the biases' shapes.
        init: ``'host'`` (default): what is shared with mmdet's PVT starts as there; ``'paper'``: as in the authors'
            code, every linear layer normal with deviation 0.02. The vanilla partner has the same option.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of the authors, with agent attention
            or vanilla, and of mmdet are recognised: a vanilla checkpoint fills what is shared, see
            :func:`.weights.load_pretrained`.
        **overrides: Arguments of mmdet's ``PyramidVisionTransformer`` instead of the preset's; ``convert_weights``
            makes no difference.

    Raises:
        ConfigError: An unknown ``arch``, numbers or attentions that do not fit the stages, or a linear attention with
            an ``attn_drop_rate``: it has no attention weights to drop.
        OptionError: An option that the attention does not have.
    """

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = SIZES
    convolves = False  # True if the feed-forward networks convolve by default

    def __init__(
        self,
        arch: str | None = None,
        *,
        attention: Options | Sequence[Options] | None = None,
        agent_nums: Sequence[int] | None = None,
        pretrain_agent_nums: Sequence[int] | None = None,
        init: str = 'host',
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(self.presets, next(iter(self.presets)) if arch is None else arch, overrides)
        stages = len(fields['num_layers'])
        rules = stage_rules(
            attention, self.attention_type, self.pretrain_agents, stages, agent_nums, pretrain_agent_nums
        )
        check_option('init', init, INITS)
        super().__init__(**{'sr_ratios': SR_RATIOS[:stages], 'num_stages': stages, **fields}, init_cfg=init_cfg)
        self.init = init
        self.pretrain_img_size = fields.get('pretrain_img_size', 224)
        for embed, _, _ in self.layers:
            embed.norm.eps = PATCH_NORM_EPS
        if rules:
            swap_attention(self, [{'path': f'layers.{i}.1.*.attn', **rule} for i, rule in enumerate(rules)])

    def init_weights(self) -> None:
        """Initialise from scratch, or strictly from the checkpoint of a ``Pretrained`` init_cfg."""
        super().init_weights()
        if self.init_cfg is not None or self.init == 'host':
            return
        # mmdet starts these otherwise, as the authors' networks and projections are nn.Linear.
        for module in self.modules():
            if isinstance(module, nn.MultiheadAttention):
                nn.init.trunc_normal_(module.in_proj_weight, std=0.02)
            elif isinstance(module, nn.Conv2d) and module.kernel_size == (1, 1):
                start_linear(module)
            elif isinstance(module, nn.Conv2d) and not self.convolves:  # PVTv2 draws them as mmdet does
                module.reset_parameters()


class PVTv2(PVT, PyramidVisionTransformerV2):
    """mmdet's PVTv2 with the attention that ``attention`` names, or its own; it takes the arguments of :class:`PVT`."""

    presets = SIZES_V2
    convolves = True


class AgentPVT(PVT):
    """Backbone PVT with agent attention in every stage; it takes the arguments of :class:`PVT`.

    For dense prediction the paper takes ``agent_nums=(144, 256, 784, 784)``.

    Source: Agent attention, tables 19 and 20, appendix C.2.
    """

    attention_type = 'AgentAttention'
    pretrain_agents = PRETRAIN_AGENTS


class SAGAPVT(PVT):
    """Backbone PVT with SAGA (gated linear attention) in every stage; it takes the arguments of :class:`PVT`.

    Source: SAGA, tables 1 and 2.
    """

    attention_type = 'SAGAAttention'


class SAGAPVTv2(PVTv2):
    """Backbone PVTv2 with SAGA (gated linear attention) in every stage; it takes the arguments of :class:`PVT`."""

    attention_type = 'SAGAAttention'

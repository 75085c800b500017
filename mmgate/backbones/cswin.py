"""The backbone CSwin with agent attention in its early stages, written here because no mm package has a CSwin."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from mmcv.cnn.bricks.drop import DropPath
from mmengine.model import BaseModule
from torch import Tensor, nn

from mmgate.backbones.presets import check_stages, preset
from mmgate.backbones.weights import PublishedWeights, cswin_layout
from mmgate.checkpoints.tensors import State
from mmgate.errors import ConfigError
from mmgate.gate import Sizes, start_linear
from mmgate.gates.base.map import HeightWidth, MapAdapter, MapAttention, MapGate
from mmgate.gates.parts.options import integer
from mmgate.gates.parts.stripes import merge_stripes, split_stripes
from mmgate.hosts import adapts
from mmgate.hosts.from_model import backbone_and_stage, sizes_of_stage
from mmgate.swap import swap_attention

CSWIN = {
    'tiny': dict(depths=(2, 4, 18, 1), embed_dims=64, num_heads=(2, 4, 8, 16)),
    'small': dict(depths=(3, 6, 29, 2), embed_dims=64, num_heads=(2, 4, 8, 16)),
    'base': dict(depths=(3, 6, 29, 2), embed_dims=96, num_heads=(4, 8, 16, 32)),
}
STAGES = 4
Numbers = Sequence[int | None]


class CrossWindowAttention(MapAttention):
    """CSwin's attention: half of the heads in vertical stripes, half in horizontal ones, plus convolved values (LePE).

    The map is padded with zeros to whole stripes.

    Args:
        embed_dims: Channels C, a multiple of ``num_heads``.
        num_heads: Heads H.
        split: Width of the vertical stripes, which are as high as the map, and height of the horizontal ones. None lets
            all heads attend over the whole map.

    Raises:
        ConfigError: The number of heads is odd, with stripes, or their width no positive integer.

    Source: CSWin transformer (Dong et al., 2022), Eq. 1 to 6.
    """

    def __init__(self, embed_dims: int, num_heads: int, *, split: int | None = 7) -> None:
        super().__init__(embed_dims, num_heads)
        if split is not None and integer('split', split) and num_heads % 2:
            raise ConfigError(f'num_heads={num_heads} must be even, half for each direction of the stripes.')
        self.split = split
        branches = 1 if split is None else 2
        width = embed_dims // branches
        self.lepe = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1, groups=width) for _ in range(branches))

    def mix(self, x: Tensor, q: Tensor, k: Tensor, v: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend in vertical and horizontal stripes, and add the convolved values."""
        height, width = hw_shape
        stripes = [hw_shape]
        if self.split is not None:
            stripes = [(height, min(self.split, width)), (min(self.split, height), width)]
        shares = zip(*(part.chunk(len(stripes), -1) for part in (q, k, v)), strict=True)
        branches = []
        for share, convolution, stripe in zip(shares, self.lepe, stripes, strict=True):
            queries, keys, values = (split_stripes(part, hw_shape, stripe) for part in share)
            # (B n, sh sw, C / branches) each. The convolution sees one stripe, padded with zeros at its borders.
            local = convolution(values.transpose(1, 2).unflatten(-1, stripe)).flatten(2).transpose(1, 2)
            q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in (queries, keys, values))
            out = F.scaled_dot_product_attention(q, k, v, scale=self.scale)  # (B n, H / branches, sh sw, d)
            branches.append(merge_stripes(out.transpose(1, 2).flatten(2) + local, hw_shape, stripe))
        return torch.cat(branches, -1)


class _Block(nn.Module):
    """Pre-norm transformer block over tokens: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``."""

    def __init__(self, attn: nn.Module, channels: int, mlp_ratio: float, drop_path: float) -> None:
        super().__init__()
        hidden = round(channels * mlp_ratio)
        self.norm1 = nn.LayerNorm(channels)
        self.attn = attn
        self.norm2 = nn.LayerNorm(channels)
        self.mlp = nn.Sequential(nn.Linear(channels, hidden), nn.GELU(), nn.Linear(hidden, channels))
        self.drop_path = DropPath(drop_path) if drop_path else nn.Identity()

    def forward(self, x: Tensor, hw_shape: tuple[int, int]) -> Tensor:
        x = x + self.drop_path(self.attn(self.norm1(x), hw_shape))
        return x + self.drop_path(self.mlp(self.norm2(x)))


class _Embedding(nn.Module):
    """Strided convolution and a norm that begin a stage; return the tokens, and the height and width of their map."""

    def __init__(self, inputs: int, channels: int, kernel: int, stride: int, padding: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(inputs, channels, kernel, stride, padding)
        self.norm = nn.LayerNorm(channels)

    def forward(self, image: Tensor) -> tuple[Tensor, tuple[int, int]]:
        grid = self.conv(image)
        return self.norm(grid.flatten(2).transpose(1, 2)), (grid.shape[2], grid.shape[3])


class AgentCSwin(PublishedWeights, BaseModule):
    """Backbone CSwin with agent attention in stages 1 and 2, cross-shaped windows in stage 3, the whole map in stage 4.

    The last stage sees its whole map. ``agent_nums=(None,) * 4`` makes it vanilla; both start with the same numbers in
    what they share.

    Args:
        arch: ``'tiny'``, ``'small'`` or ``'base'``.
        depths: Blocks of each stage, instead of the preset's.
        embed_dims: Channels of the first stage, instead of the preset's; they double from stage to stage.
        num_heads: Heads of each stage, instead of the preset's.
        agent_nums: Agent tokens of each stage, None for cross-shaped windows; by default as many as in pre-training.
        pretrain_agent_nums: Agent tokens of each stage in pre-training, in the biases' shapes.
        splits: Width of each stage's stripes where there are no agents; None for the whole map. The default is
            CSwin's.
        pretrain_img_size: Side of the images in pre-training, of which the biases have their shapes.
        mlp_ratio: Width of the feed-forward networks over the channels.
        drop_path_rate: Of the last block; the others rise to it.
        out_indices: Stages whose normalised maps are returned.
        in_channels: Of the images.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The authors' layout, with agents or vanilla, and
            ours are recognised; a vanilla one fills what is shared. Positions of another resolution are resized.

    Raises:
        ConfigError: An unknown ``arch``, or numbers that do not fit four stages.

    Source: Agent attention, Table 22; CSWin transformer (Dong et al., 2022).
    """

    def __init__(
        self,
        arch: str = 'tiny',
        *,
        depths: Sequence[int] | None = None,
        embed_dims: int | None = None,
        num_heads: Sequence[int] | None = None,
        agent_nums: Numbers | None = None,
        pretrain_agent_nums: Numbers = (9, 16, None, None),
        splits: Numbers = (1, 2, 7, None),
        pretrain_img_size: int = 224,
        mlp_ratio: float = 4.0,
        drop_path_rate: float = 0.0,
        out_indices: Sequence[int] = (0, 1, 2, 3),
        in_channels: int = 3,
        init_cfg: dict | None = None,
    ) -> None:
        super().__init__(init_cfg)
        sizes = preset(CSWIN, arch, dict(depths=depths, embed_dims=embed_dims, num_heads=num_heads))
        agents = pretrain_agent_nums if agent_nums is None else agent_nums
        by_stage = dict(splits=splits, pretrain_agent_nums=pretrain_agent_nums, agent_nums=agents)
        check_stages(STAGES, depths=sizes['depths'], num_heads=sizes['num_heads'], **by_stage)
        if not set(out_indices) <= set(range(STAGES)):
            raise ConfigError(f'out_indices={tuple(out_indices)} must lie in 0 to {STAGES - 1}.')
        self.out_indices = tuple(sorted(out_indices))
        self.pretrain_img_size = pretrain_img_size
        blocks = 0
        total = max(sum(sizes['depths']) - 1, 1)
        self.embeddings = nn.ModuleList()
        self.stages = nn.ModuleList()
        for i, (depth, heads) in enumerate(zip(sizes['depths'], sizes['num_heads'], strict=True)):
            channels = sizes['embed_dims'] * 2**i
            form = (in_channels, channels, 7, 4, 2) if i == 0 else (channels // 2, channels, 3, 2, 1)
            self.embeddings.append(_Embedding(*form))
            stage = nn.ModuleList()
            for _ in range(depth):
                attn = CrossWindowAttention(channels, heads, split=splits[i])
                stage.append(_Block(attn, channels, mlp_ratio, drop_path_rate * blocks / total))
                blocks += 1
            self.stages.append(stage)
            if i in self.out_indices:
                self.add_module(f'norm{i}', nn.LayerNorm(channels))

        rules = [
            dict(
                path=f'stages.{i}.*.attn',
                type='AgentAttention',
                agent_num=number,
                pretrain_agent_num=pretrain_agent_nums[i] or number,
            )
            for i, number in enumerate(agents)
            if number is not None
        ]
        if rules:
            swap_attention(self, rules)

    def init_weights(self) -> None:
        """Initialise from scratch, or from the checkpoint of a ``Pretrained`` init_cfg."""
        if self.init_cfg is not None:
            super().init_weights()
            return
        start_linear(*(module for module in self.modules() if isinstance(module, nn.Linear)))

    def rename(self, state: State) -> State:
        """Return the tensors of a CSwin checkpoint, the authors' or ours, under the names of this class."""
        # A vanilla block's convolutions in stripes have no place where there are agents.
        own = self.state_dict()
        return {key: value for key, value in cswin_layout(state).items() if key in own or '.lepe.' not in key}

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps ``(B, C_i, H_i, W_i)`` of the stages in ``out_indices`` for images ``(B, 3, H, W)``."""
        maps = []
        for i, (embedding, stage) in enumerate(zip(self.embeddings, self.stages, strict=True)):
            tokens, hw_shape = embedding(x)
            blocks: Any = stage
            for block in blocks:
                tokens = block(tokens, hw_shape)
            x = tokens.transpose(1, 2).unflatten(-1, hw_shape)
            if i in self.out_indices:
                normalised = getattr(self, f'norm{i}')(tokens)
                maps.append(normalised.transpose(1, 2).unflatten(-1, hw_shape).contiguous())
        return tuple(maps)


@adapts(MapGate, CrossWindowAttention)
class UncrossedAttention(MapAdapter):
    """Adapter that lets attention over the whole map replace CSwin's attention in cross-shaped windows."""

    unused = ('lepe',)

    @classmethod
    def sizes(cls, host: Any) -> Sizes:
        """Return the number of channels and heads of CSwin's attention, for its gate."""
        bias = host.qkv.bias is not None
        return Sizes(host.embed_dims, host.num_heads, dropout=host.attn_drop, scale=host.scale, bias=bias)

    @classmethod
    def sizes_from_model(cls, model: nn.Module, path: str) -> dict[str, Any]:
        """Return the stride of the stage, and the map in pre-training."""
        backbone, stage = backbone_and_stage(model, path, 'stages')
        return sizes_of_stage(backbone, getattr(backbone, 'embeddings', [])[: stage + 1])

    def forward(self, x: Tensor, hw_shape: HeightWidth) -> Tensor:
        """Attend over all tokens ``(B, N, C)`` of a map of height and width ``hw_shape``."""
        return self.attend_gated(x, hw_shape)

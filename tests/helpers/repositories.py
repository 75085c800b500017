"""Attentions of repositories on the web that are cloned and not installed, with their signatures and plain sums."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from inspect import Parameter, Signature
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SHAPES, STARTS = torch.tensor([[4, 6], [2, 3]]), torch.tensor([0, 24])


class Attention(nn.Module):
    """As mmdet's projects/ViTDet has it: a map with a table of distances a side."""

    __module__ = 'projects.ViTDet.vitdet.vit'

    def __init__(self, dim: int, num_heads: int, use_rel_pos: bool, input_size: tuple[int, int]) -> None:
        super().__init__()
        self.num_heads, self.scale, self.use_rel_pos = num_heads, (dim // num_heads) ** -0.5, use_rel_pos
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        if use_rel_pos:
            self.rel_pos_h, self.rel_pos_w = (
                nn.Parameter(torch.randn(2 * size - 1, dim // num_heads)) for size in input_size
            )

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        q, k, v = self.qkv(x).view(batch, height * width, 3, self.num_heads, -1).permute(2, 0, 3, 1, 4)
        logits = self.scale * q @ k.mT
        if self.use_rel_pos:
            for i in range(height * width):
                for j in range(height * width):
                    down, right = i // width - j // width, i % width - j % width
                    entry = self.rel_pos_h[down + height - 1] + self.rel_pos_w[right + width - 1]
                    logits[:, :, i, j] += q[:, :, i] @ entry
        out = logits.softmax(-1) @ v
        return self.proj(out.transpose(1, 2).reshape(batch, height, width, channels))


def deformable_inputs(columns: int = 4) -> list[Tensor]:
    """Return queries, reference points, memory, shapes, starts and a mask of padding."""
    mask = torch.arange(30)[None] >= torch.tensor([[30], [25]])
    return [torch.randn(2, 5, 32), torch.rand(2, 5, 2, columns), torch.randn(2, 30, 32), SHAPES, STARTS, mask]


def summed(value: Tensor, shapes: Any, locations: Sequence[Tensor], weights: Sequence[Tensor]) -> Tensor:
    """Return ``(B, Q, H d)``: values ``(B, S, H, d)`` at each level's ``(B, Q, H, P, 2)`` times ``(B, Q, H, P)``."""
    batch, _, heads, width = value.shape
    total: Any = 0
    start = 0
    for level, (rows, columns) in enumerate(torch.as_tensor(shapes).tolist()):
        of_level = value[:, start : start + rows * columns].permute(0, 2, 3, 1).reshape(-1, width, rows, columns)
        start += rows * columns
        grid = 2 * locations[level].transpose(1, 2).flatten(0, 1) - 1  # (B H, Q, P, 2)
        samples = F.grid_sample(of_level, grid, align_corners=False)  # (B H, d, Q, P)
        of_weights = weights[level].transpose(1, 2).flatten(0, 1)[:, None]
        total = total + (samples * of_weights).sum(-1)
    return total.view(batch, heads * width, -1).transpose(1, 2)


class Place(NamedTuple):
    """Where a clone has a class of deformable attention, and how it is called.

    Attributes:
        module: Its module.
        name: Of the class.
        options: Of the constructor, with their defaults.
        call: The names of the call's arguments, each with what :class:`Layer` calls it.
    """

    module: str
    name: str
    options: dict[str, Any]
    call: str

    @property
    def names(self) -> dict[str, str]:
        """By its name, what an argument is."""
        return {word.partition(':')[0]: word.rpartition(':')[2] for word in self.call.split()}


OF_DINO = dict(d_model=32, n_levels=2, n_heads=4, n_points=3)
OF_DETREX = dict(embed_dim=32, num_heads=4, num_levels=2, num_points=3, img2col_step=64)
OF_RT_DETR = dict(embed_dim=32, num_heads=4, num_levels=2, num_points=3)
OF_V2 = dict(OF_RT_DETR, method='default', offset_scale=0.5)
LEVELS = 'query_pos key_padding_mask:padding reference_points:points spatial_shapes:shapes level_start_index:starts'
VALUES = 'query reference_points:points value value_spatial_shapes:shapes'
OF_INPUT = 'input_flatten:value input_spatial_shapes:shapes input_level_start_index:starts input_padding_mask:padding'
BOXES = 'query refer_bbox:points value value_shapes:shapes value_mask:padding'
MSDA, RT_DETR = 'MultiScaleDeformableAttention', 'MSDeformableAttention'
# By repository. DINO's is that of Deformable DETR and, with another ratio, of ViT-Adapter; D-FINE's is DEIM's as well.
PLACES = {
    'dino': Place(
        'models.dino.ops.modules.ms_deform_attn',
        'MSDeformAttn',
        dict(OF_DINO, use_4D_normalizer=False, ratio=1.0),
        f'query reference_points:points {OF_INPUT}',
    ),
    'grounding_dino': Place(
        'groundingdino.models.GroundingDINO.ms_deform_attn',
        MSDA,
        dict(OF_DETREX, batch_first=False),
        f'query key value {LEVELS} **kwargs',
    ),
    'detrex': Place(
        'detrex.layers.multi_scale_deform_attn',
        MSDA,
        dict(OF_DETREX, dropout=0.0, batch_first=False),
        f'query key value identity {LEVELS} **kwargs',
    ),
    'rt_detr': Place('src.zoo.rtdetr.rtdetr_decoder', RT_DETR, OF_RT_DETR, f'{VALUES} value_mask:padding'),
    'rt_detr_v2': Place('src.zoo.rtdetr.rtdetrv2_decoder', RT_DETR, OF_V2, f'{VALUES} value_mask:padding'),
    'd_fine': Place('src.zoo.dfine.dfine_decoder', RT_DETR, OF_V2, VALUES),
    'ultralytics': Place('ultralytics.nn.modules.transformer', 'MSDeformAttn', OF_DINO, BOXES),
}


def with_signature(function: Callable[..., Any], names: Iterable[str]) -> Callable[..., Any]:
    """Return a function that says that it takes these arguments beside ``self``, ``**kwargs`` among them."""

    def taken(self: Any, *args: Any, **kwargs: Any) -> Any:
        return function(self, *args, **kwargs)

    kinds = {name: Parameter.VAR_KEYWORD if '*' in name else Parameter.POSITIONAL_OR_KEYWORD for name in names}
    parameters = [Parameter(name.strip('*'), kind) for name, kind in kinds.items()]
    taken.__signature__ = Signature([Parameter('self', Parameter.POSITIONAL_ONLY), *parameters])  # type: ignore
    return taken


class Deformable(nn.Module):
    """Deformable attention of a repository: its attributes, and a call by its names."""

    repository: str

    def __init__(self, *args: Any, **given: Any) -> None:
        super().__init__()
        options = PLACES[self.repository].options
        self.given = {**options, **dict(zip(options, args, strict=False)), **given}
        channels, heads, levels, points = (
            next(self.given[name] for name in names if name in self.given)
            for names in (('d_model', 'embed_dim'), ('n_heads', 'num_heads'), ('n_levels', 'num_levels'),
                          ('n_points', 'num_points'))
        )  # fmt: skip
        for name, value in self.given.items():
            setattr(self, name, nn.Dropout(value) if name == 'dropout' else value)
        self.heads, self.counts = heads, points if isinstance(points, list) else [points] * levels
        if 'method' in self.given:
            del self.num_points
            self.num_points_list = self.counts
        self.sampling_offsets = nn.Linear(channels, 2 * heads * sum(self.counts))
        self.attention_weights = nn.Linear(channels, heads * sum(self.counts))
        if self.repository != 'd_fine':
            width = int(channels * self.given.get('ratio', 1.0))
            self.value_proj, self.output_proj = nn.Linear(channels, width), nn.Linear(width, channels)

    def attended(self, query: Tensor, value: Tensor, points: Tensor, shapes: Any) -> Tensor:
        offsets = self.sampling_offsets(query).unflatten(-1, (self.heads, -1, 2)).split(self.counts, 3)
        weights = self.attention_weights(query).unflatten(-1, (self.heads, -1)).softmax(-1).split(self.counts, 3)
        locations = []
        for level, (of_level, count) in enumerate(zip(offsets, self.counts, strict=True)):
            around = points[:, :, None, min(level, points.shape[2] - 1), None]  # (B, Q, 1, 1, 2|4)
            if points.shape[-1] == 2:
                locations.append(around + of_level / torch.as_tensor(shapes)[level].flip(-1))
            else:
                scale = self.given.get('offset_scale', 0.5)
                locations.append(around[..., :2] + of_level / count * around[..., 2:] * scale)
        return summed(value, shapes, locations, weights)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        names = PLACES[self.repository].names
        given = {names.get(name, name): x for name, x in {**dict(zip(names, args, strict=False)), **kwargs}.items()}
        query, points, shapes, padding = given['query'], given['points'], given['shapes'], given.get('padding')
        if self.repository == 'd_fine':  # the decoder projects the values and hands in a level each
            return self.attended(query, torch.cat([*given['value']], -1).permute(0, 3, 1, 2), points, shapes)
        if padding is not None and self.repository.startswith('rt_detr'):
            padding = ~padding
        value = query if given.get('value') is None else given['value']
        identity = query if given.get('identity') is None else given['identity']
        query = query if given.get('query_pos') is None else query + given['query_pos']
        first = self.given.get('batch_first', True)
        query, value = (x if first else x.transpose(0, 1) for x in (query, value))
        value = self.value_proj(value)
        value = value if padding is None else value.masked_fill(padding[..., None], 0.0)
        out = self.output_proj(self.attended(query, value.unflatten(-1, (self.heads, -1)), points, shapes))
        out = out if first else out.transpose(0, 1)
        return self.dropout(out) + identity if self.repository == 'detrex' else out


def in_clone(repository: str) -> type[Any]:
    """Return the class of a repository, where a clone has it."""
    place = PLACES[repository]
    return type(
        place.name,
        (Deformable,),
        dict(
            __module__=place.module,
            __qualname__=place.name,
            __init__=with_signature(Deformable.__init__, place.options),
            forward=with_signature(Deformable.forward, place.names),
            repository=repository,
        ),
    )


class Layer(nn.Module):
    """A layer that calls a repository's class as its decoder does.

    Args:
        name: Of :data:`PLACES`.
        **options: Of the class.
    """

    def __init__(self, name: str, **options: Any) -> None:
        super().__init__()
        self.name = name
        self.attn = in_clone(name)(**options)

    def forward(self, query: Tensor, points: Tensor, memory: Tensor, shapes: Tensor, padding: Tensor) -> Tensor:
        """Attend from ``(B, Q, C)`` to ``(B, S, C)``; ``padding (B, S)`` is True where it is."""
        names, starts = PLACES[self.name].names, shapes.prod(-1).cumsum(0) - shapes.prod(-1)
        given: dict[str, Any] = dict(query=query, points=points, value=memory, shapes=shapes.tolist(), padding=padding)
        given.update(starts=starts, key=None, query_pos=query.transpose(0, 1) / 2)
        if self.name in ('dino', 'grounding_dino', 'detrex'):
            given['shapes'] = shapes
        if 'query_pos' in names:
            given.update(query=query.transpose(0, 1), value=memory.transpose(0, 1))
            given = {name: given[what] for name, what in names.items() if what in given}
            return self.attn(**given, further=None).transpose(0, 1)
        if self.name == 'd_fine':
            memory = memory.masked_fill(padding[..., None], 0.0).unflatten(-1, (4, -1)).permute(0, 2, 3, 1)
            given['value'] = memory.split(shapes.prod(-1).tolist(), -1)
        elif self.name.startswith('rt_detr'):
            given['padding'] = ~padding
        return self.attn(*(given[what] for what in names.values()))

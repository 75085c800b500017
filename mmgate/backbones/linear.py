"""PVT and Swin with any attention over the whole map, by its type."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from mmdet.models.backbones.pvt import PyramidVisionTransformerV2

from mmgate.backbones import pvt, swin
from mmgate.backbones.presets import LINEAR_SWIN_BLOCKS, PVT, PVT_V2, SWIN, per_stage, preset
from mmgate.registry import MODELS


@MODELS.register_module()
class LinearPVT(pvt._GatedPVT):
    """PVT with an attention over the whole map in every stage and no spatial reduction, or the vanilla one.

    Args:
        attention: Type and options of the attention, such as ``dict(type='FocusedLinearAttention')``: a registered
            subclass of :class:`~mmgate.layers.base.map.MapAttention`; or a list of them, one a stage. ``map_size``
            is filled in for a type that needs it. None (default) for PVT's own attention over a reduced map, and
            ``dict(type='SoftmaxAttention')`` for the same over the whole map: the partners of comparisons.
        arch: ``'tiny'``, ``'small'``, ``'medium'`` or ``'large'``.
        init: ``'host'`` (default): what is shared with mmdet's PVT starts as there; ``'paper'``: as in the authors'
            code, every linear layer normal with deviation 0.02.
        frozen_stages: How many stages, from the first on, are not trained; -1 for none.
        with_cp: Recompute the blocks in the backward pass.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of PVT's authors and of mmdet are
            recognised: a vanilla checkpoint fills what is shared, see :func:`.pretrained.load_pretrained`.
        **overrides: Arguments of mmdet's ``PyramidVisionTransformer`` in the place of the preset's.

    Raises:
        ValueError: An unknown ``arch`` or type, or as many attentions as there are no stages.
    """

    presets: Mapping[str, Mapping[str, Any]] = PVT

    def __init__(
        self,
        attention: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        arch: str = 'tiny',
        *,
        init: str = 'host',
        frozen_stages: int = -1,
        with_cp: bool = False,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(self.presets, arch, overrides)
        rules = _rules(attention, pvt._map_sizes(fields)[: len(fields['num_layers'])])
        options: dict[str, Any] = dict(init=init, frozen_stages=frozen_stages, with_cp=with_cp)
        super().__init__(rules, **options, fields=fields, init_cfg=init_cfg)


@MODELS.register_module()
class LinearPVTv2(LinearPVT, PyramidVisionTransformerV2):
    """PVTv2 with an attention over the whole map; ``arch`` is ``'b0'`` or ``'b1'``, the rest as :class:`LinearPVT`."""

    presets, convolves = PVT_V2, True


@MODELS.register_module()
class LinearSwin(swin._LinearSwin):
    """Swin with an attention over the whole map in its early blocks, Swin's own windows in the others.

    Args:
        attention: As :class:`LinearPVT`; None (default) for Swin's windows in every block.
        arch: ``'tiny'``, ``'small'`` or ``'base'``.
        blocks: How many blocks of each stage, from its first on, have the attention; all of stages 1 and 2 by default,
            as in FLatten-Swin.
        pad_small_map: Whether windows shift where one of them holds the whole map, as mmdet's do; Swin's classifiers do
            not (mmpretrain's name for it).
        init_cfg: ``dict(type='Pretrained', checkpoint=...)`` or None. The layouts of the authors of Swin, of mmdet and
            mmseg are recognised: a vanilla checkpoint fills what is shared, see :func:`.pretrained.load_pretrained`.
        **overrides: Arguments of mmdet's ``SwinTransformer`` in the place of the preset's.

    Raises:
        ValueError: An unknown ``arch`` or type, or numbers that do not fit the stages.
    """

    def __init__(
        self,
        attention: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
        arch: str = 'tiny',
        *,
        blocks: Sequence[int] | None = None,
        pad_small_map: bool = True,
        init_cfg: dict | None = None,
        **overrides: Any,
    ) -> None:
        fields = preset(SWIN, arch, overrides)
        rules = _rules(attention, swin._map_sizes(fields))
        swapped = per_stage('blocks', LINEAR_SWIN_BLOCKS[arch] if blocks is None else blocks, len(fields['depths']))
        super().__init__(
            rules or [{}] * len(swapped),
            swapped if rules else (0,) * len(swapped),
            pad_small_map=pad_small_map,
            fields=fields,
            init_cfg=init_cfg,
        )


def _rules(
    attention: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None, sizes: Sequence[tuple[int, int]]
) -> list[dict[str, Any]]:
    """Return one rule a stage, with the map's size where the type needs it; none for the vanilla attention."""
    if attention is None:
        return []
    stages = [attention] * len(sizes) if isinstance(attention, Mapping) else list(attention)
    if len(stages) != len(sizes) or not all(isinstance(stage, Mapping) and 'type' in stage for stage in stages):
        raise ValueError(
            f'attention must be a dict(type=..., ...) or one for each of the {len(sizes)} stages, got {attention!r}.'
        )
    rules = []
    for stage, size in zip(stages, sizes, strict=True):
        kind = MODELS.get(stage['type'])
        option = inspect.signature(kind).parameters.get('map_size') if inspect.isclass(kind) else None
        needs_size = option is not None and option.default is inspect.Parameter.empty
        rules.append({**(dict(map_size=size) if needs_size else {}), **stage})
    return rules

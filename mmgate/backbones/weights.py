"""Load published checkpoints into backbones: translate names, resize position terms, check that all tensors fit."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from mmengine.logging import print_log
from torch import Tensor, nn

from mmgate.checkpoints.tensors import State, read_checkpoint, tensors
from mmgate.errors import ConfigError
from mmgate.gate import gates_hidden, is_gate_key, named_gate_parameters
from mmgate.gates.parts.resizing import resize_grid

DERIVED = ('.relative_position_index', '.attn_mask')  # buffers that a backbone computes itself
OUTPUT_NORM = re.compile(r'norm\d\.(weight|bias)')  # Swin's; a classifier has none
OF_AGENTS = re.compile(r'\.attn\.(?:w_msa\.)?((?:an|na|ah|aw|ha|wa|ac|ca)_bias$|dwc\.)')
LAST = 3  # the stage whose map is classified
_TABLE = 'relative_position_bias_table'
_OF_CLASSIFIERS = ('head.', 'norm.', 'head_dist.', 'cls_token')  # not needed by a backbone for dense prediction


class PublishedWeights:
    """Mixin that lets a backbone load published checkpoints and resize their position terms.

    It is listed before the host's class among the bases.

    Attributes:
        attention_type: Type of the attention in its stages if ``attention`` names none; None for the host's.
        pretrain_agents: Default number of agent tokens of each stage in pre-training, for a type that has agents.
    """

    init_cfg: Any
    attention_type: ClassVar[str | None] = None
    pretrain_agents: ClassVar[Sequence[int]] = ()

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the maps ``(B, C_i, H_i, W_i)`` of the stages in ``out_indices`` for images ``(B, 3, H, W)``."""
        return tuple(super().forward(x))  # type: ignore[misc]  # mmpretrain's necks and heads take no list

    def init_weights(self) -> None:
        """Initialise from scratch, or strictly from the checkpoint of a ``Pretrained`` init_cfg."""
        backbone: Any = self
        if self.init_cfg is None:
            super().init_weights()  # type: ignore[misc]
        else:
            with gates_hidden(False):
                load_pretrained(backbone, self.init_cfg)

    def rename(self, state: State) -> State:
        """Return the tensors of a checkpoint, published by the authors or ours, under the names of this backbone."""
        return host_layout(state)

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        backbone: Any = self
        resized = resize_positions(backbone, state_dict, prefix)
        if resized:
            print_log(f'{type(self).__name__}: resized {", ".join(resized)}', logger='current')
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)  # type: ignore[misc]


def load_pretrained(backbone: Any, init_cfg: Mapping[str, Any]) -> None:
    """Load the checkpoint of a ``Pretrained`` init_cfg into a backbone; the authors' tensor names are recognised.

    A checkpoint with the backbone's gates has to fill all of it. One of the vanilla backbone fills the shared
    parameters, and the gates keep their start; so do the output norms that an ImageNet Swin lacks. Positions of another
    resolution are resized.

    Args:
        backbone: A :class:`PublishedWeights` with its attention gated.
        init_cfg: ``dict(type='Pretrained', checkpoint=...)``, path or address; mmdet's form without the type will do.
            With a ``prefix``, such as ``'teacher.backbone.'``, only keys that begin with it are read.

    Raises:
        FileNotFoundError: There is no such file.
        ConfigError: It cannot be downloaded, is no checkpoint, or a key is unknown, missing or of another shape. Such
            keys are listed.
    """
    named = isinstance(init_cfg, Mapping) and 'checkpoint' in init_cfg
    if not named or init_cfg.get('type', 'Pretrained') != 'Pretrained':
        raise ConfigError(
            f"init_cfg of {type(backbone).__name__} must be None or dict(type='Pretrained', checkpoint=...), "
            f'got {init_cfg!r}.'
        )
    source = init_cfg['checkpoint']
    own = backbone.state_dict()
    state = backbone.rename(tensors(read_checkpoint(source), init_cfg.get('prefix')))
    # Norms of outputs that this backbone does not give are left out.
    state = {key: value for key, value in state.items() if key in own or not OUTPUT_NORM.fullmatch(key)}
    gates = tuple(name for name, _ in named_gate_parameters(backbone, remove_duplicate=False))
    vanilla = not any(is_gate_key(key) for key in state)
    may_miss = (*DERIVED, *gates) if vanilla else DERIVED
    try:
        keys = backbone.load_state_dict(state, strict=False)
        missing = [key for key in keys.missing_keys if not key.endswith(may_miss) and not OUTPUT_NORM.fullmatch(key)]
        faults = [f'unknown: {key}' for key in keys.unexpected_keys] + [f'missing: {key}' for key in missing]
    except RuntimeError as error:  # other shapes
        faults = str(error).split('\n\t')[1:]
    if faults:
        listed = '\n  '.join(faults[:20] + [f'... and {len(faults) - 20} more'] * (len(faults) > 20))
        raise ConfigError(
            f'{source} does not fit {type(backbone).__name__} (keys by its names):\n  {listed}\n'
            'The sizes have to be those of the checkpoint: arch, depths or blocks, agents in pre-training.'
        )
    kept = sorted({key.split('.attn.')[-1] for key in keys.missing_keys if not key.endswith(DERIVED)})
    if kept:
        print_log(f'{source} has no {", ".join(kept)}: they keep their start', logger='current')


def resize_positions(backbone: nn.Module, state: dict[str, Any], prefix: str = '') -> list[str]:
    """Resize PVT's position embeddings and Swin's relative position tables in a state dict to the backbone's shapes.

    The interpolation is the hosts': bilinear for embeddings, as in PVT's forward pass on a larger image; bicubic for
    tables. Gates resize their positions themselves.

    Returns:
        The names of the resized tensors.
    """
    resized: dict[str, Tensor] = {}
    for name, module in backbone.named_modules():
        own: Any = module
        table = f'{prefix}{name}.{_TABLE}'
        embedding = f'{prefix}{name}.pos_embed'
        if isinstance(getattr(own, _TABLE, None), Tensor) and isinstance(state.get(table), Tensor):
            height, width = own.window_size
            resized[table] = resize_grid(state[table][None], (2 * height - 1, 2 * width - 1), mode='bicubic')[0]
            index = table.replace('bias_table', 'index')
            if index in state and len(resized[table]) != len(state[table]):
                state[index] = own.relative_position_index
        elif hasattr(own, 'pos_shape') and isinstance(state.get(embedding), Tensor):
            height, width = (int(side) for side in own.pos_shape)
            resized[embedding] = resize_grid(state[embedding], (height, width))
    resized = {key: value for key, value in resized.items() if value.shape != state[key].shape}
    state.update(resized)
    return list(resized)


def host_layout(state: State) -> State:
    """Return the tensors of the authors' PVT or Swin under mmdet's names, without the classifier's head.

    They are in the authors' names of PVT, PVTv2 or Swin, with agent attention or vanilla, or in mmdet's or mmseg's.

    Raises:
        KeyError: A half of a projection is missing; the message is its name.
        ConfigError: The keys are of neither backbone.
    """
    # CSwin and DeiT are read without mmdet.
    from mmdet.models.backbones.pvt import pvt_convert
    from mmdet.models.backbones.swin import swin_converter

    state = {
        key: value for key, value in state.items() if not key.endswith(DERIVED) and not key.startswith(_OF_CLASSIFIERS)
    }
    if any(key.startswith('block1.') for key in state):
        return _in_gates(pvt_convert(state))
    if any(key.startswith('layers.0.blocks.') for key in state):
        return _in_gates({key.removeprefix('backbone.'): value for key, value in swin_converter(state).items()})
    if any(key.startswith(('layers.0.1.', 'stages.0.blocks.')) for key in state):
        return state
    raise ConfigError(
        "Neither the keys of PVT (block1.0...) nor those of Swin (layers.0.blocks.0...), nor mmdet's or mmseg's names "
        f'of them (layers.0.1..., stages.0.blocks.0...): {", ".join(list(state)[:8])}.'
    )


def is_cswin(state: State) -> bool:
    """Return True if a state dict has the keys of the published CSwin."""
    return 'stage1_conv_embed.0.weight' in state


_CSWIN = {
    r'stage1_conv_embed\.0\.': 'embeddings.0.conv.',
    r'stage1_conv_embed\.2\.': 'embeddings.0.norm.',
    r'merge(\d)\.': r'embeddings.\1.',
    r'norm\.': f'norm{LAST}.',
}
_OF_CSWIN_BLOCKS = {
    r'(norm\d\.)': r'\1',
    r'mlp\.fc1\.': 'mlp.0.',
    r'mlp\.fc2\.': 'mlp.2.',
    r'attns\.(\d)\.get_v\.': r'attn.lepe.\1.',
    r'attns\.0\.': 'attn.',
    '': 'attn.',
}
_DEIT = {
    r'patch_embed\.proj\.': 'patch_embed.projection.',
    r'blocks\.(\d+)\.norm([12])\.': r'layers.\1.ln\2.',
    r'blocks\.(\d+)\.mlp\.fc1\.': r'layers.\1.ffn.layers.0.0.',
    r'blocks\.(\d+)\.mlp\.fc2\.': r'layers.\1.ffn.layers.1.',
    r'blocks\.(\d+)\.attn\.': r'layers.\1.attn.',
    r'norm\.': 'ln1.',
    r'(cls_token|pos_embed)$': r'\1',
}


def cswin_layout(state: State) -> State:
    """Return the tensors of the authors' CSwin, with agents or vanilla, under mmgate's names, without the head.

    Names may be the authors' or mmgate's already; mmgate's are kept.
    """
    converted = {}
    for key, value in state.items():
        block = re.match(r'stage(\d)\.(\d+)\.', key)
        if block:
            rest = _renamed(key[block.end() :], _OF_CSWIN_BLOCKS)
            if f'{block.group()}attns.0.an_bias' in state:  # agents have one convolution
                rest = rest.replace('lepe.0.', 'dwc.')
            converted[f'stages.{int(block.group(1)) - 1}.{block.group(2)}.{rest}'] = value
        elif not key.startswith('head.'):
            converted[_renamed(key, _CSWIN)] = value
    return _in_gates(converted)


def is_deit(state: State) -> bool:
    """Return True if a state dict has the keys of the published DeiT."""
    return 'blocks.0.attn.qkv.weight' in state


def deit_layout(state: State) -> State:
    """Return the tensors of the authors' DeiT, with agents or vanilla, under mmpretrain's names, without the head.

    Raises:
        ConfigError: A key is unknown, or the model is distilled.
    """
    if 'dist_token' in state:
        raise ConfigError('A distilled DeiT predicts from two tokens; take the one without distillation.')
    state = {key: value for key, value in state.items() if not key.startswith('head.')}
    unknown = [key for key in state if not any(re.match(old, key) for old in _DEIT)]
    if unknown:
        listed = ', '.join(unknown)
        raise ConfigError(f"The checkpoint does not convert (keys as DeiT's authors name them): unknown: {listed}")
    return _in_gates({_renamed(key, _DEIT): value for key, value in state.items()})


def _in_gates(state: State) -> State:
    """Rename agent attention's tensors from beside the projections, where authors have them, to below ``gate``."""
    return {OF_AGENTS.sub(r'.attn.gate.\1', key): value for key, value in state.items()}


def _renamed(key: str, names: Mapping[str, str]) -> str:
    """Return a tensor's name with its beginning replaced by the first of the patterns that matches."""
    return next((re.sub(f'^{old}', new, key) for old, new in names.items() if re.match(old, key)), key)

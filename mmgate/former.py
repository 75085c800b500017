"""Facts of mmgate 0.2 that a refusal or a warning names until 0.4, when this file goes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase

from mmgate.errors import OptionError

NOTHING = 'nothing'
NOTED = 'mmgate.note(self, name, value) where the value is computed'
# By the name of a declaration that is no longer read, what is written instead.
OF_GATES = {
    'reset_gate': 'reset',
    'two_streams': "refuse_to_split(sizes, 'splits heads in two') in the constructor",
    'adds_queries': "refuse_to_split(sizes, 'adds a second set of queries') in the constructor",
    'adds_to_queries': 'self.scaled(...) around what attend adds to the queries',
    'attends_twice': 'refuse_to_split(sizes, ...) in the constructor',
    'acts_after_projection': 'finish alone, which acts on sizes.output_width channels',
    'gates_by_vectors': 'nothing; register an adapter for the class of the gate',
    'trial_rate': 'nothing; give try_gates.py --gate-rate',
    'prepare_count': NOTHING,
    'in_vit': "nothing; a rule has init='vit'",
    **dict.fromkeys(('read_gate', 'unchanged_value', 'attention_map', 'weighed_values', 'read_map'), NOTED),
    'gate_readings': "mmgate.note(self, 'gate', value, axes) where the value is computed",
    'map_readings': 'mmgate.note(self, name, value) where the value is computed',
}
OF_ADAPTERS = {
    'check_host': 'check',
    'check_gate': 'the reason in why_whole_heads or why_no_gate of Sizes',
    'build_gate': 'a dict of Sizes, by name, that sizes returns for several gates',
    'make_gate': 'check and sizes',
    'own_gates': 'check',
    'host_signature': "nothing; the signature is always the host's",
    'vits': "nothing; a rule has init='vit'",
    'is_in_vit': "nothing; a rule has init='vit'",
    'recognises': 'the names of the classes in adapts',
    'after_gating': 'sizes_from_model, which returns fields of Sizes that the model around the host tells',
    'map_of_images': 'sizes_from_model',
    'embedded_map': 'sizes_from_model',
    'leaves_out': 'unused',
    'over_channels': NOTHING,
    'gate_type': 'nothing, and register the class of the gate',
    'after_switch_on': NOTHING,
    'before_switch_off': NOTHING,
}
# Patterns of packages, modules and classes of vision transformers, each for one part of a dotted name.
VITS = (
    *('backbones', 'mmpretrain', 'timm', 'vision_transformer', 'swin_transformer', 'vit', 'deit', 'dinov2*'),
    *('dinov3_vit', 'swin', 'segformer', 'RfDetrDinov2*'),
)


def refuse_former(cls: type, instead: dict[str, str]) -> None:
    """Raise TypeError if a class of another package declares what mmgate no longer reads.

    Args:
        cls: The class of a gate or an adapter.
        instead: What is written instead, by the name that is refused.
    """
    if cls.__module__.partition('.')[0] == 'mmgate':
        return
    for name in vars(cls).keys() & instead.keys():
        raise TypeError(
            f'{cls.__qualname__} declares {name!r}, which mmgate no longer reads. Write instead: {instead[name]}.'
        )


def refuse_former_options(where: str, options: Mapping[str, object]) -> None:
    """Raise OptionError for an option of a rule that meant something else in mmgate 0.2."""
    if 'class_token' in options:
        raise OptionError(f'{where}: the model tells its class tokens; leave class_token out.')
    if 'map_size' in options and options['map_size'] is None:
        raise OptionError(
            f'{where}: map_size=None would be what the model tells; leave it out for that, or write '
            'position_encoding=False for no position encoding.'
        )


def was_in_vit(around: Iterable[type]) -> bool:
    """Return True if 0.2 took a host for part of a vision transformer, by the classes of it and the modules around."""
    parts = {part for cls in around for part in f'{cls.__module__}.{cls.__qualname__}'.split('.')}
    return any(fnmatchcase(part, vit) for part in parts for vit in VITS)

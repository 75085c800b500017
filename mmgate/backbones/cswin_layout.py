"""CSwin in its authors' names, with agent attention or vanilla, as our backbone names it."""

from __future__ import annotations

import re
from collections.abc import Container

from mmgate.checkpoints.tensors import State

LAST = 3  # the stage whose output has the classifier's norm


def is_cswin(state: State) -> bool:
    """Return whether the keys are those of CSwin's authors."""
    return 'stage1_conv_embed.0.weight' in state


def cswin_layout(state: State, own: Container[str]) -> State:
    """Return the tensors of a CSwin under our names, less the head; ours pass as they are.

    Args:
        state: In the authors' names of CSwin, with agent attention or vanilla, or in ours.
        own: The names in the backbone that is to hold them. Where it has agents, the convolutions in a vanilla block's
            stripes have no place.
    """
    agents = {key.removesuffix('attns.0.an_bias') for key in state if key.endswith('attns.0.an_bias')}
    converted = {}
    for key, value in state.items():
        key = key.removeprefix('backbone.')
        if key.startswith('head.'):
            continue
        key = re.sub(r'^stage1_conv_embed\.0\.', 'embeddings.0.conv.', key)
        key = re.sub(r'^stage1_conv_embed\.2\.', 'embeddings.0.norm.', key)
        key = re.sub(r'^merge(\d)\.', r'embeddings.\1.', key)
        key = re.sub(r'^norm\.', f'norm{LAST}.', key)
        block = re.match(r'stage(\d)\.(\d+)\.', key)
        if block:
            rest = key[block.end() :]
            lepe = 'dwc.' if block.group() in agents else r'lepe.\1.'
            rest = re.sub(r'^attns\.(\d)\.get_v\.', lepe, rest)
            rest = re.sub(r'^attns\.0\.', '', rest)
            rest = rest.replace('mlp.fc1.', 'mlp.0.').replace('mlp.fc2.', 'mlp.2.')
            inner = '' if rest.startswith(('norm', 'mlp')) else 'attn.'
            key = f'stages.{int(block.group(1)) - 1}.{block.group(2)}.{inner}{rest}'
        if key in own or '.lepe.' not in key:
            converted[key] = value
    return converted

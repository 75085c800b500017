"""Hold a published model's gated attention in ours: the gate's rows are part of its query projection."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from projects.gated_lm.model import CausalAttention


def split_joint(joint: Tensor, heads: int, kv_heads: int, head_dim: int, layout: str) -> tuple[Tensor, Tensor]:
    """Return the rows of the query ``(H d, ...)`` and of the gate ``(H d, ...)`` or ``(H, ...)``.

    Args:
        joint: Weight ``(rows, C)`` or bias ``(rows,)``.
        heads: Query heads H.
        kv_heads: Key heads Hk.
        head_dim: Channels d of a head.
        layout: ``'transformers'`` (Qwen3-Next): for each head d rows of its query, then d of its gate;
            ``'elementwise'`` or ``'headwise'`` (the paper's release): for each key head the rows of its H / Hk queries,
            then those of their gates, d or one for each.
    """
    blocks, gate_dim = heads if layout == 'transformers' else kv_heads, 1 if layout == 'headwise' else head_dim
    members = heads // blocks
    query, gate = joint.unflatten(0, (blocks, -1)).split((members * head_dim, members * gate_dim), 1)
    return query.flatten(0, 1), gate.flatten(0, 1)


def convert(config: Mapping[str, Any], state: Mapping[str, Tensor]) -> CausalAttention:
    """Return one layer's attention from its ``q_proj.weight``, ... and its model's ``config.json``."""
    width, heads, kv_heads = (config[k] for k in ('hidden_size', 'num_attention_heads', 'num_key_value_heads'))
    size, rope = config.get('head_dim') or width // heads, config.get('rope_parameters') or config
    layout = next((k for k in ('elementwise', 'headwise') if config.get(f'{k}_attn_output_gate')), 'transformers')
    ours = dict(state)
    for kind in ('weight', 'bias'):
        if f'q_proj.{kind}' in state:
            rows = split_joint(state[f'q_proj.{kind}'], heads, kv_heads, size, layout)
            ours[f'q_proj.{kind}'], ours[f'gate.gate_{kind}'] = rows
    ours.setdefault('gate.gate_bias', ours['gate.gate_weight'].new_zeros(len(ours['gate.gate_weight'])))
    if layout == 'transformers':  # its norms multiply by 1 + w
        ours |= {name: 1 + state[name] for name in ('q_norm.weight', 'k_norm.weight')}
    module = CausalAttention(
        width, heads, kv_heads, size, dict(granularity='headwise' if layout == 'headwise' else 'elementwise'),
        norm_eps=config['rms_norm_eps'] if 'q_norm.weight' in state else None, bias='q_proj.bias' in state,
        rotated=rope.get('partial_rotary_factor') or 1.0, theta=rope['rope_theta']
    )  # fmt: skip
    module.to(ours['q_proj.weight'].dtype).load_state_dict(ours)
    return module

"""Train gates alone, save, load, switch off and remove them, as one does with LoRA and the like."""

from __future__ import annotations

from .files import gates_content, load_gates, put_gates, save_gates
from .removal import gates_disabled, restore_attention
from .training import TRAINS, gate_parameters, train_only_gates

__all__ = [
    'TRAINS',
    'gate_parameters',
    'gates_content',
    'gates_disabled',
    'load_gates',
    'put_gates',
    'restore_attention',
    'save_gates',
    'train_only_gates',
]

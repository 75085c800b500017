"""Take the gates out of a whole checkpoint into a file of their own, or put such a file's back into a vanilla one.

python tools/model_converters/gates.py extract CONFIG CHECKPOINT gates.safetensors
python tools/model_converters/gates.py merge VANILLA_CHECKPOINT gates.safetensors CHECKPOINT
"""

import argparse
import os
import sys
from copy import copy
from pathlib import Path

import torch
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import CheckpointLoader, load_checkpoint

from mmgate import save_gates
from mmgate.checkpoints.gates_file import read_gates
from mmgate.errors import ConfigError
from mmgate.train import cli
from mmgate.train.config_file import read_config


def main(argv: list[str]) -> None:
    """Parse arguments, extract or merge; nothing is written if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    extract = commands.add_parser('extract', help='write the gates of a checkpoint')
    extract.add_argument('config', help='config of the gated model')
    extract.add_argument('checkpoint', help='its checkpoint')
    merge = commands.add_parser('merge', help='write a checkpoint of the gated model')
    merge.add_argument('checkpoint', help='checkpoint of the vanilla model')
    merge.add_argument('gates', help='file of gates')
    for command in (extract, merge):
        command.add_argument('out', help='file to write')
        command.add_argument('--force', action='store_true', help='replace an existing file')
    args = parser.parse_args(argv)
    if Path(args.out).exists() and not args.force:
        raise ConfigError(f'{args.out} exists; choose another name or pass --force.')
    if args.command == 'merge':
        count = _merge(args.checkpoint, args.gates, args.out)
    else:
        cfg = read_config(args.config)
        init_default_scope(cfg.get('default_scope') or 'mmengine')
        model = MODELS.build(cfg.model)
        load_checkpoint(model, args.checkpoint, map_location='cpu')
        save_gates(model, args.out)
        count = len(read_gates(args.out).tensors)
    print(f'{args.out}: {count} tensors')


def _merge(checkpoint: str, gates: str, out: str) -> int:
    content = read_gates(gates)
    try:
        whole = CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f'{checkpoint}: {error}') from error
    state = copy(whole.get('state_dict', whole))  # with the versions of modules that state dicts carry
    shapes = {name: list(tensor.shape) for name, tensor in state.items() if isinstance(tensor, torch.Tensor)}
    content.refuse_other(gates, checkpoint, shapes)
    content.warn_of_other_values(gates, state)
    state.update(content.tensors)
    beside = f'{out}.part'
    torch.save(dict(state_dict=state, meta=whole.get('meta', {})), beside)
    os.replace(beside, out)
    return len(state)


if __name__ == '__main__':
    sys.exit(cli.main(main))

"""Extract the gates of a whole checkpoint into a gates file, or merge a gates file into a vanilla checkpoint.

python tools/model_converters/gates.py extract CONFIG CHECKPOINT gates.safetensors
python tools/model_converters/gates.py merge VANILLA_CHECKPOINT gates.safetensors CHECKPOINT
"""

from __future__ import annotations

import argparse
import os
import sys
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mmengine.config import DictAction

from mmgate.analysis.arguments import run
from mmgate.errors import ConfigError
from mmgate.mm.config_file import add_trust_option
from mmgate.mm.gate_options import add_gate_options, configured

if TYPE_CHECKING:
    from mmgate.checkpoints.gates_file import GatesFile


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest='command', required=True)
    extract = commands.add_parser('extract', help='write the gates of a checkpoint')
    extract.add_argument('config', help='config of the gated model')
    extract.add_argument('checkpoint', help='its checkpoint')
    changed = "settings of the training, such as model.train='attention', by which more than the gates is written"
    extract.add_argument('--cfg-options', nargs='+', action=DictAction, default={}, help=changed)
    add_gate_options(extract)
    merge = commands.add_parser('merge', help='write a checkpoint of the gated model')
    merge.add_argument('checkpoint', help='checkpoint of the vanilla model')
    merge.add_argument('gates', help='file of gates')
    for command in (extract, merge):
        command.add_argument('out', help='file to write')
        command.add_argument('--force', action='store_true', help='replace an existing file')
        add_trust_option(command)
    return parser


def main(argv: list[str]) -> None:
    """Parse arguments, extract or merge; nothing is written if anything is wrong."""
    args = parser().parse_args(argv)
    if Path(args.out).exists() and not args.force:
        raise ConfigError(f'{args.out} exists; choose another name or pass --force.')
    if not Path(args.out).absolute().parent.is_dir():
        raise ConfigError(f'{args.out}: there is no such folder to write into.')
    if args.command == 'merge':
        print(f'{args.out}: {_merge(args.checkpoint, args.gates, args.out)} tensors')
    else:
        content = _extract(args)
        print(f'{args.out}: {len(content.tensors)} tensors of a model with train={content.trained!r}')


def _extract(args: argparse.Namespace) -> GatesFile:
    from mmengine.registry import MODELS, init_default_scope

    from mmgate import gate_parameters, save_gates
    from mmgate.checkpoints.gates_file import read_gates
    from mmgate.mm.other_options import other_options

    cfg = configured(args)
    init_default_scope(cfg.get('default_scope') or 'mmengine')
    model = MODELS.build(cfg.model)
    whole = _load(args.checkpoint, model)
    given = whole.get('state_dict', whole)
    shapes = {name.removeprefix('module.'): getattr(tensor, 'shape', None) for name, tensor in given.items()}
    other = other_options(model, whole, cfg.model)
    if other:
        raise ConfigError(
            f'{args.checkpoint} has gates that were trained with other options than {args.config} gives: {other}. Give '
            'the config, or the --gate, that they were trained with.'
        )
    missing = [name for name, gate in gate_parameters(model).items() if shapes.get(name) != gate.shape]
    if missing:
        raise ConfigError(
            f'{args.checkpoint} lacks {len(missing)} parameters of the gates of {args.config}, such as {missing[0]}; '
            'give the checkpoint of a model that was trained with them.'
        )
    save_gates(model, args.out)
    return read_gates(args.out)


def _load(checkpoint: str, model: Any = None) -> Any:
    """Return the content of a file; a model that is given is filled."""
    from mmengine.runner import CheckpointLoader, load_checkpoint

    try:
        if model is None:
            return CheckpointLoader.load_checkpoint(checkpoint, map_location='cpu')
        return load_checkpoint(model, checkpoint, map_location='cpu')
    except (ImportError, OSError, ValueError) as error:
        raise ConfigError(f'{checkpoint}: {error}') from error


def _merge(checkpoint: str, gates: str, out: str) -> int:
    import torch

    from mmgate.checkpoints.gates_file import read_gates

    content = read_gates(gates)
    whole = _load(checkpoint)
    state = copy(whole.get('state_dict', whole))  # with the versions of modules that state dicts carry
    content = content.fitted(gates, {name: one for name, one in state.items() if isinstance(one, torch.Tensor)})
    content.warn_of_other_values(gates, state)
    state.update(content.tensors)
    beside = f'{out}.part'
    torch.save(dict(state_dict=state, meta=whole.get('meta', {})), beside)
    os.replace(beside, out)
    return len(state)


if __name__ == '__main__':
    sys.exit(run(parser, main))

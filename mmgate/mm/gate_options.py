"""The command-line options ``--gate``, ``--gates`` and ``--train``, which gate the model of any config.

:func:`put_rules` writes into the config what a file would say: the type ``mmgate.Gated`` with rules or a gates file,
what trains, and the constructor of the optimizer, with the settings of gates. The Runner then builds the model
by ``mmgate/gated.py``: first the model without gates, then ``swap_attention`` puts a gate into each module
that a rule names; gates are initialised last. ``mmgate/mm/cli.py`` calls :func:`configured` and starts the Runner.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from mmengine.config import Config

from mmgate.errors import ConfigError

from .config_file import merge_options, read_config, type_name

if TYPE_CHECKING:
    from .parameter_groups import GroupedOptimWrapperConstructor

DEFAULT = 'DefaultOptimWrapperConstructor'


def add_gate_options(parser: argparse.ArgumentParser) -> None:
    """Add the options ``--gate``, ``--gates`` and ``--train`` to a parser."""
    add_gate_option(parser)
    parser.add_argument(
        '--gates', metavar='FILE', help='put the gates of a gates file on the model of CONFIG, instead of --gate'
    )
    parser.add_argument(
        '--train',
        choices=('all', 'gates', 'attention'),
        help="what of a gated model trains: its gates, the gated modules, or all (CONFIG's)",
    )


def add_gate_option(parser: argparse.ArgumentParser) -> None:
    """Add the option ``--gate`` to a parser."""
    parser.add_argument(
        '--gate',
        action='append',
        default=[],
        metavar="'PATH=TYPE(option=value, ...)'",
        help='gate the modules at PATH of the model of CONFIG; may be given again. list_attention.py prints paths and '
        'types',
    )


def configured(args: argparse.Namespace) -> Config:
    """Return the config that parsed arguments describe, with the gates that their options ask for.

    Raises:
        ConfigError: The config cannot be read, an option cannot be merged, or a gate cannot be put on the model.
    """
    cfg = read_config(args.config)
    merge_options(cfg, args.cfg_options or {})
    put_rules(cfg, args.gate, gates=args.gates, train=args.train)
    settings = (cfg.get('optim_wrapper') or {}).get('paramwise_cfg') or {}
    if any(key.partition('.')[0] == 'mmgate' for key in settings.get('custom_keys') or {}):
        from .parameter_groups import GateOptimWrapperConstructor

        import_mmgate(cfg)
        group_parameters(cfg, GateOptimWrapperConstructor)  # no other one reads these keys
    return cfg


def put_rules(cfg: Config, rules: Iterable[str], *, gates: str | None = None, train: str | None = None) -> None:
    """Change a config so that its model gets gates, as a config file that inherits it would.

    The optimizer is then built by :class:`.GateOptimWrapperConstructor`, after the config's own constructor.

    Args:
        cfg: Config of any mm package, vanilla or gated. It is changed, and the files that it inherits are not. Dumped
            into a file, it is a config that runs by itself.
        rules: Texts of ``--gate``, see :func:`mmgate.rules.read_rules`. They join the rules that the config has.
        gates: Gates file, which places its gates.
        train: What trains, see :func:`mmgate.train_only_gates`.

    Raises:
        ConfigError: A rule cannot be read or names no gate, the file holds no gates, both are given, or ``train`` asks
            for gates and there are none.
    """
    from mmgate.checkpoints.gates_file import read_gates
    from mmgate.rules import check_rules, read_rules

    from .parameter_groups import GateOptimWrapperConstructor

    added = [rule for text in rules for rule in read_rules(text)]
    if added and gates:
        raise ConfigError(f'--gates {gates} places its gates; leave --gate away, or the file.')
    if not (added or gates or train):
        return
    if not cfg.get('model'):
        raise ConfigError(f'config {cfg.filename} has no model to gate.')
    check_rules(added)
    if added or gates:
        import_mmgate(cfg)
        if type_name(cfg.model) != 'Gated':
            cfg.model = dict(cfg.model, type='mmgate.Gated', host=type_path(cfg.model.type))
        group_parameters(cfg, GateOptimWrapperConstructor)
    if added:
        given = cfg.model.get('attention') or ()
        cfg.model.attention = [*([given] if isinstance(given, Mapping) else given), *added]
    if gates:
        read_gates(gates)
        cfg.model.gates = gates
    if train and type_name(cfg.model) == 'Gated':
        cfg.model.train = train
    elif train and train != 'all':
        raise ConfigError(f'--train {train}: the model of {cfg.filename} has no gates; give --gate or --gates.')


def import_mmgate(cfg: Config) -> None:
    """Add mmgate to the ``custom_imports`` of a config, so that any tool can build its model."""
    given = cfg.get('custom_imports') or dict(imports=[], allow_failed_imports=False)
    names = [given['imports']] if isinstance(given['imports'], str) else list(given['imports'])
    if not any(name.partition('.')[0] == 'mmgate' for name in names):
        cfg.custom_imports = dict(given, imports=['mmgate', *names])


def type_path(model_type: Any) -> str:
    """Return the name by which a config's type is found; a dump is text, in which a class is its import path."""
    return model_type if isinstance(model_type, str) else f'{model_type.__module__}.{model_type.__qualname__}'


def group_parameters(cfg: Config, constructor: type[GroupedOptimWrapperConstructor]) -> None:
    """Let a constructor of mmgate build the optimizer of a config, after the config's own constructor.

    A config that has the constructor already, or that of gates, stays as it is.
    """
    from .parameter_groups import GateOptimWrapperConstructor, GroupedOptimWrapperConstructor

    wrapper: Any = cfg.get('optim_wrapper') or {}
    given = type_path(wrapper.get('constructor') or DEFAULT)
    name = given.rpartition('.')[2]
    # Several optimizers without a constructor are built one by one.
    is_built = 'optimizer' in wrapper or 'constructor' in wrapper
    if not is_built or name in (constructor.__name__, GateOptimWrapperConstructor.__name__):
        return
    options = dict(wrapper.get('paramwise_cfg') or {})
    if name == GroupedOptimWrapperConstructor.__name__:
        given = options.pop(GroupedOptimWrapperConstructor.named, DEFAULT)
    if given.rpartition('.')[2] != DEFAULT:
        options[constructor.named] = given
    wrapper.constructor = f'mmgate.{constructor.__name__}'
    if options:
        wrapper.paramwise_cfg = options

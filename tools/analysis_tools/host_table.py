"""Write a table of the gates that fit each attention of mmdet's and mmseg's zoos into configs/README.md."""

import argparse
import logging
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

from mmengine.config import Config

import mmgate  # noqa: F401
from mmgate.analysis.structure import build_structure, list_attention
from mmgate.errors import ConfigError
from mmgate.gates.base.deformable import DeformableGate
from mmgate.gates.base.dense import DenseGate
from mmgate.gates.base.map import MapGate
from mmgate.gating import make_gate
from mmgate.hosts import adapter_for, gates_for
from mmgate.hosts.table import gate_of_type, registered_gates
from mmgate.mm import cli

README = Path(__file__).parents[2] / 'configs/README.md'
BEGIN = '<!-- host_table.py begins -->\n'
END = '<!-- host_table.py ends -->\n'
PACKAGES = ('mmdet', 'mmseg')
SKIPPED = ('_base_', 'common', 'dsdl', 'empirical_attention', 'misc', 'selfsup_pretrain', 'timm_example')
REASONS = {  # of a class without an adapter
    'ChannelAttention': 'weighs channels, there are no queries and keys',
    'CrissCrossAttention': 'attends along rows and columns without forming heads',
    'GeneralizedAttention': 'a sum of up to four terms, of which only one is a product of queries and keys',
    'MSCAAttention': 'a sum of convolutions, there are no queries and keys',
    'MSCASpatialAttention': 'convolutions around MSCAAttention',
}
KINDS = {'deformable': DeformableGate, 'dense': DenseGate, 'map': MapGate}


@dataclass
class Host:
    """The attentions of one config whose names differ in numbers only.

    Attributes:
        package: ``'mmdet'`` or ``'mmseg'``.
        config: The config, below the package's configs.
        path: Pattern for a rule.
        class_name: Class of the attentions.
        count: Number of attentions that match.
        gates: Number of attentions that each gate fits, by its name.
        refusals: Reason why a gate does not fit, by its name.
    """

    package: str
    config: str
    path: str
    class_name: str
    count: int = 0
    gates: dict[str, int] = field(default_factory=dict)
    refusals: dict[str, str] = field(default_factory=dict)


def configs_of(package: str) -> Path:
    """Return the folder of a package's configs, which may not exist."""
    spec = find_spec(package)
    return Path((spec and spec.origin) or '').parent / '.mim/configs'


def zoo(package: str) -> Iterator[str]:
    """Yield one config of every architecture and family of backbones in the zoo of ``package``, if it is installed."""
    root = configs_of(package)
    seen: set[tuple[str, ...]] = set()
    # short names first: they are the plain configs
    for path in sorted(root.glob('*/*.py'), key=lambda path: (path.parent.name, len(path.name), path.name)):
        words = path.stem.split('_')
        families = [re.match('[a-z]*', word) for word in words[1:3]]  # of backbone and head, without their sizes
        key = (path.parent.name, *(family.group() for family in families if family))
        if path.parent.name not in SKIPPED and key not in seen:
            seen.add(key)
            yield path.relative_to(root).as_posix()


def hosts_in(package: str, config: str) -> list[Host]:
    """Return the attentions of a config's model.

    Raises:
        ConfigError: The config's model cannot be built here.
    """
    root = configs_of(package)
    try:
        cfg = Config.fromfile(root / config)
        if 'model' not in cfg:
            return []
        model = build_structure(cfg)
    except (ConfigError, ImportError, OSError) as error:  # its custom_imports, or a base that the zoo lacks
        why = shortened(str(error).removeprefix(f'the model of {root / config} '), root)
        raise ConfigError(f'`{package}::{config}`: {why}') from error
    hosts: dict[tuple[str, str], Host] = {}
    for attention in list_attention(model):
        path = re.sub(r'\d+(?=\.|$)', '*', attention.path)
        host = hosts.setdefault((path, attention.class_name), Host(package, config, path, attention.class_name))
        host.count += 1
        module = model.get_submodule(attention.path)
        for gate in gates_for(module):
            adapter, child = adapter_for(gate_of_type(gate), module)  # type: ignore[misc, arg-type]
            try:
                make_gate(adapter, module.get_submodule(child), gate_of_type(gate))  # type: ignore[arg-type]
            except TypeError:  # an option to write, such as image_size
                pass
            except ValueError as error:
                host.refusals[gate.__name__] = str(error)
                continue
            host.gates[gate.__name__] = host.gates.get(gate.__name__, 0) + 1
    return list(hosts.values())


def shortened(message: str, root: Path) -> str:
    """Return the first line of an error about the zoo in ``root``, without what differs from machine to machine."""
    line = message.splitlines()[0].replace(f'{root}/', '').replace(f'{root.parents[2]}/', '')
    return re.sub(r'\s+', ' ', line.partition(', the current sys.path')[0]).strip()


def markdown(hosts: list[Host], unbuilt: list[str]) -> str:
    """Return the table, with one row for architectures of equal cells, and a list of configs that cannot be built."""
    rows: dict[tuple[str, str, str, str], list[str]] = {}
    for host in hosts:
        folders = rows.setdefault((host.package, host.path, host.class_name, _cell(host)), [])
        folder = host.config.split('/')[0]
        if folder not in folders:
            folders.append(folder)
    lines = [f'- **{kind}**: {", ".join(f"`{gate}`" for gate in gates)}' for kind, gates in kinds().items()]
    lines += ['', '| zoo | architectures | path | attention | gates that fit |', '|---|---|---|---|---|']
    for (package, path, class_name, cell), folders in rows.items():
        lines.append(f'| {package} | {", ".join(folders)} | `{path}` | {class_name} | {cell} |')
    if unbuilt:
        lines += ['', 'Not built here:', '', *(f'- {line}' for line in unbuilt)]
    return '\n'.join(lines) + '\n'


def kinds() -> dict[str, list[str]]:
    """Return mmgate's gates by the kind under which the table names them, where a host takes all of the kind."""
    named: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for gate in registered_gates():
        if gate.__module__.startswith('mmgate.'):
            (kind,) = (kind for kind, base in KINDS.items() if issubclass(gate_of_type(gate), base))
            named[kind].append(gate.__name__)
    return {kind: sorted(gates) for kind, gates in named.items()}


def _cell(host: Host) -> str:
    if not host.gates and not host.refusals:
        return f'none: {REASONS.get(host.class_name, "no adapter")}'
    left = dict(host.gates)
    fits = []
    for kind, gates in kinds().items():
        if set(gates) <= left.keys() - host.refusals.keys():
            fits.append(f'**{kind}**')
            left = {gate: count for gate, count in left.items() if gate not in gates}
    fits += [f'`{gate}`{" (not all)" if gate in host.refusals else ""}' for gate in sorted(left)]
    return ' '.join([', '.join(fits) or 'none', *(f'<br>{reason}' for reason in reasons(host.refusals))])


def reasons(refusals: dict[str, str]) -> list[str]:
    """Return the reasons why gates do not fit; gates with the same reason are listed together."""
    gates: dict[str, list[str]] = {}
    for gate in sorted(refusals):
        reason = refusals[gate].removeprefix(f'{gate} ')
        gates.setdefault(reason, []).append(gate)
    return [f'{", ".join(names)}: {reason}' for reason, names in gates.items()]


def main(argv: list[str]) -> None:
    """Parse arguments, read the zoos and replace the text between the file's markers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('--file', type=Path, default=README, help='file with the markers')
    parser.add_argument('--print', action='store_true', help='print the table and leave the file as it is')
    args = parser.parse_args(argv)
    text = args.file.read_text()
    if not args.print and not (BEGIN in text and END in text):
        raise ConfigError(f'{args.file} lacks the markers {BEGIN.strip()} and {END.strip()}.')
    logging.getLogger('mmengine').setLevel(logging.ERROR)
    hosts = []
    unbuilt = []
    for package in PACKAGES:
        for config in zoo(package):
            print(f'{package}::{config}', file=sys.stderr)
            try:
                hosts += hosts_in(package, config)
            except ConfigError as error:
                unbuilt.append(str(error).splitlines()[0])
    table = markdown(hosts, unbuilt)
    if args.print:
        print(table, end='')
    else:
        args.file.write_text(text.split(BEGIN)[0] + BEGIN + table + END + text.split(END)[1])


if __name__ == '__main__':
    sys.exit(cli.main(main))
